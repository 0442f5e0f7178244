"""Worker processes beside JAX: no fork of this process, nothing left behind, ordinary scripts work."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlightning.adapters import as_source

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from support import torch_data as td  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


@pytest.fixture(autouse=True)
def _jax_runs() -> None:
    jnp.ones(3).sum().block_until_ready()


@pytest.fixture(autouse=True)
def _few_cores_are_fine() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*suggested max number of worker.*")
        yield


def test_workers_are_no_children_of_this_process_and_see_a_cpu_only_jax() -> None:
    batch = next(iter(as_source(DataLoader(td.SeesProcess(), batch_size=3, num_workers=1))))
    assert set(batch["platform"]) == {"cpu"}
    pid = int(batch["pid"][0])
    assert pid != os.getpid()
    assert not batch["has_jax"].any(), "a worker imported JAX although its dataset does not use it"
    parent = Path(f"/proc/{pid}/stat")
    if parent.exists():
        assert int(parent.read_text().rpartition(")")[2].split()[1]) != os.getpid()


def test_a_dataset_may_compute_with_jax_in_its_workers() -> None:
    source = as_source(DataLoader(td.UsesJax(), batch_size=4, num_workers=1, timeout=60))
    x, backend = next(iter(source))
    assert x.tolist() == [[0, 0, 0], [0, 1, 2], [0, 2, 4], [0, 3, 6]]
    assert set(backend) == {"cpu"}
    source.close()


def test_environment_of_this_process_is_unchanged() -> None:
    before = dict(os.environ)
    list(as_source(DataLoader(td.Samples(), batch_size=4, num_workers=1)))
    assert dict(os.environ) == before


def test_the_loader_is_as_it_was_afterwards() -> None:
    loader = DataLoader(td.Samples(), batch_size=4, num_workers=1)
    before = dict(vars(loader))
    list(as_source(loader))
    assert vars(loader) == before


def counts() -> tuple[int, int, int]:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    return threading.active_count(), len(multiprocessing.active_children()), descriptors


def started() -> tuple[int, int, int]:
    """The counts once the threads of an earlier pass, which end by themselves, are gone: equal for half a second."""
    deadline = time.monotonic() + 10
    now, since = counts(), time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < 0.5:
        time.sleep(0.05)
        if (latest := counts()) != now:
            now, since = latest, time.monotonic()
    return now


def leaves_more_than(expected: tuple[int, int, int]) -> bool:
    """Whether there is still more of anything after a while."""
    deadline = time.monotonic() + 5
    while (more := any(a > b for a, b in zip(counts(), expected, strict=True))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


def test_limited_passes_leave_no_thread_process_or_descriptor() -> None:
    loader = DataLoader(td.Samples(), batch_size=2, num_workers=2)
    source = as_source(loader)
    next(iter(source))
    source.close()
    before = started()
    for _ in range(6):
        iterator = iter(source)
        next(iterator)
        iterator.close()
    source.close()
    assert not leaves_more_than(before)


def test_hundred_short_passes_without_workers_leave_nothing() -> None:
    source = as_source(DataLoader(td.Samples(), batch_size=2))
    next(iter(source))
    before = started()
    for _ in range(100):
        with iter(source) as iterator:
            next(iterator)
    assert not leaves_more_than(before)


def test_an_exception_in_a_worker_is_raised_and_leaves_nothing() -> None:
    source = as_source(DataLoader(td.Failing(), batch_size=2, num_workers=2))
    with pytest.raises(RuntimeError, match="sample 7 is broken"):
        list(source)
    source.close()
    before = started()
    with pytest.raises(RuntimeError, match="sample 7 is broken") as caught:
        list(source)
    assert "in DataLoader worker process" in str(caught.value)
    del caught
    assert not leaves_more_than(before)


def test_a_dropped_iterator_ends_its_workers() -> None:
    source = as_source(DataLoader(td.Samples(), batch_size=2, num_workers=1))
    next(iter(source))
    source.close()
    before = started()
    iterator = iter(source)
    next(iterator)
    source._iterator = None
    del iterator
    assert not leaves_more_than(before)


def test_persistent_workers_live_until_close() -> None:
    loader = DataLoader(td.SeesProcess(), batch_size=11, num_workers=1, persistent_workers=True)
    source = as_source(loader)
    pids = [next(iter(source))["pid"][0] for _ in range(3)]
    assert len(set(pids)) == 1
    assert loader._iterator is not None
    source.close()
    assert loader._iterator is None


def test_what_cannot_be_pickled_is_loaded_in_this_process_with_one_warning() -> None:
    dataset = td.Unpicklable()
    source = as_source(DataLoader(dataset, batch_size=4, num_workers=2))
    with pytest.warns(UserWarning, match=r"its dataset \(Unpicklable\) cannot be sent to worker processes") as caught:
        batches = list(source)
    assert len([w for w in caught if "cannot be sent" in str(w.message)]) == 1
    assert np.concatenate(batches).tobytes() == dataset.values.numpy().tobytes()
    list(source)


def test_what_the_child_cannot_import_is_loaded_in_this_process() -> None:
    class Reduces(td.Samples):
        def __reduce__(self) -> Any:
            return _only_here, ()

    module = type(sys)("module_without_a_file")
    exec("def only_here():\n    raise AssertionError", vars(module))
    sys.modules["module_without_a_file"] = module
    global _only_here
    _only_here = module.only_here
    try:
        with pytest.warns(UserWarning, match="No module named 'module_without_a_file'"):
            assert len(list(as_source(DataLoader(Reduces(), batch_size=4, num_workers=1)))) == 3
    finally:
        del sys.modules["module_without_a_file"]


_only_here: Any = None


def test_a_batch_that_cannot_be_pickled_raises_instead_of_hanging() -> None:
    loader = DataLoader(td.Samples(), batch_size=4, num_workers=1, collate_fn=td.LocalBatch())
    with pytest.raises(Exception, match="Inside"):
        list(as_source(loader))


def test_local_functions_and_classes_are_sent_by_value() -> None:
    factor = 3

    class Local(td.Samples):
        def __getitem__(self, index: int) -> Any:
            return self.values[index] * factor

    loader = DataLoader(Local(), batch_size=11, num_workers=1, collate_fn=lambda samples: torch.stack(samples) + 1)
    (batch,) = as_source(loader)
    assert np.array_equal(batch, (td.Samples().values * 3 + 1).numpy())


def test_shared_tensors_stay_shared_with_workers() -> None:
    dataset = td.WritesShared()
    list(as_source(DataLoader(dataset, batch_size=4, num_workers=1)))
    assert dataset.seen.tolist() == [1] * 11


def test_explicit_spawn_is_kept() -> None:
    pid_of = {}

    source = as_source(DataLoader(td.SeesProcess(), batch_size=11, num_workers=1, multiprocessing_context="spawn"))
    (batch,) = source
    pid_of["spawn"] = batch["pid"][0]
    assert set(batch["platform"]) == {"cpu"}
    source.close()


SCRIPT = """
import sys, collections, dataclasses
import numpy as np, torch
import jax.numpy as jnp
from torch.utils.data import DataLoader, Dataset
from jaxlightning.adapters import as_source

