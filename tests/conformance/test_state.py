"""TA, HP, CB and ER: attributes, hyper-parameters, callbacks and refusals, with Lightning beside."""

from __future__ import annotations

import argparse
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beside import Side, caught, error, events_callback, plain, same
from support.tracing import golden

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("TA04", "TA05", adaptation="host values outside a step; arguments of the compiled step inside")
def test_the_module_and_the_trainer_know_each_other() -> None:
    def scenario(side: Side) -> Any:
        class Child(side.pl.LightningModule):  # type: ignore[name-defined,misc]
            def forward(self, x: Any) -> Any:
                return x

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.child = Child()

            def on_train_batch_end(self, *args: Any) -> None:
                seen.append([self.current_epoch, self.global_step, self.child.trainer is self.trainer])

        seen: list[Any] = []
        module = Model()
        before = [error(lambda: module.trainer)[0], module.current_epoch, module.global_step, module.logger]
        before += [module.global_rank, module.local_rank]
        trainer = side.trainer(max_epochs=2, limit_val_batches=0)
        trainer.fit(module)
        return before, seen, trainer.lightning_module is module, module.trainer is trainer, trainer.model is not None

    before, seen, *rest = same(scenario)
    assert before == ["RuntimeError", 0, 0, None, 0, 0]
    assert all(rest)
    assert seen[-1] == [1, 6, True]


@pytest.mark.catalogue("TA06", adaptation="the device is JAX's; arrays are placed by the strategy, not by .to()")
def test_a_module_knows_its_device() -> None:
    def scenario(side: Side) -> Any:
        module = side.Tiny()
        side.trainer(limit_val_batches=0).fit(module)
        device = module.device
        return getattr(device, "type", None) or device.platform

    assert same(scenario) == "cpu"


@pytest.mark.catalogue("TA08", "CB01")
def test_callbacks_are_found_by_their_kind() -> None:
    def scenario(side: Side) -> Any:
        get = side.get
        given = [
            get("callbacks.ModelCheckpoint")(monitor="a"),
            get("callbacks.EarlyStopping")("b"),
            get("callbacks.ModelCheckpoint")(monitor="c"),
            get("callbacks.EarlyStopping")("d"),
            get("callbacks.TQDMProgressBar")(),
        ]
        trainer = side.pl.Trainer(accelerator="cpu", callbacks=given, logger=False, enable_model_summary=False)
        bare = side.trainer()
        return [
            given.index(trainer.checkpoint_callback),
            [given.index(each) for each in trainer.checkpoint_callbacks],
            given.index(trainer.early_stopping_callback),
            [given.index(each) for each in trainer.early_stopping_callbacks],
            given.index(trainer.progress_bar_callback),
            [bare.checkpoint_callback, bare.checkpoint_callbacks, bare.early_stopping_callback],
            [bare.early_stopping_callbacks, bare.progress_bar_callback],
        ]

    same(scenario)


@pytest.mark.catalogue("TA09", adaptation="one process drives all devices, so the world is the processes")
def test_one_device_is_one_world() -> None:
    def scenario(side: Side) -> Any:
        trainer = side.trainer()
        names = ("num_devices", "world_size", "node_rank", "global_rank", "local_rank", "num_nodes", "is_global_zero")
        return {name: getattr(trainer, name) for name in names}, len(trainer.device_ids)

    same(scenario)


@pytest.mark.catalogue("TA11", adaptation="batches and iterators are let go; the module keeps its variables")
def test_nothing_of_a_run_is_held_by_the_trainer() -> None:
    import gc
    import weakref

    def scenario(side: Side) -> Any:
        kept: list[Any] = []

        class Loader:
            def __len__(self) -> int:
                return 2

            def __iter__(self) -> Any:
                for _ in range(2):
                    batch = _Batch([side.array(np.ones((2, 4)))])
                    kept.append(weakref.ref(batch))
                    yield batch

        trainer = side.trainer(limit_val_batches=0)
        trainer.fit(side.Tiny(), Loader())
        gc.collect()
        return [each() is None for each in kept]

    assert same(scenario) == [True, True]


class _Batch(list[Any]):
    """A list that can be referred to weakly."""


# --- hyper-parameters


