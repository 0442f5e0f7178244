"""The small parts of the loops: combining loaders, grouping batches, counters, overridden hooks, device flags."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tracing import TinyModule, loader

import jaxlightning as pl
from jaxlightning.loops.call import is_overridden
from jaxlightning.loops.data import count_batches
from jaxlightning.loops.progress import BatchProgress, OptimizationProgress, Progress
from jaxlightning.loops.stream import GroupedSource, concatenate
from jaxlightning.trainer_devices import DeviceFlags
from jaxlightning.utilities.combined_loader import CombinedLoader
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.states import RunningStage

Pair = namedtuple("Pair", "left right")


class Unsized:
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))


# --- CombinedLoader


@pytest.mark.lightning
@pytest.mark.torch
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": range(3), "b": range(10, 15)},
        lambda: [range(2), {"c": range(4), "d": (range(1), range(3))}],
        lambda: Pair(range(3), range(2)),
        lambda: OrderedDict(x=range(2), y=range(5)),
        lambda: range(4),
        lambda: [range(0), range(2)],
    ],
)
def test_a_combined_loader_iterates_like_lightnings(mode: str, make: Any) -> None:
    from lightning.pytorch.utilities import CombinedLoader as Theirs

    # A range is a collection to nobody, but it is an iterable.
    ours, theirs = CombinedLoader(make(), mode), Theirs(make(), mode)
    assert list(ours) == list(theirs)
    iter(ours), iter(theirs)
    assert len(ours) == len(theirs)


@pytest.mark.lightning
@pytest.mark.torch
@pytest.mark.parametrize("limits", [[1, 2], [5, 0], [float("inf"), 1]])
def test_limits_of_a_sequential_loader_are_lightnings(limits: list[float]) -> None:
    from lightning.pytorch.utilities import CombinedLoader as Theirs

    ours, theirs = CombinedLoader([range(3), range(4)], "sequential"), Theirs([range(3), range(4)], "sequential")
    ours.limits = theirs.limits = limits
    assert list(ours) == list(theirs)
    iter(ours), iter(theirs)
    assert len(ours) == len(theirs)


def test_a_combination_without_a_length_has_none() -> None:
    combined = CombinedLoader([Unsized(2), range(3)], "max_size")
    iter(combined)
    with pytest.raises(TypeError, match="has no length"):
        len(combined)
    assert combined.total() == float("inf")


def test_replacing_the_loaders_keeps_the_structure() -> None:
    combined = CombinedLoader({"a": range(2), "b": [range(3)]})
    combined.flattened = ["x", "y"]
    assert combined.iterables == {"a": "x", "b": ["y"]}
    with pytest.raises(ValueError, match="Mismatch in flattened length"):
        combined.flattened = ["x"]
    with pytest.raises(ValueError, match="Mismatch in number of limits"):
        combined.limits = [1]


def test_states_of_stateful_loaders_are_kept_and_counted() -> None:
    class Stateful(Unsized):
        position = 0

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    loaders = [Stateful(2), Unsized(2)]
    combined = CombinedLoader(loaders)
    loaders[0].position = 7  # type: ignore[attr-defined]
    states = combined._state_dicts()
    loaders[0].position = 0  # type: ignore[attr-defined]
    combined._load_state_dicts(states)
    assert loaders[0].position == 7  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="1 stateful loaders, but found 2 states"):
        combined._load_state_dicts([{}, {}])


# --- Several batches as one


@dataclasses.dataclass
class Batch:
    x: Any
    name: str


def test_batches_are_joined_along_axis_0_in_any_structure() -> None:
    def make(start: int) -> Any:
        rows = np.arange(start, start + 2)
        return {"a": rows, "b": [rows, ("p", "q")], "c": Pair(rows, 5), "d": Batch(rows, "same"), "e": None}

    joined = concatenate([make(0), make(2)])
    np.testing.assert_array_equal(joined["a"], [0, 1, 2, 3])
    assert joined["b"][1] == ("p", "q", "p", "q")
    assert isinstance(joined["c"], Pair)
    assert joined["c"].right == 5
    np.testing.assert_array_equal(joined["d"].x, [0, 1, 2, 3])
    assert joined["e"] is None


def test_a_leaf_without_an_axis_that_differs_is_refused() -> None:
    with pytest.raises(ValueError, match="joined along axis 0"):
        concatenate([{"a": 1}, {"a": 2}])


def test_groups_count_their_batches_and_keep_the_rest() -> None:
    class Source:
        length = 5

        def __iter__(self) -> Any:
            return (np.array([i]) for i in range(5))

    grouped = GroupedSource(Source(), 2)
    assert (grouped.length, len(grouped)) == (3, 3)
    assert [each.tolist() for each in grouped] == [[0, 1], [2, 3], [4]]


# --- Counters


@pytest.mark.lightning
@pytest.mark.torch
def test_counters_have_lightnings_dictionaries() -> None:
    from lightning.pytorch.loops import progress as theirs

    pairs = [
        (Progress(), theirs._Progress()),
        (BatchProgress(), theirs._BatchProgress()),
        (OptimizationProgress(), theirs._OptimizationProgress()),
    ]
    for ours, other in pairs:
        assert ours.state_dict() == other.state_dict()
    for step in ("ready", "started", "processed"):
        for ours, other in pairs[:2]:
            getattr(ours, f"increment_{step}")()
            getattr(other, f"increment_{step}")()
    for ours, other in pairs[:2]:
        assert ours.state_dict() == other.state_dict()
        ours.increment_by(2)
        other.increment_by(2)
        ours.reset_on_run()
        other.reset_on_run()
        assert ours.state_dict() == other.state_dict()


def test_an_unfinished_event_is_forgotten_on_both_sides() -> None:
    progress = BatchProgress()
    progress.increment_by(3)
    progress.increment_ready()
    progress.increment_started()
    progress.reset_on_restart()
    assert (
        progress.total.state_dict()
        == progress.current.state_dict()
        == dict.fromkeys(("ready", "completed", "started", "processed"), 3)
    )
    loaded = BatchProgress()
    loaded.load_state_dict(progress.state_dict())
    assert loaded == progress
    loaded.reset()
    assert loaded == BatchProgress()


# --- Hooks


def test_a_hook_is_overridden_by_a_class_an_instance_or_not_at_all() -> None:
    class Model(TinyModule):
        def on_fit_start(self) -> None:
            pass

    model = Model()
    assert is_overridden("on_fit_start", model)
    assert not is_overridden("on_fit_end", model)
    model.on_fit_end = lambda: None  # type: ignore[method-assign]
    assert is_overridden("on_fit_end", model)
    model.validation_step = None  # type: ignore[assignment,method-assign]
    assert not is_overridden("validation_step", model)
    assert not is_overridden("anything", None)
    assert not is_overridden("no_such_hook", model)


@pytest.mark.lightning
@pytest.mark.torch
def test_a_callback_of_lightning_is_judged_against_lightnings_base() -> None:
    import lightning.pytorch as theirs

    class One(theirs.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pass

    assert is_overridden("on_fit_start", One())
    assert not is_overridden("on_fit_end", One())


def test_a_batch_without_hooks_calls_no_function_of_the_loops(tmp_path: Path) -> None:
    """The promise behind the speed: what nobody overrides costs nothing per batch."""
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", limit_val_batches=0,
    )  # fmt: skip
    module = TinyModule()
    trainer.fit(module, loader(4))

    def calls(batches: int) -> Counter[str]:
        found: Counter[str] = Counter()

        def count(frame: Any, event: str, arg: Any) -> None:
            name = frame.f_code.co_filename
            if event == "call" and ("/loops/" in name or "trainer" in name or "combined_loader" in name):
                found[frame.f_code.co_qualname] += 1

        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        sys.setprofile(count)
        try:
            trainer.fit(module, loader(2 * batches))
        finally:
            sys.setprofile(None)
        return found

    few, many = calls(20), calls(120)
    # What is left belongs to the logger connector, which asks where the run is.
    assert {name: count for name, count in (many - few).items() if count >= 100} == {}


# --- Flags


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [(10, 1.0, 10), (10, 0.25, 2), (10, 3, 3), (10, 100, 10), (float("inf"), 4, 4), (float("inf"), 1.0, float("inf"))],
)
def test_a_limit_cuts_a_length(length: float, limit: float, expected: float) -> None:
    assert count_batches(RunningStage.TRAINING, length, limit) == expected


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("nope", "auto", "auto", 1), ValueError),
        (("mps", "auto", "auto", 1), MisconfigurationException),
        (("cpu", "nope", "auto", 1), ValueError),
        (("cpu", "deepspeed_stage_3", "auto", 1), NotImplementedError),
        (("cpu", object(), "auto", 1), ValueError),
        (("cpu", "auto", 0, 1), MisconfigurationException),
        (("cpu", "auto", [], 1), MisconfigurationException),
        (("cpu", "auto", -1, 1), MisconfigurationException),
        (("cpu", "auto", 1.5, 1), MisconfigurationException),
    ],
)
def test_device_flags_are_checked_without_a_backend(flags: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        DeviceFlags(*flags)


def test_the_number_of_devices_is_known_from_the_flags() -> None:
    assert DeviceFlags("cpu", "auto", "auto", 1).num_devices == 1
    assert DeviceFlags("cpu", "ddp", 3, 1).num_devices == 3
    assert DeviceFlags("cpu", "ddp", [0, 2], 1).num_devices == 2
    assert DeviceFlags("auto", "auto", "auto", 1).num_devices >= 1


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = DeviceFlags("cpu", "auto", 1, 1)
    assert (flags.local_rank, flags.node_rank, flags.world_size) == (0, 0, 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    assert (flags.local_rank, flags.node_rank) == (2, 1)