jnp.ones(3).sum().block_until_ready()
print("started")
Batch = collections.namedtuple("Batch", "x name")
OFFSET = 10

def helper(i):
    return np.float32(i + OFFSET)

class Squares(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return helper(i) ** 2

def collate(samples):
    return Batch(torch.tensor(samples), "batch")

loader = DataLoader(Squares(), batch_size=3, num_workers=2, collate_fn=collate)
import warnings; warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".*suggested max number of worker.*")
for epoch in range(2):
    for batch in as_source(loader):
        assert type(batch) is Batch, type(batch)
        print(batch.x.tolist(), batch.name)
"""
EXPECTED = ["started"] + ["[100.0, 121.0, 144.0] batch", "[169.0, 196.0, 225.0] batch"] * 2


def run(arguments: list[str], stdin: str | None = None, cwd: Path | None = None) -> list[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["script", "command", "module", "stdin"])
def test_ordinary_scripts_without_a_main_guard_use_workers(form: str, tmp_path: Path) -> None:
    if form == "script":
        (tmp_path / "train.py").write_text(SCRIPT)
        lines = run([str(tmp_path / "train.py")])
    elif form == "module":
        (tmp_path / "train_module.py").write_text(SCRIPT)
        lines = run(["-m", "train_module"], cwd=tmp_path)
    elif form == "command":
        lines = run(["-c", SCRIPT])
    else:
        lines = run(["-"], stdin=SCRIPT)
    assert lines == EXPECTED


@pytest.mark.slow
def test_a_notebook_uses_workers() -> None:
    """A notebook's cells run in a `__main__` without a file."""
    program = f"""
        import sys, types
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile({SCRIPT!r}, "<ipython-input-1>", "exec"), vars(main))
    """
    assert run(["-c", textwrap.dedent(program)]) == EXPECTED


@pytest.mark.slow
def test_without_cloudpickle_a_script_falls_back_to_this_process(tmp_path: Path) -> None:
    script = "import sys; sys.modules['cloudpickle'] = None\n" + SCRIPT.replace(
        'warnings.simplefilter("error")', 'warnings.simplefilter("always")'
    )
    (tmp_path / "train.py").write_text(script)
    assert run([str(tmp_path / "train.py")]) == EXPECTED
