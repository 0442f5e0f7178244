"""Any iterable, the registry, Lightning's objects, and prefetching."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxlightning.adapters import (
    Prefetcher,
    Source,
    as_source,
    combined_parts,
    is_lightning_datamodule,
    prefetched,
    register_adapter,
    unregister_adapter,
)


class Sized:
    """A user's loader."""

    def __init__(self, n: int = 4) -> None:
        self.n = n
        self.pulled = 0
        self.epochs: list[int] = []
        self.closed = 0

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        try:
            for i in range(self.n):
                self.pulled += 1
                yield {"x": np.full((2,), i, np.float32)}
        finally:
            self.closed += 1


def aligned(size: int) -> np.ndarray:
    raw = np.zeros(size * 4 + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size * 4].view(np.float32)


def test_a_sized_iterable_object() -> None:
    loader = Sized()
    source = as_source(loader)
    assert source.length == 4
    source.set_epoch(2)
    assert loader.epochs == [2]
    assert [batch["x"][0] for batch in source] == [0, 1, 2, 3]
    assert [batch["x"][0] for batch in source] == [0, 1, 2, 3]
    assert loader.closed == 2


def test_no_batch_is_pulled_that_nobody_asked_for() -> None:
    loader = Sized()
    source = as_source(loader)
    iterator = iter(source)
    next(iterator)
    next(iterator)
    iterator.close()
    assert loader.pulled == 2
    assert loader.closed == 1
    assert list(iterator) == []


def test_a_new_iteration_closes_the_one_before() -> None:
    loader = Sized()
    source = as_source(loader)
    first = iter(source)
    next(first)
    iter(source)
    assert loader.closed == 1
    assert list(first) == []


def test_a_function_is_called_for_every_pass() -> None:
    source = as_source(lambda: (np.ones(2) * i for i in range(3)))
    assert source.length is None
    assert [len(list(source)) for _ in range(2)] == [3, 3]


def test_a_generator_goes_on_where_it_was_left() -> None:
    source = as_source(np.float32(i) for i in range(5))
    with iter(source) as iterator:
        assert [next(iterator).item() for _ in range(2)] == [0, 1]
    assert [value.item() for value in source] == [2, 3, 4]


def test_a_generator_that_is_used_up_warns() -> None:
    source = as_source(np.float32(i) for i in range(2))
    list(source)
    with pytest.warns(UserWarning, match="can be iterated only once and was used up"):
        assert list(source) == []


def test_buffers_that_are_reused_do_not_change_batches() -> None:
    def loader() -> Iterator[Any]:
        buffer = aligned(4096)
        for i in range(200):
            buffer[:] = i
            yield buffer

    step = jax.jit(lambda total, x: total * 0.5 + x)
    total = np.zeros(4096, np.float32)
    expected = np.zeros(4096, np.float32)
    kept = []
    for batch in as_source(loader):
        total = step(total, batch)
        kept.append(batch)
    for i in range(200):
        expected = step(expected, np.full(4096, i, np.float32))
    assert np.asarray(total).tobytes() == np.asarray(expected).tobytes()
    assert [batch[-1] for batch in kept] == list(range(200))


def test_position_is_found_by_reading_on() -> None:
    source = as_source(Sized())
    iterator = iter(source)
    next(iterator)
    state = source.state_dict()
    assert state == {"kind": "IterableSource", "epoch": 0, "batch": 1}
    fresh = as_source(Sized())
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert [batch["x"][0] for batch in fresh] == [1, 2, 3]
    assert len(list(fresh)) == 4


def test_a_loader_with_its_own_state_is_resumed_by_it() -> None:
    class Stateful:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[Any]:
            while self.at < 4:
                self.at += 1
                yield np.float32(self.at)
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    source = as_source(Stateful())
    iterator = iter(source)
    next(iterator)
    state = source.state_dict()
    fresh = as_source(Stateful())
    fresh.load_state_dict(state)
    assert [value.item() for value in fresh] == [2, 3, 4]


