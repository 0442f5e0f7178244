"""What holds for every test: the simulated devices, the leak checks, and what is left out when a package is missing.

Every test runs in an empty directory of its own, on eight simulated CPU devices, without the compilation cache (files
that run the same few steps again and again ask for one, see `compiled_once`). A test that leaves something behind
fails: an environment variable, a thread, a child process, another working directory, a changed JAX option. Open files
are counted once, when the session ends.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

DEVICES = 8

if "jax" in sys.modules:  # pragma: no cover
    raise pytest.UsageError("jax was imported before tests/conftest.py could ask for its simulated devices")

_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
os.environ["XLA_FLAGS"] = " ".join([*_flags, f"--xla_force_host_platform_device_count={DEVICES}"])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["MPLBACKEND"] = "agg"
# A variable that the person's shell happens to hold would change what a Trainer does.
for _name in [name for name in os.environ if name.startswith(("PL_", "SLURM_")) or name == "JAX_ENABLE_X64"]:
    del os.environ[_name]

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of interrupts, in this process
# and in scripts that they start, need what a program in the foreground has.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# TensorFlow and triton (which torch imports when it likes) each carry an LLVM: loading triton second is a segmentation
# fault (seen with tensorflow 2.21 and triton 3.8), loading it first is fine.
if importlib.util.find_spec("tensorflow") is not None and importlib.util.find_spec("triton") is not None:
    importlib.import_module("triton")

pytest_plugins = ["conformance.plugin", "support.resume_report", "support.suite_report"]

# --- Tests of packages that are not here -------------------------------------------------------------------

NEEDS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "torchvision"),
    "tf": ("tensorflow",),
    "lightning": ("lightning",),
    "grain": ("grain",),
}
"""What has to be importable for a test with the marker."""

_LEFT_OUT = pytest.StashKey[Counter[str]]()


def _missing(marker: str) -> bool:
    return any(importlib.util.find_spec(package) is None for package in NEEDS[marker])


def pytest_configure(config: pytest.Config) -> None:
    """Start the count of tests that are left out."""
    config.stash[_LEFT_OUT] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests whose packages are missing, and count them."""
    missing = [marker for marker in NEEDS if _missing(marker)]
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        reasons = [marker for marker in missing if item.get_closest_marker(marker) is not None]
        config.stash[_LEFT_OUT].update(reasons[:1])
        (dropped if reasons else kept).append(item)
    from support import suite_report  # as a plugin it is first imported by pytest

    suite_report.note_collected(config, kept, dropped)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the count of a pytest-xdist worker to the process that prints."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(session.config.stash[_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the count of a pytest-xdist worker; each worker collects all tests, so the counts do not add up."""
    for marker, number in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        counts = node.config.stash[_LEFT_OUT]
        counts[marker] = max(counts[marker], number)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which tests did not run because a package is not installed."""
    for marker, number in config.stash[_LEFT_OUT].items():
        packages = " and ".join(NEEDS[marker])
        terminalreporter.write_line(f"left out: {number} tests that need {packages}, not installed here", yellow=True)


# --- What a test may not leave behind ----------------------------------------------------------------------

# Set by libraries on first use, or by `seed_everything`, whose job it is: put back without a complaint.
_ENVIRONMENT_MAY_CHANGE = (
    "CRC32C_SW_MODE",
    "CUBLAS_",
    "CUDA_",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "GRPC_",
    "HDF5_PLUGIN_PATH",
    "KMP_",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTORCH_",
    "TF2_",
    "TF_",
    "TORCH",
    "TPU_",
)
# Threads that a library keeps for the whole process, by a word in their name or type.
_THREADS_MAY_STAY = (
    "TMonitor",
    "array_type_handler",
    "asyncio_",
    "execnet",
    "fsspecIO",
    "jax_",
    "metadata_store",
    "orbax",
    "pydevd",
)
_CHILDREN_MAY_STAY = ("resource_tracker", "multiprocessing.forkserver", "semaphore_tracker")
_GRACE_S = 3.0


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if not any(word in f"{thread.name} {type(thread).__name__}" for word in _THREADS_MAY_STAY)
    }


def _children() -> dict[int, str]:
    """Process id to command of every child process, zombies left out."""
    found: dict[int, str] = {child.pid: child.name for child in multiprocessing.active_children() if child.pid}
    # Twice per test, for each of a hundred threads: pathlib would take a millisecond longer.
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        try:
            with open(f"/proc/self/task/{thread}/children", "rb") as listing:
                pids = listing.read().split()
        except OSError:  # the thread ended while it was looked at
            continue
        for pid in map(int, pids):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command := b" ".join(words).decode(errors="replace").strip():
                found[pid] = command
    return {pid: name for pid, name in found.items() if not any(word in name for word in _CHILDREN_MAY_STAY)}


def _jax_options() -> dict[str, Any]:
    jax = sys.modules.get("jax")
    return dict(jax.config.values) if jax is not None else {}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def _put_back_environment(before: dict[str, str]) -> list[str]:
    """Restore the variables; return the names that a test had no right to change."""
    after = _environment()
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return sorted(name for name in changed if not name.startswith(_ENVIRONMENT_MAY_CHANGE))


def _put_back_jax_options(before: dict[str, Any]) -> list[str]:
    """Restore the options; return those that changed. Nothing to compare when this test imported JAX first."""
    after = _jax_options()
    changed = sorted(name for name in before if name in after and before[name] != after[name])
    for name in changed:
        sys.modules["jax"].config.update(name, before[name])
    return changed


def _wait_until_gone(found: Any) -> Any:
    """Poll until `found()` is empty or the grace is over; a thread that was told to stop needs a moment."""
    deadline = time.monotonic() + _GRACE_S
    left = found()
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        left = found()
    return left


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New directories; `mktemp` would look through those of all tests before for a free number."""
    parent = tmp_path_factory.mktemp("cwd")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(_homes: Iterator[Path]) -> Generator[None]:
    """Run the test in an empty directory; fail it when it leaks."""
    start = Path.cwd()
    home = next(_homes)
    home.mkdir()
    os.chdir(home)
    environment, options = _environment(), _jax_options()
    threads, children = _threads(), _children()
    yield
    problems: list[str] = []
    try:
        if Path.cwd() != home:
            problems.append(f"the working directory is {Path.cwd()}")
    except FileNotFoundError:
        problems.append("the working directory was deleted")
    os.chdir(start)
    if names := _put_back_environment(environment):
        problems.append(f"environment variables changed: {', '.join(names)}")
    if names := _put_back_jax_options(options):
        problems.append(f"JAX options changed: {', '.join(names)}")
    if left := _wait_until_gone(lambda: _threads() - threads):
        problems.append(f"threads still run: {', '.join(sorted(repr(thread) for thread in left))}")
    if processes := _wait_until_gone(lambda: {p: c for p, c in _children().items() if p not in children}):
        problems.append(f"child processes still run: {processes}")
    if problems:
        pytest.fail("the test left something behind: " + "; ".join(problems), pytrace=False)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Asked for by files that run the same few steps in many tests: what one test has compiled, the next reads back."""
    from jax.experimental.compilation_cache import compilation_cache

    config = sys.modules["jax"].config
    changed = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(config, name) for name in changed}
    compilation_cache.reset_cache()
    for name, value in changed.items():
        config.update(name, value)
    yield
    for name, value in before.items():
        config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="session")
def _files_are_closed(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Fail the session when a file in the tests' directories is still open at its end."""
    yield
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        return
    gc.collect()
    base = str(tmp_path_factory.getbasetemp())
    targets = []
    for descriptor in descriptors.iterdir():
        try:
            targets.append(os.readlink(descriptor))
        except OSError:  # the descriptor of the listing itself
            continue
    leaked = sorted(target for target in targets if target.startswith(base))
    if leaked:
        pytest.fail(f"{len(leaked)} files of the tests are still open: {', '.join(leaked[:10])}", pytrace=False)