@pytest.mark.catalogue("HP01", "HP02", "HP03")
def test_arguments_are_collected_like_lightnings() -> None:
    def scenario(side: Side) -> Any:
        base = side.pl.LightningModule

        class All(base):  # type: ignore[misc,valid-type]
            def __init__(self, a: int, b: int = 2, *args: Any, c: str = "x", **kw: Any) -> None:
                super().__init__()
                local = a + 1
                self.save_hyperparameters()
                del local

        class Sub(All):
            def __init__(self, z: int = 9, **kw: Any) -> None:
                z += 1
                super().__init__(a=5, **kw)
                self.save_hyperparameters()

        class Ignoring(base):  # type: ignore[misc,valid-type]
            def __init__(self, a: int = 1, b: int = 2) -> None:
                super().__init__()
                self.save_hyperparameters(ignore=["b"])

        class One(base):  # type: ignore[misc,valid-type]
            def __init__(self, conf: Any) -> None:
                super().__init__()
                self.save_hyperparameters(conf)

        class Chosen(base):  # type: ignore[misc,valid-type]
            def __init__(self, a: int = 1, b: int = 2, c: int = 3) -> None:
                super().__init__()
                self.save_hyperparameters("a", "c")

        found = [dict(each.hparams) for each in (All(1, 7, 8, c="y", extra=5), Sub(q=3), Ignoring(), Chosen(c=9))]
        found += [dict(One({"x": 1}).hparams), dict(One(argparse.Namespace(x=1)).hparams)]
        chosen = Chosen()
        chosen.hparams.a = 50
        chosen.hparams["new"] = 1
        found.append([chosen.hparams.a, chosen.hparams_initial.a, "new" in chosen.hparams_initial])
        found.append([error(lambda value=value: One(value))[0] for value in (1, 1.5, "x", True)])
        return found

    same(scenario)


@pytest.mark.catalogue("HP04")
def test_composition_and_dataclasses_do_not_mix_arguments_up() -> None:
    def scenario(side: Side) -> Any:
        class Inner(side.pl.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self, a: int, same_name: str = "inner") -> None:
                super().__init__()
                self.save_hyperparameters()

        class Outer:
            def __init__(self, b: int, same_name: str = "outer") -> None:
                self.inner = Inner(a=b + 1)

        @dataclasses.dataclass
        class Data(side.pl.LightningDataModule):  # type: ignore[name-defined,misc]
            x: int
            y: str = "y"
            hidden: int = dataclasses.field(default=3, init=False)

            def __post_init__(self) -> None:
                super().__init__()
                self.save_hyperparameters()

        outer = Outer(1)
        return dict(outer.inner.hparams), dict(Data(2).hparams)

    same(scenario)


@pytest.mark.catalogue("HP05", adaptation="networks of flax and large arrays are warned about")
def test_a_network_among_the_arguments_is_pointed_out() -> None:
    def scenario(side: Side) -> Any:
        if side.ours:
            import flax.linen as nn

            net: Any = nn.Dense(1)
        else:
            import torch

            net = torch.nn.Linear(1, 1)

        class Held(side.pl.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self, a: Any) -> None:
                super().__init__()
                self.save_hyperparameters()

        with caught() as about_networks:
            Held(net)
        return [[kind, text[:16]] for kind, text in about_networks]

    found = same(scenario)
    assert [text for _, text in found] == [text[:16] for text in golden("hparams")["nn_module_warn"]]


@pytest.mark.catalogue("HP05", adaptation="nothing is pickled: what cannot be written is left out of the checkpoint")
def test_an_argument_that_cannot_be_written_is_left_out_with_a_warning(tmp_path: Path) -> None:
    recorded = golden("hparams")["unpicklable_dropped"]

    def scenario(side: Side) -> Any:
        class Unpicklable(side.Tiny):  # type: ignore[name-defined,misc]
            def __init__(self, fn: Any = lambda: 1, lr: float = 0.1) -> None:
                super().__init__()
                self.save_hyperparameters()

        with caught() as warned:
            trainer = side.trainer(limit_val_batches=0)
            trainer.fit(Unpicklable())
            trainer.save_checkpoint(tmp_path / f"{side.name}.ckpt")
        loaded = Unpicklable.load_from_checkpoint(tmp_path / f"{side.name}.ckpt", fn=None)
        return dict(loaded.hparams), len([text for kind, text in warned if "fn" in text])

    hparams, warned = same(scenario)
    assert hparams == {"fn": None, "lr": 0.1}
    assert warned == len(recorded[1]) == 1


