"""Worker processes for torch loaders beside a running JAX.

A process that runs JAX has threads that hold locks, so forking it may dead-lock (jax-ml/jax#3382). Workers are forked
from a small server process instead, started once with torch imported and without JAX. Unlike Python's own "forkserver"
and "spawn", the user's script is not run again in the workers: what it defines in `__main__` (or in a function or a
notebook cell) is sent by value with cloudpickle, so that scripts without a main guard, `python -c` and notebooks work.
Workers see JAX_PLATFORMS=cpu and hold no device memory.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import importlib.util
import io
import multiprocessing
import operator
import os
import pathlib
import pickle
import runpy
import sys
import types
from collections.abc import Iterator
from multiprocessing import context, process, reduction, util
from typing import Any

WORKER_MAIN = str(pathlib.Path(__file__).with_name("_worker_main.py"))
_PRELOAD = ("numpy", "torch", "torch.utils.data", "torch.multiprocessing", "cloudpickle", "torchvision")
_PROBE_SECONDS = 120.0
_CPU_ONLY = {"JAX_PLATFORMS": "cpu"}

try:
    from multiprocessing import forkserver, popen_forkserver
except ImportError:  # a system without file descriptor passing (Windows)
    forkserver = popen_forkserver = None  # type: ignore[assignment]


class CannotSend(Exception):
    """A part of a loader cannot be sent to worker processes.

    Args:
        part: "dataset", "collate_fn" or "worker_init_fn".
        value: The user's object.
        reason: What went wrong.
    """

    def __init__(self, part: str, value: Any, reason: str) -> None:
        super().__init__(part, value, reason)
        self.part = part
        self.value = value
        self.reason = reason


@contextlib.contextmanager
def cpu_only_environment() -> Iterator[None]:
    """Set the environment that child processes started inside shall have."""
    before = {name: os.environ.get(name) for name in _CPU_ONLY}
    os.environ.update(_CPU_ONLY)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# pickling


def _reduce_tensor(tensor: Any) -> Any:
    # Tensors that are already shared stay shared. Others travel by value, as they do under fork: moving a data set to
    # shared memory would need as much of /dev/shm, which containers keep small.
    if tensor.is_shared() or tensor.device.type != "cpu":
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor)
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _reduce_storage(storage: Any) -> Any:
    untyped = vars(storage).get("_untyped_storage", storage) if hasattr(storage, "__dict__") else storage
    if untyped.is_shared() or untyped.device.type != "cpu":
        return reduction.ForkingPickler._extra_reducers[type(storage)](storage)  # type: ignore[attr-defined]
    return storage.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _reducers() -> collections.ChainMap[Any, Any]:
    import torch

    own: dict[Any, Any] = {torch.Tensor: _reduce_tensor, torch.nn.Parameter: _reduce_tensor}
    for cls in reduction.ForkingPickler._extra_reducers:  # type: ignore[attr-defined]
        if "Storage" in cls.__name__ and cls.__module__.partition(".")[0] == "torch":
            own[cls] = _reduce_storage
    return collections.ChainMap(own, reduction.ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]


class _Definitions:
    """What was found in `__main__`; reduced to a dict when its turn comes, after the content."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def note(self, value: Any) -> None:
        in_main = isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__"
        if in_main and value.__qualname__.isidentifier():
            self.found[value.__qualname__] = value

    def __reduce__(self) -> Any:
        return dict, (list(self.found.items()),)


def dumps(content: Any) -> bytes:
    """Pickle for a worker: `__main__` by value, shared memory and pipes as multiprocessing does.

    Args:
        content: What to send.

    Returns:
        The pickle of (content, definitions by name).
    """
    definitions = _Definitions()
    buffer = io.BytesIO()
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        pickler: Any = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _reducers()
    else:
        base: Any = cloudpickle.Pickler

        class Pickler(base):  # type: ignore[misc]
            dispatch_table = collections.ChainMap(base._dispatch_table, *_reducers().maps)

            def reducer_override(self, value: Any) -> Any:
                definitions.note(value)
                return super().reducer_override(value)

        pickler = Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump((content, definitions))
    return buffer.getvalue()


# processes

