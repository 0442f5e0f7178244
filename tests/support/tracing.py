"""Records every hook call in the form of the golden traces, so that the same run can be compared event by event."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np

import jaxlightning as pl
from jaxlightning.compile.trace import current_trace
from jaxlightning.loggers import Logger
from support.golden import read

MODULE_HOOKS = [
    "configure_callbacks",
    "prepare_data",
    "setup",
    "teardown",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "on_test_start",
    "on_test_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_model_eval",
    "on_test_model_train",
    "on_predict_start",
    "on_predict_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_model_eval",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
]
CALLBACK_HOOKS = [
    "setup",
    "teardown",
    "on_fit_start",
    "on_fit_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_start",
    "on_test_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_start",
    "on_predict_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_exception",
    "state_dict",
    "load_state_dict",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
]
DATAMODULE_HOOKS = [
    "prepare_data",
    "setup",
    "teardown",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "state_dict",
    "load_state_dict",
    "on_exception",
]
NESTED = {"optimizer_step", "backward", "configure_gradient_clipping"}
STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


def golden(file: str) -> dict[str, Any]:
    """The data of a golden file."""
    data: dict[str, Any] = read(file)
    return data


def loader(samples: int, batch_size: int = 2, dim: int = 4) -> pl.ArrayLoader:
    """A loader over random rows."""
    rows = np.random.default_rng(0).standard_normal((samples, dim)).astype(np.float32)
    return pl.ArrayLoader((rows,), batch_size=batch_size)


class TinyModule(pl.LightningModule):
    """One dense layer; the loss is the mean of its squared output."""

    def __init__(self, lr: float = 0.1, n_train: int = 6, n_val: int = 4, n_test: int = 4, n_pred: int = 4) -> None:
        super().__init__()
        self.layer = nn.Dense(2)
        self.lr_value, self.n_train, self.n_val, self.n_test, self.n_pred = lr, n_train, n_val, n_test, n_pred

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def _loss(self, batch: Any) -> Any:
        return (self.layer(batch[0]) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        return self._loss(batch)

    def test_step(self, batch: Any, batch_idx: Any) -> Any:
        return self._loss(batch)

    def predict_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return pl.optim.SGD(self.parameters(), lr=self.lr_value)

    def train_dataloader(self) -> Any:
        return loader(self.n_train)

    def val_dataloader(self) -> Any:
        return loader(self.n_val)

    def test_dataloader(self) -> Any:
        return loader(self.n_test)

    def predict_dataloader(self) -> Any:
        return loader(self.n_pred)


class RecordingLogger(Logger):
    """Appends every call to a list."""

    def __init__(self, sink: list[dict[str, Any]], save_dir: str | None = None) -> None:
        super().__init__()
        self.sink, self._dir = sink, save_dir

    name = property(lambda self: "rec")  # type: ignore[assignment]
    version = property(lambda self: 0)  # type: ignore[assignment]
    save_dir = property(lambda self: self._dir)  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.sink.append({"who": "logger", "hook": "log_metrics", "metrics": dict(metrics), "step": step})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.sink.append({"who": "logger", "hook": "log_hyperparams", "params": dict(params)})

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        self.sink.append({"who": "logger", "hook": "log_graph"})

    def save(self) -> None:
        self.sink.append({"who": "logger", "hook": "save"})

    def finalize(self, status: str) -> None:
        self.sink.append({"who": "logger", "hook": "finalize", "status": status})

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.sink.append({"who": "logger", "hook": "after_save_checkpoint"})


def _snap(trainer: Any) -> dict[str, Any] | None:
    if trainer is None:
        return None
    stage = trainer.state.stage
    return {
        "stage": None if stage is None else stage.value,
        "epoch": trainer.current_epoch,
        "gs": trainer.global_step,
        "training_mode": trainer.lightning_module.training,
    }


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    out: list[Any] = []
    for each in args:
        if isinstance(each, (int, str, bool, float)) or each is None:
            out.append(each)
        elif isinstance(each, (jax.Array, np.ndarray)):
            out.append(f"T{list(each.shape)}")
        elif isinstance(each, dict):
            out.append("dict:" + ",".join(sorted(map(str, each)))[:120])
        elif isinstance(each, (list, tuple)):
            out.append(f"{type(each).__name__}[{len(each)}]")
        elif hasattr(each, "shape"):
            out.append(0)
        else:
            out.append(f"<{type(each).__name__}>")
    return out + [f"{name}={getattr(each, 'value', each)}" for name, each in kwargs.items()]


def traced(base: type, hooks: list[str], who: str, sink: list[dict[str, Any]], trainer_of: Any, drop: int = 0) -> type:
    """A subclass of `base` whose every hook records itself and then does what it did."""
    holder: list[Any] = []

    def make(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            shown = args[drop:] if who == "callback" else args
            event = {"who": who, "hook": name, "args": _describe(shown, kwargs), "at": _snap(trainer_of(self, args))}
            parent = getattr(super(holder[0], self), name)
            if name not in NESTED:
                sink.append(event)
                return parent(*args, **kwargs)
            sink.append({**event, "phase": "enter"})
            result = parent(*args, **kwargs)
            sink.append({"who": who, "hook": name, "phase": "exit", "at": _snap(trainer_of(self, args))})
            return result

        hook.__name__ = name
        return hook

    space = {name: make(name) for name in hooks}
    for name in STEPS & set(hooks):
        space[name] = _step(name, who, _Sink(sink), trainer_of, holder)
    holder.append(type("Traced" + base.__name__, (base,), space))
    return holder[0]  # type: ignore[no-any-return]


class _Sink:
    """Where events go. A step that had the list itself in its closure would be compiled anew for every change of it."""

    __slots__ = ("append",)

    def __init__(self, sink: list[dict[str, Any]]) -> None:
        self.append = sink.append


def _step(name: str, who: str, sink: _Sink, trainer_of: Any, holder: list[Any]) -> Any:
    def hook(self: Any, batch: Any, batch_idx: Any) -> Any:
        index = batch_idx if isinstance(batch_idx, int) else 0
        trace = current_trace()
        compiled = trace is not None and not isinstance(batch_idx, int)  # traced: not a call that a user would see
        if not compiled and (trace is None or not trace.silent):  # nor is a run for the gradients only
            sink.append(
                {"who": who, "hook": name, "args": [f"list[{len(batch)}]", index], "at": _snap(trainer_of(self, ()))}
            )
        return getattr(super(holder[0], self), name)(batch, batch_idx)

    hook.__name__ = name
    return hook


def compact(events: list[dict[str, Any]]) -> list[str]:
    """One short string per event, exactly as in `hooks_compact.json`."""
    letters = {"module": "M", "callback": "C", "datamodule": "D", "logger": "L"}
    out = []
    for event in events:
        text = f"{letters[event['who']]}.{event['hook']}"
        if event.get("phase"):
            text += ":" + event["phase"]
        if event["who"] == "logger":
            if event["hook"] == "log_metrics":
                text += f" step={event['step']} keys={sorted(event['metrics'])}"
            if event["hook"] == "finalize":
                text += " " + event["status"]
        elif event.get("args"):
            shown = [
                str(each)
                for each in event["args"]
                if (isinstance(each, int) and not isinstance(each, bool)) or (isinstance(each, str) and "=" in each)
            ]
            if shown:
                text += "(" + ",".join(shown) + ")"
        if event.get("at"):
            text += f"  @{event['at']['stage']} e{event['at']['epoch']} g{event['at']['gs']}"
        out.append(text)
    return out