@pytest.mark.catalogue("HP08")
def test_yaml_leaves_out_what_it_cannot_hold(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        save = side.get(
            "core.saving.save_hparams_to_yaml" if not side.ours else "utilities.hparams.save_hparams_to_yaml"
        )
        path = tmp_path / f"{side.name}.yaml"
        with caught() as warned:
            save(str(path), {"a": 1, "b": [1, 2], "fn": threading.Lock(), "nested": {"c": "x"}})
        import yaml

        loaded = yaml.safe_load(path.read_text())
        return loaded, [kind for kind, text in warned if "fn" in text]

    loaded, warned = same(scenario)
    assert "fn" not in loaded
    assert len(warned) == 1


# --- callbacks


@pytest.mark.catalogue("CB02")
@pytest.mark.parametrize("single", [True, False])
def test_callbacks_of_the_module_stay_for_later_runs(single: bool) -> None:
    def scenario(side: Side) -> Any:
        class First(side.Callback): ...  # type: ignore[name-defined,misc]

        class Second(First): ...

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def configure_callbacks(self) -> Any:
                return mine if single else [mine, other]

        mine, other = Second(), side.get("callbacks.EarlyStopping")("x")
        given = [First(), side.get("callbacks.ModelCheckpoint")(), side.get("callbacks.Timer")()]
        trainer = side.trainer(callbacks=given, enable_checkpointing=True)
        names = []
        with side.messages() as said:
            for _ in range(2):
                trainer.validate(Model(), verbose=False)
                names.append([type(each).__name__ for each in trainer.callbacks])
        return names, sum("will override existing callbacks" in each for each in said)

    same(scenario)


@pytest.mark.catalogue("CB03")
def test_callbacks_save_and_load_their_state(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        class Counter(side.Callback):  # type: ignore[name-defined,misc]
            def __init__(self, what: str) -> None:
                self.what, self.count = what, 0

            @property
            def state_key(self) -> str:
                return f"Counter[what={self.what}]"

            def on_train_batch_end(self, *args: Any) -> None:
                self.count += 1

            def state_dict(self) -> dict[str, Any]:
                return {"count": self.count}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                seen.append([self.what, state_dict])

            def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
                checkpoint[f"extra_{self.what}"] = 1

            def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
                seen.append([self.what, checkpoint[f"extra_{self.what}"], sorted(checkpoint["callbacks"])])

        seen: list[Any] = []
        path = tmp_path / f"{side.name}.ckpt"
        trainer = side.trainer(limit_val_batches=0, callbacks=[Counter("a"), Counter("b")])
        trainer.fit(side.Tiny())
        trainer.save_checkpoint(path)
        side.trainer(limit_val_batches=0, max_epochs=2, callbacks=[Counter("a"), Counter("b")]).fit(
            side.Tiny(), ckpt_path=path
        )
        duplicate = error(lambda: side.trainer(callbacks=[Counter("a"), Counter("a")]))
        return seen, duplicate

    assert same(scenario)[1][0] == "RuntimeError"


@pytest.mark.catalogue("CB05")
def test_every_hook_may_be_a_function() -> None:
    def scenario(side: Side) -> Any:
        lambda_callback = side.get("callbacks.LambdaCallback")
        seen: list[str] = []
        hooks = ["setup", "on_fit_start", "on_train_batch_end", "on_validation_end", "on_train_end", "teardown"]
        functions = {hook: lambda *args, hook=hook, **kwargs: seen.append(hook) for hook in hooks}
        side.trainer(callbacks=[lambda_callback(**functions)], limit_train_batches=1).fit(side.Tiny())
        return seen, error(lambda: lambda_callback(on_trian_start=print))[0]

    assert same(scenario)[1] == "TypeError"


@pytest.mark.catalogue("CB06", adaptation="a table of the networks, from the paths of their variables")
@pytest.mark.parametrize("depth", [-2, 0, 1, -1, "x"])
def test_the_summary_is_printed_to_the_depth_asked_for(depth: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(side: Side) -> Any:
        def run() -> Any:
            callback = side.get("callbacks.ModelSummary")(max_depth=depth)
            capsys.readouterr()
            with side.messages() as said:
                side.trainer(callbacks=[callback], limit_train_batches=1).fit(side.Tiny())
            text = capsys.readouterr().out + "\n".join(said)
            return ["Total params" in text, "layer" in text, "10" in text]

        return error(run)

    found = same(scenario)
    assert (found[0] == "ValueError") if depth in (-2, "x") else (found == [depth != 0] * 3)


@pytest.mark.catalogue("CB12", "TA10", adaptation="the module's state after the step is what hooks read")
def test_callbacks_get_the_live_module() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                return self.layer(batch[0]).sum(-1).mean()

            def configure_optimizers(self) -> Any:
                return side.sgd(self, lr=1.0)

        def note(hook: str, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            state = module.state_dict() if hook == "on_train_batch_end" else {}
            bias = [np.asarray(value).tolist() for name, value in state.items() if name.endswith("bias")]
            at_start = kept.setdefault("bias", np.asarray(bias[0])) if bias else None
            moved = None if not bias else plain(np.asarray(bias[0]) - at_start)
            seen.append([hook, module is model, trainer.lightning_module is module, module.training, moved])

        hooks = ["on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_test_start"]
        kept: dict[str, Any] = {}
        model = Model()
        trainer = side.trainer(callbacks=[events_callback(side, hooks, note)], num_sanity_val_steps=0)
        trainer.fit(model)
        trainer.test(model, verbose=False)
        return seen

    seen = same(scenario)
    assert [each[-1] for each in seen if each[0] == "on_train_batch_end"] == [[0, 0], [-1, -1], [-2, -2]]


# --- refusals


@pytest.mark.catalogue("ER08", "ER01", "ER06", "ER02", "ER04")
def test_the_exceptions_have_lightnings_names_and_families() -> None:
    def scenario(side: Side) -> Any:
        kind = side.get("utilities.exceptions.MisconfigurationException")
        return [
            [each.__name__ for each in kind.__mro__],
            error(lambda: side.trainer().fit(object())),
            error(lambda: side.trainer().test())[0],
            error(lambda: side.trainer().predict())[0],
            error(lambda: side.trainer().fit(side.pl.LightningModule(), side.loader(2)))[0],
        ]

    same(scenario)


@pytest.mark.catalogue("ER03")
def test_half_a_validation_is_skipped_with_a_warning() -> None:
    def scenario(side: Side) -> Any:
        found = []
        for missing in ("validation_step", "val_dataloader"):
            space = {missing: getattr(side.pl.LightningModule, missing)}
            module = type("Model", (side.Tiny,), space)()
            seen: list[str] = []
            callback = events_callback(side, ["on_validation_start"], lambda hook, *args, seen=seen: seen.append(hook))
            with caught() as warned:
                side.trainer(callbacks=[callback]).fit(module)
            found.append([missing, seen, sorted({kind for kind, text in warned if "validation_step" in text})])
        return found

    same(scenario)


@pytest.mark.catalogue("ER07", adaptation="raised while the step is traced, with the user's own traceback")
@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_an_exception_of_the_user_comes_out_unchanged(verb: str) -> None:
    class Mine(Exception): ...

    def scenario(side: Side) -> Any:
        def fails(self: Any, batch: Any, batch_idx: Any) -> Any:
            raise Mine("of mine")

        seen: list[Any] = []
        word = {"fit": "training", "validate": "validation"}.get(verb, verb)
        module = type("Model", (side.Tiny,), {f"{word}_step": fails})()
        callback = events_callback(
            side, ["on_exception"], lambda hook, trainer, m, exception: seen.append(type(exception).__name__)
        )
        trainer = side.trainer(callbacks=[callback], limit_val_batches=0 if verb == "fit" else 1.0)
        outcome = error(lambda: getattr(trainer, verb)(module))
        return outcome, seen, trainer.state.status.value, trainer.interrupted

    assert same(scenario)[0] == ["Mine", "of mine"]


@pytest.mark.slow
@pytest.mark.catalogue("ER11")
@pytest.mark.parametrize("value", ["off", "0", "on", None])
def test_advice_can_be_switched_off(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import subprocess
    import sys

    code = (
        "import sys, warnings, importlib\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    category = importlib.import_module(sys.argv[1]).PossibleUserWarning\n"
        "    importlib.import_module(sys.argv[2]).rank_zero_warn('x', category=category)\n"
        "print(len([w for w in seen if 'x' in str(w.message)]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "POSSIBLE_USER_WARNINGS"}
    if value is not None:
        environment["POSSIBLE_USER_WARNINGS"] = value

    def scenario(side: Side) -> Any:
        home = "jaxlightning.utilities.warnings" if side.ours else "lightning.fabric.utilities.warnings"
        done = subprocess.run(
            [sys.executable, "-c", code, home, f"{side.name}.utilities.rank_zero"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    same(scenario)


@pytest.mark.catalogue("ER10")
def test_every_recorded_refusal_is_compared_somewhere() -> None:
    """Or belongs to later work by name."""
    import ast

    from conformance import table

    texts = "".join(
        (table.TESTS / path).read_text()
        for path in (
            "trainer/test_errors.py",
            "optim/test_configure.py",
            "conformance/test_errors.py",
            "conformance/test_loops.py",
        )
    )
    compared = {
        node.value
        for node in ast.walk(ast.parse(texts.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    later = {
        "swa_bad_lr", "swa_bad_start", "swa_int_start0", "swa_two_opts",  # weight averaging
        "gas_manual", "manual_backward_in_automatic", "manual_returns_float", "manual_sched_monitor_key_warns",
        "predict_default_step_uses_forward",  # torch's own refusal of a list; what the default does has a test
        "_batch_end_outputs_keys",  # not a case: what one of the cases wrote
    }  # fmt: skip
    assert golden("errors").keys() - compared - later == set()
