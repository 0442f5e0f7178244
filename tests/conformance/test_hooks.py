"""HK: who is called, when and with what, where the recorded traces do not say it; with Lightning beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beside import Side, caught, error, events_callback, same
from support.tracing import golden

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("HK03", "DM05")
@pytest.mark.parametrize("per_node", [True, False])
def test_data_are_prepared_by_the_first_process_when_overridden(
    per_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scenario(side: Side) -> Any:
        seen: list[str] = []

        class Data(side.pl.LightningDataModule):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.prepare_data_per_node = per_node

            def prepare_data(self) -> None:
                seen.append("datamodule")

            def train_dataloader(self) -> Any:
                return side.loader(2)

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def prepare_data(self) -> None:
                seen.append("module")

        trainer, module, data = side.trainer(limit_val_batches=0), Model(), Data()
        module.prepare_data_per_node = per_node
        trainer.fit(module, datamodule=data)
        monkeypatch.setattr(type(trainer), "global_rank", property(lambda self: 1))
        monkeypatch.setattr(type(trainer), "local_rank", property(lambda self: 1))
        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(side.Tiny(), datamodule=data)  # the second process on the first host: nobody prepares
        return seen

    assert same(scenario) == ["datamodule", "module"]


@pytest.mark.catalogue("HK12")
def test_the_hooks_of_a_batch_get_one_and_the_same_object() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []
        hooks = [f"on_{word}_batch_{end}" for word in ("train", "validation", "predict") for end in ("start", "end")]
        kept: dict[str, Any] = {}

        def note(hook: str, trainer: Any, module: Any, *args: Any) -> None:
            batch = args[0] if hook.endswith("start") else args[1]
            word = hook.split("_")[1]
            seen.append([hook, args[-1] if "predict" in hook else None, kept.get(word) is batch, type(batch).__name__])
            kept[word] = batch

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                return {"x": batch[0]}

            def loss(self, batch: Any) -> Any:
                return (self.layer(batch["x"]) ** 2).mean()

            def predict_step(self, batch: Any, batch_idx: Any) -> Any:
                return self.layer(batch["x"])

        trainer = side.trainer(callbacks=[events_callback(side, hooks, note)])
        trainer.fit(Model())
        trainer.predict(Model())
        return seen

    seen = same(scenario)
    assert all(again for hook, _, again, _ in seen if hook.endswith("end"))


@pytest.mark.catalogue("HK15", "LG29", "CB03")
def test_monitoring_callbacks_come_after_the_module(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        seen: list[str] = []
        stop_class, save_class = side.get("callbacks.EarlyStopping"), side.get("callbacks.ModelCheckpoint")

        class Stop(stop_class):  # type: ignore[misc,valid-type]
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                seen.append(f"stop sees {float(trainer.callback_metrics['m'])}")
                super().on_train_epoch_end(trainer, module)

        class Save(save_class):  # type: ignore[misc,valid-type]
            def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
                seen.append(f"save sees {float(trainer.callback_metrics['m'])}")
                super().on_train_epoch_end(trainer, module)

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_train_epoch_end(self) -> None:
                seen.append("module")
                self.log("m", float(self.current_epoch))

        noting = events_callback(side, ["on_train_epoch_end"], lambda *args: seen.append("callback"))
        saving = Save(tmp_path / side.name, monitor="m")
        trainer = side.trainer(
            max_epochs=9, callbacks=[saving, Stop("m", patience=2), noting], enable_checkpointing=True
        )
        trainer.fit(Model())
        return seen, trainer.current_epoch, float(saving.best_model_score)

    seen, epochs, best = same(scenario)
    assert seen[:4] == ["callback", "module", "stop sees 0.0", "save sees 0.0"]
    assert [epochs, best] == [3, 0.0]


@pytest.mark.catalogue("HK24", adaptation="static for the compiled step: one compilation per loader")
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_index_of_a_loader_is_passed_when_there_are_several(verb: str, loaders: int) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []
        word = {"validate": "validation"}.get(verb, verb)
        steps: list[Any] = []

        def step(self: Any, batch: Any, batch_idx: Any, dataloader_idx: Any = "none") -> Any:
            steps.append(dataloader_idx)
            return self.layer(batch[0]).sum()

        names = [f"on_{word}_batch_start", f"on_{word}_batch_end"]
        callback = events_callback(
            side, names, lambda hook, t, m, *args: seen.append([hook, *[a for a in args if isinstance(a, int)]])
        )
        space = {"validation_step": step, "test_step": step, "predict_step": step}
        module = type("Model", (side.Tiny,), space)()
        data = [side.loader(4) for _ in range(loaders)]
        verbose = {} if verb == "predict" else {"verbose": False}
        getattr(side.trainer(callbacks=[callback]), verb)(module, data[0] if loaders == 1 else data, **verbose)
        return seen, sorted(set(steps), key=str)

    _, steps = same(scenario)
    assert steps == (["none"] if loaders == 1 else [0, 1])


@pytest.mark.catalogue("HK25", adaptation="batch_idx is an argument of the compiled step, so no batch compiles anew")
def test_a_step_may_leave_out_or_rename_its_arguments() -> None:
    def scenario(side: Side) -> Any:
        seen: dict[str, list[Any]] = {}

        class Short(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any) -> Any:
                return self.loss(batch)

            def validation_step(self, batch: Any) -> Any:
                self.log("size", float(len(batch)), on_step=True)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                seen.setdefault("train_batch_only", []).append(len(batch))

        class Renamed(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, x: Any, nb: Any) -> Any:
                self.log("nb", nb * 1.0)
                return self.loss(x)

            def validation_step(self, *args: Any) -> Any:
                seen["varargs_val"] = [len(args)] * 2

            def on_train_batch_end(self, out: Any, x: Any, nb: int) -> None:
                seen.setdefault("renamed", []).append(int(self.trainer.callback_metrics["nb"]))

        side.trainer(num_sanity_val_steps=0).fit(Short())
        side.trainer(num_sanity_val_steps=0).fit(Renamed())
        return seen

    seen = same(scenario)
    theirs = golden("dataloaders")["signatures"]
    assert seen == {name: theirs[name] for name in seen}


@pytest.mark.catalogue("HK28", adaptation="leaves become jax arrays on the step's devices")
def test_a_batch_is_moved_leaf_by_leaf() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Loader:
            def __len__(self) -> int:
                return 1

            def __iter__(self) -> Any:
                row = side.array([[1.0, 2.0, 3.0, 4.0]])
                yield {"a": [row, (row, "text")], "b": {"c": row, "n": None}}

        def kinds(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: kinds(each) for key, each in value.items()}
            if isinstance(value, (list, tuple)):
                return [type(value).__name__, *map(kinds, value)]
            return "array" if hasattr(value, "shape") else value

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                return self.loss([batch["b"]["c"]])

            def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
                moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
                seen.append([kinds(moved), dataloader_idx])
                return moved

        callback = events_callback(
            side, ["on_train_batch_start"], lambda hook, t, m, batch, i: seen.append(kinds(batch))
        )
        side.trainer(limit_val_batches=0, callbacks=[callback]).fit(Model(), Loader())
        return seen

    same(scenario)


@pytest.mark.catalogue("HK29")
def test_the_name_of_the_running_hook_comes_and_goes() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any = None) -> None:
                seen.append(self._current_fx_name)
                super().optimizer_step(epoch, batch_idx, optimizer, closure)
                seen.append(self._current_fx_name)

            def on_before_zero_grad(self, optimizer: Any) -> None:
                seen.append(self._current_fx_name)

            def on_train_batch_end(self, *args: Any) -> None:
                seen.append(self._current_fx_name)

        module, trainer = Model(), side.trainer(limit_train_batches=1, limit_val_batches=0)
        trainer.fit(module)
        seen.append(module._current_fx_name)
        trainer.validate(module, verbose=False)
        return [*seen, module._current_fx_name]

    assert same(scenario)[-2:] == [None, None]


@pytest.mark.catalogue("HK30", "ER03")
@pytest.mark.parametrize("missing", ["validation_step", "val_dataloader", "predict_step", "on_train_start"])
def test_a_hook_that_is_none_is_not_overridden(missing: str) -> None:
    def scenario(side: Side) -> Any:
        seen: list[str] = []
        hooks = ["on_validation_start", "on_sanity_check_start"]
        callback = events_callback(side, hooks, lambda hook, *args: seen.append(hook))
        module = type("Model", (side.Tiny,), {})()
        setattr(module, missing, None)
        trainer = side.trainer(callbacks=[callback])

        def run() -> Any:
            with caught() as warned:
                if missing == "predict_step":
                    trainer.predict(module, side.loader(2))
                else:
                    trainer.fit(module, side.loader(4))
            return [kind for kind, text in warned if "val" in text]

        return error(run), seen

    same(scenario)


@pytest.mark.catalogue("HK32", "DM07")
def test_loading_calls_the_module_before_its_weights_come(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def configure_model(self) -> None:
                seen.append("configure_model")

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                seen.append(["on_load_checkpoint", "state_dict" in checkpoint, checkpoint["epoch"]])

            def setup(self, stage: str) -> None:
                seen.append("setup")

        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(Model())
        path = tmp_path / f"{side.name}.ckpt"
        trainer.save_checkpoint(path)
        seen.clear()
        Model.load_from_checkpoint(path)
        return seen

    assert same(scenario)[0] == "configure_model"


@pytest.mark.catalogue("HK33")
@pytest.mark.parametrize("window", [1, 2, 4])
def test_gradients_are_zeroed_once_per_window(window: int) -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_before_zero_grad(self, optimizer: Any) -> None:
                seen.append(self.trainer.fit_loop.batch_idx)

        trainer = side.trainer(max_epochs=2, accumulate_grad_batches=window, limit_val_batches=0)
        trainer.fit(Model())
        return seen, trainer.global_step

    seen, steps = same(scenario)
    assert len(seen) == steps


def _scalar(side: Side) -> Any:
    """One weight w per element; the loss is the mean of w * x, so the gradient is the batch's mean."""
    if side.ours:
        import flax.linen as nn

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                return x * self.param("w", nn.initializers.zeros, (4,))

        return Layer()
    import torch

    class Torch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x: Any) -> Any:
            return x * self.w

    return Torch()


