"""What `configure_optimizers` may return, against the golden record and against Lightning's own parser."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import optax
import pytest
from support.golden import read

from jaxlightning import optim
from jaxlightning.optim import LRSchedulerConfig, OptaxOptimizer, lr_scheduler, parse_optimizers
from jaxlightning.utilities.exceptions import MisconfigurationException

GOLDEN = read("errors")


class Module:
    """As much of a module as the parser looks at."""

    automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class Manual(Module):
    automatic_optimization = False


class NoState:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...


class WithState(NoState):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def sgd() -> optim.SGD:
    return optim.SGD("*", lr=0.1)


def _with(make: Callable[[Any], Any]) -> Callable[[], Any]:
    def build() -> Any:
        optimizer = sgd()
        return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

    return build


CASES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "two_optimizers_automatic": (Module, lambda: [sgd(), sgd()]),
    "opt_None": (Module, lambda: None),
    "opt_int": (Module, lambda: 1),
    "opt_mixed_list": (Module, lambda: [{"optimizer": sgd()}, sgd()]),
    "opt_dict_extra_keys": (Module, lambda: {"optimizer": sgd(), "foo": 1}),
    "sched_bad_interval": (Module, _with(lambda o: {"scheduler": lr_scheduler.StepLR(o, 1), "interval": "bad"})),
    "sched_extra_keys": (Module, _with(lambda o: {"scheduler": lr_scheduler.StepLR(o, 1), "foo": 1})),
    "sched_no_scheduler_key": (Module, _with(lambda o: {"interval": "step"})),
    "plateau_no_monitor": (Module, _with(lr_scheduler.ReduceLROnPlateau)),
    "sched_optimizer_not_returned": (Module, lambda: ([sgd()], [lr_scheduler.StepLR(sgd(), 1)])),
    "sched_missing_state_dict": (Module, _with(NoState)),
    "sched_custom_without_hook": (Module, _with(WithState)),
    "onecycle_epoch_interval_warns": (
        Module,
        _with(lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.1, total_steps=5, cycle_momentum=False)}),
    ),
    "manual_sched_monitor_key_warns": (
        Manual,
        _with(lambda o: {"scheduler": lr_scheduler.StepLR(o, 1), "monitor": "x"}),
    ),
}


@pytest.mark.catalogue("OP03", "OP04", "SC07", "SC09")
@pytest.mark.catalogue("OP01", adaptation="an optimizer is one of jaxlightning.optim or an optax transformation")
@pytest.mark.catalogue(
    "SC01", "SC08", "SC11", adaptation="schedulers are those of jaxlightning.optim, or optax schedules"
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.catalogue("ER10")
def test_errors_and_warnings_are_lightnings(name: str) -> None:
    golden, (module, build) = GOLDEN[name], CASES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if golden.get("ok"):
            parse_optimizers(module(), build())
            kinds = [warning.split(":")[0] for warning in golden["warnings"]]
            assert [w.category.__name__ for w in caught] == kinds
        else:
            with pytest.raises(Exception) as error:
                parse_optimizers(module(), build())
            assert type(error.value).__name__ == golden["type"]
            assert [base.__name__ for base in type(error.value).__mro__[1:-2]] == golden["mro"]


def test_optimizer_idx_is_refused() -> None:
    class Old(Module):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> None:  # type: ignore[override]
            ...

    with pytest.raises(RuntimeError, match="Remove the `optimizer_idx`"):
        parse_optimizers(Old(), sgd())


# --- forms -------------------------------------------------------------------------------------------------------


def _step(o: Any) -> Any:
    return lr_scheduler.StepLR(o, 1)


FORMS: dict[str, tuple[Any, Callable[[Any, Any], Any], int, int]] = {
    "optimizer": (Module, lambda a, b: a, 1, 0),
    "list": (Module, lambda a, b: [a], 1, 0),
    "tuple": (Module, lambda a, b: (a,), 1, 0),
    "pair": (Module, lambda a, b: ([a], [_step(a)]), 1, 1),
    "pair_list": (Module, lambda a, b: [[a], [_step(a)]], 1, 1),
    "pair_single": (Module, lambda a, b: ([a], _step(a)), 1, 1),
    "pair_dict": (Module, lambda a, b: ([a], [{"scheduler": _step(a), "interval": "step"}]), 1, 1),
    "pair_empty": (Module, lambda a, b: ([a], []), 1, 0),
    "dict": (Module, lambda a, b: {"optimizer": a}, 1, 0),
    "dict_scheduler": (Module, lambda a, b: {"optimizer": a, "lr_scheduler": _step(a)}, 1, 1),
    "dict_dict": (Module, lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": _step(a)}}, 1, 1),
    "two": (Manual, lambda a, b: [a, b], 2, 0),
    "two_tuple": (Manual, lambda a, b: (a, b), 2, 0),
    "two_pair": (Manual, lambda a, b: ([a, b], [_step(b)]), 2, 1),
    "two_dicts": (Manual, lambda a, b: [{"optimizer": a, "lr_scheduler": _step(a)}, {"optimizer": b}], 2, 1),
    "two_dicts_tuple": (Manual, lambda a, b: ({"optimizer": a}, {"optimizer": b, "lr_scheduler": _step(b)}), 2, 1),
}


@pytest.mark.catalogue("OP01", adaptation="an optimizer is one of jaxlightning.optim or an optax transformation")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_lightning_is_read(form: str) -> None:
    module, build, optimizers, schedulers = FORMS[form]
    a, b = sgd(), optim.Adam("*")
    setup = parse_optimizers(module(), build(a, b))
    assert setup.optimizers == [a, b][:optimizers]
    assert len(setup.schedulers) == schedulers
    assert all(isinstance(config, LRSchedulerConfig) for config in setup.schedulers)
    if form == "pair_dict":
        assert setup.schedulers[0].interval == "step"


def test_defaults_of_a_scheduler_config() -> None:
    optimizer = sgd()
    config = parse_optimizers(Module(), ([optimizer], [_step(optimizer)])).schedulers[0]
    expected = ("epoch", 1, None, True, False, None)
    assert (
        config.interval,
        config.frequency,
        config.monitor,
        config.strict,
        config.reduce_on_plateau,
        config.name,
    ) == expected


def test_a_plateau_is_recognised_and_takes_the_monitor_of_its_dictionary() -> None:
    optimizer = sgd()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    config = parse_optimizers(
        Module(), {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss"}
    ).schedulers[0]
    assert (config.reduce_on_plateau, config.monitor) == (True, "loss")
    inner = {"scheduler": plateau, "monitor": "loss", "strict": False}
    config = parse_optimizers(Module(), {"optimizer": optimizer, "lr_scheduler": inner}).schedulers[0]
    assert (config.reduce_on_plateau, config.monitor, config.strict) == (True, "loss", False)
    assert inner == {"scheduler": plateau, "monitor": "loss", "strict": False}, "the user's dictionary changed"


@pytest.mark.parametrize("conf", [{"monitor": None}, {}])
def test_a_plateau_dictionary_without_monitor_raises(conf: dict[str, Any]) -> None:
    optimizer = sgd()
    scheduler = {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), **conf}
    with pytest.raises(MisconfigurationException, match="must include a monitor"):
        parse_optimizers(Module(), {"optimizer": optimizer, "lr_scheduler": scheduler})
    with pytest.raises(MisconfigurationException, match="must include a monitor"):
        parse_optimizers(Module(), ([optimizer], [scheduler]))


def test_an_own_class_may_reduce_on_plateau() -> None:
    class Own(Module):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None: ...

    optimizer = sgd()
    scheduler = {"scheduler": WithState(optimizer), "reduce_on_plateau": True, "monitor": "m"}
    config = parse_optimizers(Own(), {"optimizer": optimizer, "lr_scheduler": scheduler}).schedulers[0]
    assert config.reduce_on_plateau


def test_manual_optimization_accepts_any_scheduler_with_state_and_keeps_the_interval() -> None:
    optimizer = sgd()
    conf = {"scheduler": WithState(optimizer), "interval": "step"}
    config = parse_optimizers(Manual(), {"optimizer": optimizer, "lr_scheduler": conf}).schedulers[0]
    assert config.interval == "step"


@pytest.mark.parametrize("frequency", [0, -1, 1.5, True])
def test_a_frequency_must_be_a_positive_integer(frequency: Any) -> None:
    optimizer = sgd()
    conf = {"scheduler": _step(optimizer), "frequency": frequency}
    with pytest.raises(MisconfigurationException, match="'frequency'"):
        parse_optimizers(Module(), {"optimizer": optimizer, "lr_scheduler": conf})


@pytest.mark.parametrize(
    "returned", [[], (), "adam", {}, {"optimizer": 3}, {"lr_scheduler": 1}, [[sgd()], 3, 4], optim.SGD]
)
def test_unknown_forms_list_the_known_ones(returned: Any) -> None:
    if returned in ([], ()):  # as in Lightning: a run without an optimizer, said by an empty list
        assert parse_optimizers(Module(), returned).optimizers == []
        return
    with pytest.raises(MisconfigurationException, match=r"may return one of|key 'optimizer'"):
        parse_optimizers(Module(), returned)


@pytest.mark.torch
def test_torchs_own_objects_are_refused_with_a_hint() -> None:
    import torch

    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for returned in (theirs, [theirs], {"optimizer": theirs}, ([theirs], [])):
        with pytest.raises(MisconfigurationException, match=r"the class of the same name in `jaxlightning.optim`"):
            parse_optimizers(Module(), returned)
    scheduler = torch.optim.lr_scheduler.StepLR(theirs, 1)
    with pytest.raises(MisconfigurationException, match=r"the class of the same name in `jaxlightning.optim`"):
        parse_optimizers(Module(), ([sgd()], [scheduler]))


# --- optax -------------------------------------------------------------------------------------------------------


def test_optax_transformations_are_wrapped() -> None:
    tx = optax.adam(1e-3)
    handle = parse_optimizers(Module(), tx).optimizers[0]
    assert isinstance(handle, OptaxOptimizer)
    assert handle.tx is tx
    assert handle.optimizer is tx
    multi = optax.MultiSteps(optax.sgd(0.1), 2)
    assert parse_optimizers(Module(), [multi]).optimizers[0].optimizer is multi


def test_the_dictionary_says_what_optax_cannot() -> None:
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    conf = {"optimizer": optax.adam(schedule), "lr": schedule, "params": "net", "name": "generator"}
    handle = parse_optimizers(Module(), conf).optimizers[0]
    assert handle.read_lr() == [pytest.approx(0.1)]
    assert handle.name == "generator"
    assert handle.owns is not None
    assert handle.owns.matches("net/kernel")
    with pytest.warns(RuntimeWarning, match=r"unsupported keys .*\{'lr'\}"):
        parse_optimizers(Module(), {"optimizer": sgd(), "lr": schedule})


def test_schedulers_over_one_transformation_share_its_handle_for_one_run() -> None:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    warm, decay = lr_scheduler.LinearLR(tx, 0.5, total_iters=2), lr_scheduler.ExponentialLR(tx, 0.5)
    both = lr_scheduler.ChainedScheduler([warm, decay], optimizer=tx)
    setup = parse_optimizers(Module(), ([tx], [both]))
    assert both.optimizer is setup.optimizers[0]
    assert setup.optimizers[0].read_lr() == [0.5]
    again = parse_optimizers(Module(), tx).optimizers[0]
    assert again is not setup.optimizers[0]
    assert again.read_lr() == [1.0]


def test_a_schedule_function_is_a_scheduler() -> None:
    optimizer = sgd()
    schedule = optax.exponential_decay(0.4, 1, 0.5)
    conf = {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
    config = parse_optimizers(Module(), conf).schedulers[0]
    assert (config.interval, optimizer.read_lr()) == ("step", [pytest.approx(0.4)])
    config.scheduler.step()
    assert optimizer.read_lr() == [pytest.approx(0.2)]
    saved = config.scheduler.state_dict()
    other = lr_scheduler.ScheduleLR(sgd(), schedule)
    other.load_state_dict(json.loads(json.dumps(saved)))
    other.step()
    assert other.get_last_lr() == [pytest.approx(0.1)]
    assert len(parse_optimizers(Module(), ([optimizer], schedule)).schedulers) == 1
    with pytest.raises(MisconfigurationException, match="which of the 2 optimizers"):
        parse_optimizers(Manual(), ([sgd(), sgd()], [schedule]))


def test_a_schedule_that_returns_nan_names_scheduler_and_step() -> None:
    scheduler = lr_scheduler.ScheduleLR(sgd(), lambda n: float("nan") if n == 2 else 0.1)
    scheduler.step()
    with pytest.raises(MisconfigurationException, match=r"ScheduleLR computed the learning rate nan .* at its step 2"):
        scheduler.step()


def test_what_is_no_scheduler_is_refused() -> None:
    optimizer = sgd()
    for wrong in (lr_scheduler.StepLR, 3, None):
        with pytest.raises((MisconfigurationException, TypeError)):
            parse_optimizers(Module(), ([optimizer], [wrong]))


# --- beside Lightning --------------------------------------------------------------------------------------------


@pytest.mark.lightning
@pytest.mark.parametrize("form", [name for name in FORMS if name != "pair_empty"])
def test_lightning_reads_the_same_forms_the_same_way(form: str) -> None:
    import torch
    from lightning.pytorch.core.optimizer import _configure_optimizers

    _, build, optimizers, schedulers = FORMS[form]
    parameter = torch.nn.Parameter(torch.zeros(1))
    a, b = torch.optim.SGD([parameter], lr=0.1), torch.optim.Adam([parameter])
    before = lr_scheduler.StepLR
    try:
        lr_scheduler.StepLR = torch.optim.lr_scheduler.StepLR
        found = _configure_optimizers(build(a, b))
    finally:
        lr_scheduler.StepLR = before  # type: ignore[misc]
    assert (len(found[0]), len(found[1])) == (optimizers, schedulers)
