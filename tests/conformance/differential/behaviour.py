"""The module and the callback of a run, written once: what they record, log and do is the same on both sides.

`Probe` holds what is recorded. `Model` is mixed into a LightningModule of either side, `Recorder` into a Callback;
`with_hooks` adds the hooks that the configuration wants to see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from conformance.differential.data import leaves, make_loaders

SHARED_EPOCH = [
    f"on_{stage}_{event}"
    for stage in ("train", "validation", "test", "predict")
    for event in ("start", "epoch_start", "epoch_end", "end")
] + ["setup", "teardown", "on_fit_start", "on_fit_end"]
SHARED_BATCH = [
    f"on_{stage}_batch_{event}" for stage in ("train", "validation", "test", "predict") for event in ("start", "end")
]
SHARED_OPTIMIZER = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
CALLBACK_ONLY = ["on_sanity_check_start", "on_sanity_check_end", "on_exception", "on_save_checkpoint", "state_dict"]
MODULE_ONLY = [
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_model_train",
    "prepare_data",
    "configure_callbacks",
    "on_save_checkpoint",
]
MODULE_OPTIMIZER = ["optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"]


class Planned(ValueError):
    """The error that a configuration asks for."""


class Probe:
    """What a run recorded.

    Args:
        config: The configuration.

    Attributes:
        events: Pairs of a text, which has to be equal, and numbers, which have to be close.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.events: list[tuple[str, dict[str, float]]] = []
        self.calls = 0

    def add(self, text: str, **numbers: Any) -> None:
        """Record an event."""
        self.events.append((text, {name: number(value) for name, value in numbers.items()}))

    def hook(self, owner: str, name: str, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of a hook: where the run stands, indices, the batch's sum, the metrics that are visible."""
        text = f"{owner}.{name}"
        shown = [str(each) for each in args if isinstance(each, int)]
        shown += [f"{key}={getattr(each, 'value', each)}" for key, each in kwargs.items() if key == "stage"]
        text += "(" + ",".join(shown) + ")"
        numbers: dict[str, float] = {}
        if trainer is not None:
            stage = trainer.state.stage
            where = None if stage is None else stage.value
            training = getattr(trainer.lightning_module, "training", None)
            text += f" @{where} e{trainer.current_epoch} g{trainer.global_step} train={training}"
        if name.endswith(("_batch_start", "_batch_end")):
            outputs, batch = (None, args[0]) if name.endswith("start") else args[:2]
            numbers["batch"] = sum(float(leaf.sum()) for leaf in leaves(batch))
            if isinstance(outputs, dict):
                numbers.update((f"out.{key}", number(value)) for key, value in outputs.items())
        where_rates_are = ("on_train_", "on_validation_", "lr_scheduler_step")
        fitting = trainer is not None and trainer.state.fn == "fit" and name.startswith(where_rates_are)
        if fitting and self.config.get("schedulers") and trainer.optimizers:
            numbers["lr"] = number(trainer.optimizers[0].param_groups[0]["lr"])
        if name == "lr_scheduler_step" and args[1] is not None:
            numbers["metric"] = number(args[1])
        if owner == "callback" and trainer is not None and name in self.config["trace"]["observe"]:
            numbers.update(visible_metrics(trainer))
        self.events.append((text, numbers))

    def wanted(self, plan: dict[str, Any] | None, hook: str, trainer: Any, args: tuple[Any, ...]) -> bool:
        """Say whether a planned deed is due in this hook now."""
        if plan is None or plan["hook"] != hook or trainer is None or trainer.sanity_checking:
            return False
        index = next((each for each in args if isinstance(each, int)), plan["batch"])
        return bool(trainer.current_epoch == plan["epoch"] and index == plan["batch"])

    def host_value(self, trainer: Any) -> float:
        """Return a number that is new at every call and the same on both sides."""
        self.calls += 1
        return float(0.25 * self.calls % 8 + trainer.global_step * 0.5 - trainer.current_epoch)

    def host_logs(self, owner: str, hook: str, trainer: Any, target: Any, args: tuple[Any, ...]) -> None:
        """Make the log calls that the configuration wants from this hook."""
        for log in self.config["logs"]:
            if log["owner"] != owner or log["hook"] != hook:
                continue
            index = next((each for each in args if isinstance(each, int)), 0)
            if log["epochs"] is not None and trainer.current_epoch not in log["epochs"]:
                continue
            if log["batches"] is not None and index not in log["batches"]:
                continue
            send(target, log, self.host_value(trainer))


def number(value: Any) -> float:
    """Return a number or a single-element array as a float."""
    return float(value.item()) if hasattr(value, "item") else float(value)


def visible_metrics(trainer: Any) -> dict[str, float]:
    """Return the three dictionaries of a trainer as one."""
    return {
        f"{kind}:{name}": number(value)
        for kind in ("callback", "logged", "progress_bar")
        for name, value in getattr(trainer, f"{kind}_metrics").items()
    }


def _as_list(found: Any) -> list[Any]:
    if found is None:
        return []
    return found if isinstance(found, list) else [found]


def send(target: Any, log: dict[str, Any], value: Any) -> None:
    """Make one call of `log`, or of `log_dict` with two keys."""
    if log["as_dict"]:
        target.log_dict({log["name"]: value, log["name"] + "2": value * 2}, **log["options"])
    else:
        target.log(log["name"], value, **log["options"])


class Model:
    """The steps, the optimizer and the loaders of the module; mixed in before the side's LightningModule.

    Class attributes `probe` and `side` are set by the class that is made for a run.
    """

    probe: Probe
    side: Any
    net: Any

    def set_up(self) -> None:
        """Make the network and the attributes that steps read."""
        self.net = self.side.network()
        if plan := self.probe.config.get("manual"):
            self.automatic_optimization = False
            if len(plan["every"]) == 2:
                self.other = self.side.network()
        # A word, not a number: in a compiled step a Python number of the module is an input, a word is a constant.
        self.epoch_word = "0"

    def loss_of(self, batch: Any, network: Any = None) -> Any:
        """Return the loss of a batch: linear in the weights, or quadratic."""
        net = self.net if network is None else network
        outputs = [net(leaf) for leaf in leaves(batch)]
        if self.probe.config["step"]["quadratic"]:
            return sum((out * out).mean() for out in outputs) / 8
        return sum(out.mean() for out in outputs)

    def step_logs(self, hook: str, batch: Any, batch_idx: Any, loss: Any) -> None:
        """Make the log calls that the configuration wants from a step."""
        rows = leaves(batch)[0]
        values = {"loss": loss, "sum": rows.sum(), "size": rows.shape[0], "half": 0.5}
        for log in self.probe.config["logs"]:
            if log["hook"] != hook or not (log["epochs"] is None or int(self.epoch_word) in log["epochs"]):
                continue
            if (every := log.get("every", 1)) == 1 or batch_idx % every == 0:
                send(self, log, values[log["value"]])

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        if plan := self.probe.config.get("manual"):
            return self.manual_step(batch, batch_idx, plan)
        loss = self.loss_of(batch)
        self.step_logs("training_step", batch, batch_idx, loss)
        step = self.probe.config["step"]
        if int(self.epoch_word) in step["none_epochs"]:
            return None
        return loss if step["returns"] == "tensor" else {"loss": loss, "extra": loss * 2}

    def manual_step(self, batch: Any, batch_idx: Any, plan: dict[str, Any]) -> Any:
        """Optimize as the configuration wants, written as in any module for either side."""
        optimizers, losses = _as_list(self.optimizers()), []  # type: ignore[attr-defined]
        networks = [self.net, self.other] if hasattr(self, "other") else [self.net]
        for optimizer, network, every in zip(optimizers, networks, plan["every"], strict=True):
            with optimizer.toggle_model() if plan["toggle"] else contextlib.nullcontext():
                losses.append(self.optimize(optimizer, network, every, batch, batch_idx, plan))
        if plan["rates"] == "batch" and batch_idx == 1:
            self.step_rates(None)
        self.step_logs("training_step", batch, batch_idx, losses[0])
        if plan["returns"] == "nothing":
            return None
        return losses[-1] if self.probe.config["step"]["returns"] == "tensor" else {"loss": losses[0], "x": losses[-1]}

    def optimize(
        self, optimizer: Any, network: Any, every: int, batch: Any, batch_idx: Any, plan: dict[str, Any]
    ) -> Any:
        """Add the gradients of one network, and step its optimizer when its window is full."""
        if plan["zero"] == "before" and batch_idx % every == 0 and not plan["closure"]:
            optimizer.zero_grad()

        def closure() -> Any:
            loss = self.loss_of(batch, network)
            if plan["closure"]:
                optimizer.zero_grad()
            self.manual_backward(loss)  # type: ignore[attr-defined]
            return loss

        if plan["closure"]:
            return optimizer.step(closure=closure)
        loss = closure()
        if (batch_idx + 1) % every == 0:
            if plan["clip"]:
                self.clip_gradients(  # type: ignore[attr-defined]
                    optimizer, gradient_clip_val=0.25, gradient_clip_algorithm=plan["clip"]
                )
            optimizer.step()
            if plan["zero"] == "after":
                optimizer.zero_grad()
        return loss

    def step_rates(self, metric: float | None) -> None:
        """Step the schedulers by hand; those that watch a metric only with one."""
        configs = (self.probe.config.get("schedulers") or {}).get("configs", [])
        for scheduler, config in zip(_as_list(self.lr_schedulers()), configs, strict=True):  # type: ignore[attr-defined]
            if config["scheduler"] != "ReduceLROnPlateau":
                scheduler.step()
            elif metric is not None:
                scheduler.step(metric)

    def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> Any:
        loss = self.loss_of(batch)
        self.step_logs("validation_step", batch, batch_idx, loss)
        return {"loss": loss} if self.probe.config["step"]["returns"] == "dict" else None

    def test_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> Any:
        self.step_logs("test_step", batch, batch_idx, self.loss_of(batch))

    def predict_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> Any:
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        step, plan = self.probe.config["step"], self.probe.config.get("schedulers")
        optimizer = self.side.sgd(self.net, lr=step["lr"], momentum=step["momentum"])
        optimizers = [optimizer]
        if hasattr(self, "other"):
            optimizers.append(self.side.sgd(self.other, lr=step["lr"] / 2))
        if plan is None:
            return optimizers if len(optimizers) == 2 else optimizer
        configs = []
        for spec in plan["configs"]:
            rest = {key: value for key, value in spec.items() if key not in ("scheduler", "options")}
            scheduler = getattr(self.side.lr_scheduler, spec["scheduler"])(optimizer, **spec["options"])
            configs.append({"scheduler": scheduler, **rest})
        if plan["form"] == "dict" and len(optimizers) == 1:
            return {"optimizer": optimizer, "lr_scheduler": configs[0]}
        return optimizers, configs


class Loaders:
    """The four loader hooks, for a module or a datamodule; each call is recorded."""

    probe: Probe
    side: Any

    def _loaders(self, stage: str) -> Any:
        trainer = getattr(self, "_trainer", None) or self.trainer  # type: ignore[attr-defined]
        self.probe.add(f"{stage}_dataloader @e{trainer.current_epoch} g{trainer.global_step}")
        return make_loaders(self.probe.config[stage], self.side.convert, self.side.combined)

    def train_dataloader(self) -> Any:
        return self._loaders("train")

    def val_dataloader(self) -> Any:
        return self._loaders("val")

    def test_dataloader(self) -> Any:
        return self._loaders("test")

    def predict_dataloader(self) -> Any:
        return self._loaders("predict")


def with_hooks(base: type, owner: str, hooks: Iterable[str], probe: Probe, **extra: Any) -> type:
    """Make a subclass whose hooks record themselves, log, and do what is planned.

    Args:
        base: The class.
        owner: `"module"`, `"callback"` or `"datamodule"`.
        hooks: The hooks.
        probe: Where to record.
        **extra: Further class attributes.

    Returns:
        The class.
    """
    holder: list[Any] = []
    plans = probe.config["callbacks"]

    def make(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            rest = args
            if owner == "callback":
                trainer, rest = (args[0], args[2:]) if args else (None, args)
            else:
                trainer = getattr(self, "_trainer", None)
            probe.hook(owner, name, trainer, rest, kwargs)
            if trainer is not None:
                probe.host_logs(owner, name, trainer, self, rest)
            if owner == "module" and name == "on_train_epoch_end":
                self.epoch_word = str(trainer.current_epoch + 1)
                if (probe.config.get("manual") or {}).get("rates") == "epoch":
                    self.step_rates(1.0)
            if owner == "callback" and probe.wanted(plans["stop"], name, trainer, rest):
                trainer.should_stop = True
            if owner == "callback" and probe.wanted(plans["raise"], name, trainer, rest):
                raise Planned(name)
            if owner == "module" and name == "on_train_batch_start" and plans["skip"] is not None:
                plan = {"hook": name, **plans["skip"]}
                if probe.wanted(plan, name, trainer, rest):
                    return -1
            return getattr(super(holder[0], self), name)(*args, **kwargs)

        hook.__name__ = name
        return hook

    space = {name: make(name) for name in hooks}
    holder.append(type(f"Traced{owner.capitalize()}", (base,), {**space, **extra, "probe": probe}))
    return holder[0]  # type: ignore[no-any-return]


def module_hooks(config: dict[str, Any]) -> list[str]:
    """Return the hooks that the module overrides."""
    hooks = SHARED_EPOCH + MODULE_ONLY
    if config.get("schedulers") and config["trace"]["batch"]:
        hooks = [*hooks, "lr_scheduler_step"]
    if config["trace"]["batch"] or config["callbacks"]["skip"]:
        hooks = hooks + SHARED_BATCH
    if config["trace"]["optimizer"]:
        hooks = hooks + SHARED_OPTIMIZER + MODULE_OPTIMIZER
    return hooks


def callback_hooks(config: dict[str, Any]) -> list[str]:
    """Return the hooks that the recording callback overrides."""
    hooks = SHARED_EPOCH + CALLBACK_ONLY
    if config["trace"]["batch"]:
        hooks = hooks + SHARED_BATCH
    if config["trace"]["optimizer"]:
        hooks = hooks + SHARED_OPTIMIZER
    return hooks