def _gradient(module: Any, side: Side) -> Any:
    if side.ours:
        return np.asarray(module._engine.grads["layer"]["w"])
    return module.layer.w.grad.detach().numpy().copy()


def _weights(module: Any, side: Side) -> Any:
    return np.asarray(module.state_dict()["layer.w"])


@pytest.mark.catalogue("HK34", adaptation="gradients are there when the hook is overridden, in a step cut in two")
@pytest.mark.catalogue("OP11", adaptation="clipping happens between the compiled halves, by torch's formula")
@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 1.0}, {"gradient_clip_val": 0.5, "how": "value"}])
def test_the_hook_before_the_update_sees_whole_unclipped_gradients(flags: dict[str, Any]) -> None:
    flags = dict(flags)
    how = flags.pop("how", None)

    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer = _scalar(side)

            def loss(self, batch: Any) -> Any:
                return self.layer(batch[0]).mean()

            def on_before_optimizer_step(self, optimizer: Any) -> None:
                seen.append(["before", _gradient(self, side)])

            def on_after_backward(self) -> None:
                seen.append(["after backward", _gradient(self, side)])

            def configure_gradient_clipping(self, optimizer: Any, *values: Any, **named: Any) -> None:
                super().configure_gradient_clipping(optimizer, *values, **named)
                seen.append(["clipped", _gradient(self, side)])

            def configure_optimizers(self) -> Any:
                return side.sgd(self, lr=1.0)

        module = Model()
        trainer = side.trainer(
            accumulate_grad_batches=3, gradient_clip_algorithm=how, limit_val_batches=0, limit_train_batches=3, **flags
        )
        trainer.fit(module)
        return json.loads(json.dumps(_rounded(seen))), _rounded(_weights(module, side))

    same(scenario)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return np.round(value, 5).tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.catalogue("HK36", adaptation="the hook may replace the real gradients after calling its super")
