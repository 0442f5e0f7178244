"""Run in a worker process by path, before anything else is imported: no import of jaxlightning or JAX here.

`runpy.run_path` calls this file with three globals: `environment` (dict of str), `parts` (list of (name, pickled
bytes)) and `report` (a connection, or None). It leaves `PROCESS`, the process object to run.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing import context, queues
from typing import Any

os.environ.clear()
os.environ.update(environment)  # type: ignore[name-defined]  # noqa: F821

PROCESS = object.__new__(context.ForkServerProcess)
_failure = None
_loaded = {}
for _name, _data in parts:  # type: ignore[name-defined]  # noqa: F821
    try:
        _content, _definitions = pickle.loads(_data)
        # what the parent defined in its __main__ travelled by value; results that use it are pickled by name
        vars(sys.modules["__main__"]).update(_definitions)
        _loaded[_name] = _content
    except BaseException:
        if report is None:  # type: ignore[name-defined]  # noqa: F821
            raise
        _failure = (_name, traceback.format_exc())
        break


def _answer_unpicklable(queue: queues.Queue[Any], where: str) -> None:
    # without this, a batch that cannot be pickled is dropped by the queue's thread and the parent waits for ever
    def on_error(error: Exception, item: Any) -> None:
        from torch._utils import ExceptionWrapper

        info = (type(error), error, error.__traceback__)
        queue.put((item[0], ExceptionWrapper(exc_info=info, where=where)))

    queue._on_queue_feeder_error = on_error  # type: ignore[attr-defined]


if report is not None:  # type: ignore[name-defined]  # noqa: F821
    PROCESS.__init__(target=report.send, args=(_failure,))  # type: ignore[name-defined,misc]  # noqa: F821
else:
    vars(PROCESS).update(_loaded["process"])
    for _argument in PROCESS._args:  # type: ignore[attr-defined]
        if isinstance(_argument, queues.Queue):
            _answer_unpicklable(_argument, f"when sending a batch from {PROCESS.name}")