def test_an_exception_keeps_its_traceback_and_releases_the_iterator() -> None:
    done = []

    def broken() -> Iterator[Any]:
        try:
            yield np.zeros(1)
            raise RuntimeError("batch 1 is broken")
        finally:
            done.append(True)

    source = as_source(broken)
    iterator = iter(source)
    next(iterator)
    with pytest.raises(RuntimeError, match="batch 1 is broken") as caught:
        next(iterator)
    assert caught.traceback[-1].name == "broken"
    assert done == [True]
    assert list(iterator) == []


def test_an_empty_loader_gives_no_batch() -> None:
    assert list(as_source(Sized(0))) == []


@pytest.mark.parametrize("value", [3, None, object(), "text", b"x", Sized], ids=lambda value: type(value).__name__)
def test_what_cannot_be_iterated_raises(value: Any) -> None:
    with pytest.raises(TypeError, match="where a loader is expected"):
        as_source(value)


@pytest.mark.parametrize(
    "value", [np.zeros(3), [np.zeros(3)], (np.zeros(3), np.zeros(3)), {"x": np.zeros(3)}, jax.numpy.zeros(3)]
)
def test_arrays_name_array_loader(value: Any) -> None:
    with pytest.raises(TypeError, match="ArrayLoader"):
        as_source(value)


@pytest.mark.torch
def test_torch_tensors_name_array_loader() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="ArrayLoader"):
        as_source([torch.zeros(3)])


def test_a_list_of_batches_is_refused() -> None:
    with pytest.raises(TypeError, match="Collections of loaders are read by the Trainer"):
        as_source([{"x": np.zeros(3)}])


def test_a_source_is_used_as_it_is_unless_options_are_given() -> None:
    source = as_source(lambda: iter([np.zeros((1, 3, 4, 4), np.float32)]))
    assert as_source(source) is source
    moved = as_source(source, channels_last=True)
    assert moved is not source
    assert next(iter(moved)).shape == (1, 4, 4, 3)


def test_bad_options_raise() -> None:
    with pytest.raises(ValueError, match="vectorize must be"):
        as_source(Sized(), vectorize="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ragged must be"):
        as_source(Sized(), ragged="drop")  # type: ignore[arg-type]


# registry


def test_adapters_can_be_registered_for_a_class_or_a_module() -> None:
    calls = []

    def factory(obj: Any, options: Any) -> Source:
        calls.append((type(obj).__name__, options.channels_last))
        return as_source(lambda: iter(obj))

    class Derived(Sized):
        pass

    register_adapter(f"{__name__}:Sized", factory)
    try:
        assert len(list(as_source(Derived(), channels_last=True))) == 4
    finally:
        unregister_adapter(f"{__name__}:Sized")
    register_adapter(__name__, factory)
    try:
        as_source(Sized())
    finally:
        unregister_adapter(__name__)
    as_source(Sized())
    assert calls == [("Derived", True), ("Sized", False)]


def test_entry_points_register_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxlightning.adapters import _registry

    class Good:
        name, value = "good", "package:register"

        def load(self) -> Any:
            return lambda register: register("some.package:Loader", lambda obj, options: obj)

    class Bad:
        name, value = "bad", "missing:register"

        def load(self) -> Any:
            raise ImportError("no module named missing")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Good(), Bad()] if group else [])
    monkeypatch.setattr(_registry, "_entry_points_loaded", False)
    with pytest.warns(UserWarning, match=r"entry point 'bad' \(missing:register\) could not be loaded"):
        as_source(Sized())
    loader = type("Loader", (), {"__module__": "some.package"})()
    try:
        assert as_source(loader) is loader
    finally:
        unregister_adapter("some.package:Loader")