if popen_forkserver is not None:
    _server = forkserver.ForkServer()

    class _Started:
        """Pickles as the call that runs `_worker_main.py` in the child and gives its process object."""

        def __init__(self, parts: list[tuple[str, bytes]], report: Any) -> None:
            self._globals = {"environment": {**os.environ, **_CPU_ONLY}, "parts": parts, "report": report}

        def __reduce__(self) -> Any:
            return operator.getitem, (_RunPath(self._globals), "PROCESS")

    class _RunPath:
        def __init__(self, namespace: dict[str, Any]) -> None:
            self._namespace = namespace

        def __reduce__(self) -> Any:
            return runpy.run_path, (WORKER_MAIN, self._namespace)

    class _Popen(popen_forkserver.Popen):
        def _launch(self, process_obj: Any) -> None:
            buffer = io.BytesIO()
            context.set_spawning_popen(self)
            try:
                # everything but the main module, which must not run again
                preparation = {
                    "name": process_obj._name,
                    "authkey": process.current_process().authkey,
                    "sys_path": [path or process.ORIGINAL_DIR or os.getcwd() for path in sys.path],  # type: ignore[attr-defined]
                    "sys_argv": sys.argv,
                    "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined,unused-ignore]
                    "dir": os.getcwd(),
                }
                reduction.dump(preparation, buffer)
                reduction.dump(_Started(process_obj._parts(), process_obj._report), buffer)
            finally:
                context.set_spawning_popen(None)
            with cpu_only_environment():  # read when the server is started, which is now if it is not running
                self.sentinel, write_end = _server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
            keep = os.dup(write_end)  # its other end tells the child that we are alive
            self.finalizer = util.Finalize(self, util.close_fds, (keep, self.sentinel))  # type: ignore[attr-defined]
            with open(write_end, "wb", closefd=True) as pipe:
                pipe.write(buffer.getbuffer())
            self.pid = forkserver.read_signed(self.sentinel)

    class _WorkerProcess(process.BaseProcess):
        _start_method = "forkserver"
        _report: Any = None

        def _parts(self) -> list[tuple[str, bytes]]:
            return [("process", dumps(dict(vars(self))))]

        @staticmethod
        def _Popen(process_obj: Any) -> Any:
            return _Popen(process_obj)

    class _ProbeProcess(_WorkerProcess):
        def __init__(self, parts: list[tuple[str, Any]], report: Any) -> None:
            super().__init__(name="jaxlightning-probe", daemon=True)
            self._contents = parts
            self._report = report

        def _parts(self) -> list[tuple[str, bytes]]:
            pickled = []
            for name, value in self._contents:
                try:
                    pickled.append((name, dumps(value)))
                except Exception as error:
                    raise CannotSend(name, value, f"{type(error).__name__}: {error}") from error
            return pickled

    class WorkerContext(context.ForkServerContext):
        """A multiprocessing context whose processes come from our own clean server."""

        Process = _WorkerProcess  # type: ignore[assignment]


def available() -> bool:
    """Tell whether this system can fork from a server process."""
    return popen_forkserver is not None and "forkserver" in multiprocessing.get_all_start_methods()


def sends_by_value() -> bool:
    """Tell whether what a script defines can be sent to workers (cloudpickle is installed)."""
    return importlib.util.find_spec("cloudpickle") is not None


def make_context() -> Any:
    """Make a context to give to a DataLoader as `multiprocessing_context`."""
    if _server._preload_modules == ["__main__"]:  # type: ignore[attr-defined]
        _server.set_forkserver_preload([name for name in _PRELOAD if name in sys.modules or name == "cloudpickle"])
    return WorkerContext()


def probe(loader: Any) -> None:
    """Load what a loader's workers will be sent in a trial process.

    Args:
        loader: A torch DataLoader.

    Raises:
        CannotSend: If a part cannot be pickled, or the child cannot load it.
    """
    worker_context = make_context()
    parts = [(name, getattr(loader, name, None)) for name in ("dataset", "collate_fn", "worker_init_fn")]
    receive, send = worker_context.Pipe(duplex=False)
    try:
        trial = _ProbeProcess(parts, send)
        try:
            trial.start()
        except OSError as error:  # no memory, no descriptors, no socket directory: the whole loader stays here
            raise CannotSend("dataset", loader.dataset, f"the worker server does not start: {error}") from error
        send.close()
        try:
            failure = receive.recv() if receive.poll(_PROBE_SECONDS) else ("dataset", "it took too long to load")
        except EOFError:
            failure = ("dataset", "the worker process ended while loading it")
        if trial.is_alive():
            trial.join(timeout=5.0)
            if trial.is_alive():
                trial.terminate()
        trial.join(timeout=5.0)
        if trial.exitcode is not None:
            trial.close()
    finally:
        receive.close()
        if not send.closed:
            send.close()
    if failure is not None:
        name, text = failure
        raise CannotSend(name, dict(parts)[name], text.strip().splitlines()[-1])
