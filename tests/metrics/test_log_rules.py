"""Which hook may log, which value, which reduction, which batch size: as recorded with Lightning."""

from __future__ import annotations

import dataclasses
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlightning as pl
from jaxlightning.metrics import extract_batch_size, log_value
from jaxlightning.metrics._fx_rules import resolve_levels
from jaxlightning.metrics._values import parse_reduce_fx
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.warnings import WarningCache

LEVELS = {
    "default": (None, None),
    "step=1,epoch=0": (True, False),
    "step=0,epoch=1": (False, True),
    "step=1,epoch=1": (True, True),
    "step=0,epoch=0": (False, False),
}
# What Lightning's message says and ours has to say too.
SAID = (
    "You can't `self.log()` inside",
    "must be one of",
    "is not useful",
)


@pytest.mark.catalogue("LG03", "LG04", "LG07")
@pytest.mark.catalogue("LG01", "LG02", adaptation="the options are known when the step is traced")
def test_every_hook_allows_what_it_allows_in_lightning(fake: Any) -> None:
    matrix = fake.golden("logging_rules")["matrix"]
    checked = 0
    for where, stages in matrix.items():
        hook = where.partition(".")[2]
        for stage, cases in stages.items():
            if stage == "predict":
                continue  # refused before the hook's rule is asked, see below
            for label, expected in cases.items():
                checked += 1
                if isinstance(expected, dict):
                    assert resolve_levels(hook, *LEVELS[label]) == (expected["on_step"], expected["on_epoch"])
                elif expected == "ok":
                    resolve_levels(hook, *LEVELS[label])
                else:
                    kind = {"MisconfigurationException": MisconfigurationException}[expected.partition(":")[0]]
                    with pytest.raises(kind) as caught:
                        resolve_levels(hook, *LEVELS[label])
                    for phrase in (*SAID, hook):
                        assert (phrase in expected) <= (phrase in str(caught.value)), (where, label, expected)
    assert checked > 300


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not implemented"):
        resolve_levels("on_tuesday", None, None)


@pytest.mark.catalogue("LG05")
def test_predict_hooks_cannot_log(fake: Any) -> None:
    expected = {
        case for where in fake.golden("logging_rules")["matrix"].values() for case in where.get("predict", {}).values()
    }
    assert all("result collection is not registered yet" in case for case in expected)
    module = fake.Module()
    trainer = fake.Trainer(module)
    trainer.state.stage = "predict"
    module._current_fx_name = "predict_step"
    with pytest.raises(MisconfigurationException, match="result collection is not registered yet"):
        module.log("a", 1.0)


def test_logging_outside_of_a_hook_is_refused(fake: Any) -> None:
    module = fake.Module()
    fake.Trainer(module).state.stage = "train"
    with pytest.raises(MisconfigurationException, match="not managed by the `Trainer` control flow"):
        module.log("a", 1.0)


@pytest.mark.catalogue("LG06")
def test_without_a_trainer_logging_warns(fake: Any) -> None:
    golden = fake.golden("logging_rules")["same_key_rules"]["no_trainer"]
    assert "reference is not registered on the model yet" in golden[0]
    with pytest.warns(UserWarning, match="reference is not registered on the model yet"):
        fake.Module().log("a", 1.0)
    with pytest.raises(ValueError, match="`str` values cannot be logged"):
        fake.Module().log("a", "x")


def test_barebones_logs_nothing_and_says_so(fake: Any) -> None:
    module = fake.Module()
    trainer = fake.Trainer(module)
    trainer.barebones = True
    with pytest.warns(UserWarning, match="barebones=True"):
        module.log("a", 1.0)


def _jax_value(name: str) -> Any:
    return {
        "float": 1.5,
        "int": 3,
        "bool": True,
        "np.float64": np.float64(2.5),
        "np.int64": np.int64(4),
        "tensor0d": jnp.array(1.0),
        "tensor1x1": jnp.ones((1, 1)),
        "tensor_long": jnp.array(7, jnp.int32),
        "tensor_half": jnp.array(1.5, jnp.float16),
        "tensor2": jnp.ones(2),
        "np_array_1": np.array([1.0]),
        "str": "x",
        "None": None,
        "list": [1.0],
        "dict": {"a": 1.0},
        "nested": {"a": {"b": 1.0}},
        "nan": float("nan"),
        "complex": 1 + 2j,
    }[name]