def test_an_installed_package_brings_its_adapter_without_being_imported(tmp_path: Path) -> None:
    """A real distribution on the path, as `pip install` leaves it; `other` must not be imported by anybody but us."""
    info = tmp_path / "other_loaders-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-loaders\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jaxlightning.adapters]\nmine = other_adapter:register\n")
    (tmp_path / "other_loader.py").write_text("class Loader:\n    def read(self):\n        return [1.0, 2.0]\n")
    (tmp_path / "other_adapter.py").write_text(
        "from jaxlightning.adapters import BatchIterator, Source\n"
        "class OtherSource(Source):\n"
        "    def _open(self, skip):\n"
        "        return BatchIterator(self, iter(self.origin.read()[skip:]), self._converter())\n"
        "def register(register_adapter):\n"
        "    register_adapter('other_loader:Loader', lambda loader, options: OtherSource(loader, options))\n"
    )
    code = (
        "import other_loader; from jaxlightning.adapters import as_source;"
        "s = as_source(other_loader.Loader()); print(type(s).__name__, [float(b) for b in s], s.state_dict())"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.strip() == "OtherSource [1.0, 2.0] {'kind': 'OtherSource', 'epoch': 0, 'batch': 0}"


def test_importing_and_reading_arrays_imports_no_framework() -> None:
    code = (
        "import sys; from jaxlightning.adapters import as_source, ArrayLoader; import numpy as np;"
        "list(as_source(ArrayLoader(np.zeros(3)))); list(as_source(lambda: iter([np.zeros(3)])));"
        "from jax._src import xla_bridge as b; assert not b.backends_are_initialized();"
        "print([m for m in ('torch', 'tensorflow', 'grain', 'datasets', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


# Lightning's objects


@pytest.mark.lightning
def test_lightning_objects_are_recognised() -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.utilities import CombinedLoader

    loaders = {"a": [1, 2], "b": [3]}
    combined = CombinedLoader(loaders, "max_size_cycle")
    parts = combined_parts(combined)
    assert parts is not None
    assert parts.iterables is loaders
    assert parts.mode == "max_size_cycle"
    assert combined_parts(loaders) is None
    with pytest.raises(TypeError, match="CombinedLoader"):
        as_source(combined)

    class Module(LightningDataModule):
        pass

    assert is_lightning_datamodule(Module())
    assert not is_lightning_datamodule(Sized())


# prefetching


class Counting:
    def __init__(self, n: int = 10) -> None:
        self.n, self.pulled, self.closed = n, 0, False

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.pulled == self.n:
            raise StopIteration
        self.pulled += 1
        return self.pulled - 1

    def close(self) -> None:
        self.closed = True


def test_prefetching_gives_everything_in_order_and_closes() -> None:
    raw = Counting()
    assert list(Prefetcher(raw, 3)) == list(range(10))
    assert raw.closed


@pytest.mark.parametrize(("size", "limit"), [(2, 3), (5, 3), (1, 1), (2, 0)])
def test_prefetching_never_pulls_beyond_the_limit(size: int, limit: int) -> None:
    raw = Counting()
    prefetcher = Prefetcher(raw, size, limit)
    assert list(prefetcher) == list(range(limit))
    assert raw.pulled == limit


def test_prefetching_never_holds_more_than_its_size() -> None:
    raw = Counting()
    with Prefetcher(raw, 2) as prefetcher:
        time.sleep(0.05)
        assert raw.pulled == 2
        assert next(prefetcher) == 0
        time.sleep(0.05)
        assert raw.pulled == 3
    assert raw.closed


def test_prefetching_raises_in_turn_with_the_original_traceback() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("broken")

    prefetcher = Prefetcher(broken(), 4)
    assert next(prefetcher) == 1
    with pytest.raises(RuntimeError, match="broken") as caught:
        next(prefetcher)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "broken"
    assert list(prefetcher) == []


def test_a_dropped_prefetcher_ends_its_thread() -> None:
    before = threading.active_count()
    prefetcher = Prefetcher(Counting(), 2)
    next(prefetcher)
    del prefetcher
    gc.collect()
    deadline = time.monotonic() + 3
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_prefetching_of_size_zero_is_off() -> None:
    raw = Counting()
    assert prefetched(raw, 0) is raw
    with pytest.raises(ValueError, match="size must be at least 1"):
        Prefetcher(raw, 0)
    with pytest.raises(ValueError, match="limit must not be negative"):
        Prefetcher(raw, 1, -1)