def test_a_backward_of_ones_own_decides_the_gradients() -> None:
    def scenario(side: Side) -> Any:
        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.calls = _scalar(side), 0

            def loss(self, batch: Any) -> Any:
                return self.layer(batch[0]).mean()

            def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
                self.calls += 1
                super().backward(loss, *args, **kwargs)
                if side.ours:
                    grads = self.trainer._engine.grads
                    self.trainer._engine.grads = {"layer": {"w": grads["layer"]["w"] * 2}}
                else:
                    self.layer.w.grad *= 2

            def configure_optimizers(self) -> Any:
                return side.sgd(self, lr=1.0)

        module = Model()
        side.trainer(limit_val_batches=0).fit(module)
        return _rounded(_weights(module, side)), module.calls

    _, calls = same(scenario)
    assert calls == 3


@pytest.mark.catalogue("HK22", adaptation="each network has a mode of its own beside the module's")
def test_a_network_in_eval_mode_is_pointed_out_and_left_so() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def on_fit_start(self) -> None:
                self.layer.eval()

            def on_train_batch_end(self, *args: Any) -> None:
                seen.append([self.training, self.layer.training])

        module = Model()
        with caught() as warned:
            side.trainer(limit_train_batches=2).fit(module)
        return seen, [[kind, text[:50]] for kind, text in warned if "eval mode" in text]

    seen, warned = same(scenario)
    assert seen == [[True, False]] * 2
    assert len(warned) == 1


@pytest.mark.catalogue("HK35", adaptation="a closure that is never called is noticed on the host")
def test_a_step_of_the_optimizer_runs_once_per_window_with_its_closure() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any = None) -> None:
                seen.append([epoch, batch_idx, callable(closure)])
                if batch_idx != 3:
                    optimizer.step(closure=closure)

        return error(lambda: side.trainer(accumulate_grad_batches=2, limit_val_batches=0).fit(Model())), seen

    same(scenario)