PHRASES = (
    "must have a single element",
    "`str` values cannot be logged",
    "`NoneType` values cannot be logged",
    "`list` values cannot be logged",
    "`dict` values cannot be logged",
    "`ndarray` values cannot be logged",
    "nested dictionaries cannot be logged",
    "must be real number, not complex",
)


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
@pytest.mark.catalogue("LG09", "LG10", adaptation="shapes and types are checked while tracing")
def test_values_become_what_they_become_in_lightning(fake: Any, where: str) -> None:
    """In a compiled step and from a hook on the host; float64 tensors need x64 and are left to another test."""
    for name, expected in fake.golden("logging_rules")["values"].items():
        if name == "tensor_double":
            continue

        class Module(fake.Module):  # type: ignore[name-defined,misc]
            pass

        def call(self: Any, *_: Any, name: str = name) -> None:
            self.log("v", _jax_value(name), on_step=True, on_epoch=True)

        setattr(Module, where, call)
        trainer = fake.Trainer(Module())
        if isinstance(expected, str):
            kind = {"ValueError": ValueError, "TypeError": TypeError}[expected.partition(":")[0]]
            with pytest.raises(kind) as caught:
                trainer.fit(fake.batches(2, 2))
            phrase = next(p for p in PHRASES if p in expected)
            assert phrase in str(caught.value)
            continue
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.fit(fake.batches(2, 2))
        got = trainer.callback_metrics
        assert list(got) == list(expected["callback_metrics"])
        for key, (number, dtype, shape) in expected["callback_metrics"].items():
            np.testing.assert_equal(float(got[key]), float(number))
            assert f"torch.{got[key].dtype}" == dtype
            assert list(got[key].shape) == shape
        messages = [str(w.message) for w in seen if "self.log" in str(w.message)]
        assert len(messages) == len(expected["warn"])
        assert all("needs to be floating to be reduced" in text for text in messages)


def test_double_precision_is_kept_with_x64(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None:
            self.log("v", jnp.array(1 / 3, jnp.float64), on_step=True, on_epoch=True)

    with jax.enable_x64(True):
        trainer = fake.Trainer(Module())
        trainer.fit(fake.batches(2, 2))
        assert trainer.callback_metrics["v_epoch"].dtype == np.float64
        assert trainer.callback_metrics["v_epoch"] == 1 / 3


@pytest.mark.torch
def test_torch_tensors_are_numbers_on_the_host_and_refused_in_a_step(fake: Any) -> None:
    import torch

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None:
            self.log("a", torch.tensor([[2.5]]), on_epoch=True)
            self.log("b", torch.tensor(1 / 3, dtype=torch.double))

    trainer = fake.Trainer(Module())
    trainer.fit(fake.batches(2))
    assert trainer.callback_metrics["a"] == 2.5
    assert trainer.callback_metrics["b"].dtype == np.float64

    class InStep(fake.Module):  # type: ignore[name-defined,misc]
        def training_step(self, *_: Any) -> None:
            self.log("a", torch.tensor(1.0))

    with pytest.raises(TypeError, match="torch tensor"):
        fake.Trainer(InStep()).fit(fake.batches(2))


def test_a_value_traced_by_the_users_own_jit_is_refused(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None:
            @jax.jit
            def inner(x: Any) -> Any:
                self.log("a", x)
                return x

            inner(1.0)

    with pytest.raises(RuntimeError, match=r"traced by a `jax\.jit`"):
        fake.Trainer(Module()).fit(fake.batches(2))


def _reductions() -> dict[str, Any]:
    import torch

    names = ("mean", "sum", "min", "max")
    return {
        **{name: name for name in ("mean", "sum", "min", "max", "avg", "SUM", "median")},
        **{f"builtins.{f.__name__}": f for f in (min, max, sum)},
        **{f"torch.{name}": getattr(torch, name) for name in (*names, "prod")},
    }


@pytest.mark.torch
@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
@pytest.mark.catalogue("LG21", adaptation="the functions of jax and numpy name the same reductions")
def test_reductions_are_lightnings(fake: Any, where: str) -> None:
    reductions = _reductions()
    for name, expected in fake.golden("logging_rules")["reduce_fx"].items():

        class Module(fake.Module):  # type: ignore[name-defined,misc]
            pass

        def call(self: Any, *args: Any, fx: Any = reductions[name]) -> None:
            self.log("v", [5.0, 1.0, 3.0][args[-1]], on_step=True, on_epoch=True, reduce_fx=fx)

        setattr(Module, where, call)
        trainer = fake.Trainer(Module())
        if isinstance(expected, str):
            with pytest.raises(MisconfigurationException, match=r"reduce_fx=\{min,max,mean,sum\}"):
                trainer.fit(fake.batches(2, 2, 2))
        else:
            trainer.fit(fake.batches(2, 2, 2))
            assert fake.rounded(trainer.callback_metrics) == expected, name


def test_the_functions_of_jax_and_numpy_name_the_same_reductions() -> None:
    for home in (jnp, np):
        for name in ("mean", "sum", "min", "max"):
            assert parse_reduce_fx(getattr(home, name)) == name
    assert parse_reduce_fx(jnp.amax) == "max"
    for wrong in (np.median, lambda values: values[0], jax.lax.pmean, None):
        with pytest.raises(MisconfigurationException, match=r"reduce_fx=\{min,max,mean,sum\}"):
            parse_reduce_fx(wrong)  # type: ignore[arg-type]


def _structures(size: int) -> dict[str, Any]:
    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    return {
        "tensor": zeros(size, 4),
        "tuple": (zeros(size, 4), zeros(size)),
        "dict": {"x": zeros(size, 4), "y": zeros(size)},
        "nested": {"a": [zeros(size, 4)], "b": {"c": zeros(size)}},
        "first_differs": (zeros(7, 2), zeros(size, 4)),
        "str_only": "abc",
        "list_of_str": ["a"] * size,
        "none": [None],
        "int": 5,
        "empty_list": [],
    }


OPTIONS = {"": {}, "+batch_size=3": {"batch_size": 3}, "+step_only": {"on_epoch": False}, "+sum": {"reduce_fx": "sum"}}


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
@pytest.mark.catalogue("LG19", "LG20")
def test_the_batch_size_is_inferred_where_lightning_infers_it(fake: Any, where: str) -> None:
    """`scalar_first` is the difference of LG18: see the next test."""
    for label, expected in fake.golden("logging_rules")["batch_size_inference"].items():
        structure, plus, option = label.partition("+")
        if structure == "scalar_first":
            continue

        class Module(fake.Module):  # type: ignore[name-defined,misc]
            pass

        def call(self: Any, *args: Any, options: Any = OPTIONS[plus + option]) -> None:
            self.log("v", 1.0 if args[-1] == 0 else 0.0, **{"on_step": True, "on_epoch": True, **options})

        setattr(Module, where, call)
        trainer = fake.Trainer(Module())
        batches = [_structures(4)[structure], _structures(1)[structure]]
        if isinstance(expected, str):
            with pytest.raises(MisconfigurationException, match="could not infer the batch_size"):
                trainer.fit(batches)
            continue
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.fit(batches)
        assert fake.rounded(trainer.callback_metrics["v"]) == expected["v"], label
        assert len([w for w in seen if "ambiguous collection" in str(w.message)]) == len(expected["warn"]), label


@pytest.mark.catalogue("LG18")
def test_scalars_are_passed_over_when_the_batch_size_is_inferred() -> None:
    """LG18 in DIFFERENCES: Lightning would take 1."""
    assert extract_batch_size((np.float32(1.0), np.array(2.0), np.zeros((4, 2)))) == 4
    assert extract_batch_size({"x": np.zeros((4, 2)), "temperature": jnp.array(1.0)}) == 4
    assert extract_batch_size(np.array(3.0)) == 1


def test_dataclasses_and_named_tuples_are_looked_into() -> None:
    @dataclasses.dataclass
    class Batch:
        name: str
        image: Any

    assert extract_batch_size(Batch("a", np.zeros((5, 2)))) == 5
    assert extract_batch_size([Batch("a", jnp.zeros((3,)))]) == 3
    with pytest.warns(UserWarning, match="ambiguous"):
        assert extract_batch_size((np.zeros(4), "label"), WarningCache()) == 4


def test_a_batch_that_contains_itself_is_refused() -> None:
    batch: list[Any] = []
    batch.append(batch)
    with pytest.raises(RecursionError, match="could not infer the batch_size"):
        extract_batch_size(batch)


def test_the_batch_size_is_inferred_once_per_batch(fake: Any) -> None:
    looked = []

    class Batch(dict[str, Any]):
        def values(self) -> Any:
            looked.append(1)
            return super().values()

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None:
            for name in "abc":
                self.log(name, 1.0, on_epoch=True)

    fake.Trainer(Module()).fit([Batch(x=np.zeros((2, 2))), Batch(x=np.zeros((2, 2)))])
    assert len(looked) == 2


def test_a_logger_is_missed_only_when_it_is_asked_for(fake: Any) -> None:
    class Module(fake.Module):  # type: ignore[name-defined,misc]
        def on_train_epoch_end(self) -> None:
            self.log("quiet", 1.0)
            self.log("loud", 1.0, logger=True)

    with pytest.warns(UserWarning, match="loud.*no logger configured"):
        fake.Trainer(Module()).fit(fake.batches(2))


@pytest.mark.lightning
def test_options_that_cannot_work_say_so(fake: Any) -> None:
    import torchmetrics
    from flax import nnx

    from jaxlightning.metrics import SumMetric

    class Metric:
        def update(self, x: Any) -> None: ...
        def compute(self) -> float:
            return 1.0

    class Module(fake.Module):  # type: ignore[name-defined,misc]
        option: dict[str, Any] = {}

        def on_train_epoch_end(self) -> None:
            option = dict(self.option)
            make = option.pop("make", None)
            self.log("m", **({"value": make()} if make else {}), **option)

    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"value": Metric()}, ValueError, "without `merge`"),
        ({"value": 1.0, "sync_dist_group": 1}, NotImplementedError, "groups"),
        ({"value": 1.0, "metric_attribute": "acc"}, MisconfigurationException, "no metric object"),
        ({"make": SumMetric}, MisconfigurationException, "Could not find the `LightningModule` attribute"),
        ({"make": nnx.metrics.Average}, NotImplementedError, "nnx metric"),
        ({"value": torchmetrics.SumMetric()}, MisconfigurationException, "metrics of the same names"),
    ]
    for option, error, expected in cases:
        module = Module()
        module.option = option
        with pytest.raises(error, match=expected):
            fake.Trainer(module).fit(fake.batches(2))


def test_a_step_outside_of_a_loop_keeps_its_own_logs(fake: Any) -> None:
    """As in `functionalize`: no trainer, but a step that collects."""
    from jaxlightning.compile.trace import activate

    module, trace = fake.Module(), fake.StubTrace("train")
    with activate(trace):
        log_value(module, "a", jnp.array(2.0))
    assert [(entry.meta.name, entry.meta.fx, entry.weight) for entry in trace.logs] == [("a", "training_step", None)]


@pytest.mark.parametrize("value", [2**40, np.int64(2**40), Fraction(2**40), Decimal(2**40)])
def test_large_integers_and_exact_numbers_are_logged_in_a_step(value: Any) -> None:
    import flax.linen as nn
    import optax

    class Logs(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Dense(1)

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("large", value, on_step=True, on_epoch=True)
            return self.net(batch).mean()

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(max_epochs=1, jit=False, **quiet)
    trainer.fit(Logs(), pl.ArrayLoader(np.ones((2, 2), np.float32), batch_size=1))
    assert float(trainer.callback_metrics["large_epoch"]) == float(trainer.callback_metrics["large_step"]) == 2.0**40
