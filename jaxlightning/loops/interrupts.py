"""The frame around every run: what happens on an exception, on Ctrl-C and on a request to terminate."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxlightning.checkpoint._resolve import hpc_save_path, on_slurm
from jaxlightning.loops.call import call_callback_hooks, call_lightning_datamodule_hook
from jaxlightning.utilities.exceptions import SIGTERMException
from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from jaxlightning.utilities.run_messages import shown_messages
from jaxlightning.utilities.states import TrainerFn, TrainerStatus

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

_log = logging.getLogger("jaxlightning")


def call_and_handle_interrupt(trainer: Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function`; on any exception tell the users' hooks, flush the loggers, tear down, and let it out.

    Args:
        trainer: The trainer.
        function: The implementation of one of the four verbs.
        *args: Handed on.
        **kwargs: Handed on.

    Returns:
        What `function` returns.

    Raises:
        SystemExit: With code 1, in place of a KeyboardInterrupt.
    """
    with shown_messages():
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt as exception:
            rank_zero_info("\nDetected KeyboardInterrupt, attempting graceful shutdown ...")
            _shut_down(trainer, exception)
            sys.exit(1)
        except BaseException as exception:
            _shut_down(trainer, exception)
            # The teardown may still ask which stage failed.
            trainer.state.stage = None
            raise


def _shut_down(trainer: Trainer, exception: BaseException) -> None:
    """Run everything that a failed run owes, each part even when another one fails; the first error stays the one."""
    trainer.state.status = TrainerStatus.INTERRUPTED
    # Pending log values belong to steps that did finish.
    parts: list[tuple[str, Callable[[], Any]]] = [("flushing the metrics", trainer._logger_connector.flush)]
    if isinstance(exception, SIGTERMException):
        parts.append(("saving interrupted.ckpt", lambda: _save_interrupted(trainer)))
    parts.append(("on_exception of the callbacks", lambda: call_callback_hooks(trainer, "on_exception", exception)))
    if trainer.datamodule is not None:

        def tell_datamodule() -> None:
            call_lightning_datamodule_hook(trainer, "on_exception", exception)

        parts.append(("on_exception of the datamodule", tell_datamodule))
    parts += [(f"finalize of {type(each).__name__}", partial(each.finalize, "failed")) for each in trainer.loggers]
    parts.append(("teardown", trainer._teardown))
    try:
        for name, part in parts:
            try:
                part()
            except Exception as error:
                exception.add_note(f"While shutting down, {name} failed as well: {type(error).__name__}: {error}")
                _log.warning("While shutting down after %s, %s failed: %r", type(exception).__name__, name, error)
    finally:
        # Also when another Ctrl-C ends the shutdown itself.
        trainer._signal_connector.teardown()


def _save_interrupted(trainer: Trainer) -> None:
    """Write the one checkpoint that a SIGTERM leaves, beside those of the first Checkpoint callback."""
    callback = trainer.checkpoint_callback
    directory = getattr(callback, "dirpath", None)
    if trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run or not directory:
        return
    trainer.save_checkpoint(os.path.join(directory, "interrupted.ckpt"))


def requeue(trainer: Trainer) -> None:
    """Save `hpc_ckpt_<n>.ckpt` and ask SLURM to run the job again; training goes on until SLURM ends it.

    Args:
        trainer: The trainer; the next run of the job finds the checkpoint in its `default_root_dir`.
    """
    for logger in trainer.loggers:
        logger.finalize("finished")
    path = hpc_save_path(trainer.default_root_dir)
    trainer.save_checkpoint(path)
    trainer._checkpoint_connector.writer.wait()  # on disk, before the job may be gone
    if not trainer.is_global_zero:
        return
    parts = [os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")]
    job = "_".join(part for part in parts if part) if all(parts) else os.environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        rank_zero_warn(f"The job was saved to {path}, but SLURM_JOB_ID={job!r} is no job that could be requeued.")
        return
    try:
        code = subprocess.run(["scontrol", "requeue", job], check=False).returncode
    except OSError as error:
        rank_zero_warn(f"The job was saved to {path}, but `scontrol requeue {job}` cannot be run: {error}.")
        return
    if code == 0:
        rank_zero_info("Requeued SLURM job: %s", job)
    else:
        rank_zero_warn(f"The job was saved to {path}, but `scontrol requeue {job}` failed with code {code}.")


class SignalConnector:
    """Turns SIGINT, SIGTERM and a SLURM job's SIGUSR1 into flags that the loops look at between two batches.

    A step donates its state; an exception thrown in the middle of one could leave none. So the first signal only asks
    to stop, and a second Ctrl-C raises where the program stands.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.received_sigterm = False
        self.received_sigint = False
        self.received_requeue = False
        self.pending = False
        self._previous: dict[int, Any] = {}

    def register(self) -> None:
        """Install the handlers; only in the main thread, and beside handlers that the user installed."""
        self.received_sigterm = self.received_sigint = self.received_requeue = self.pending = False
        if threading.current_thread() is not threading.main_thread():
            return
        self._install(signal.SIGTERM, self._on_sigterm)
        # A handler of the user's own for Ctrl-C is the user's decision.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._install(signal.SIGINT, self._on_sigint)
        if on_slurm() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            rank_zero_info("SLURM auto-requeueing enabled: SIGUSR1 saves a checkpoint and requeues the job.")
            self._install(signal.SIGUSR1, self._on_requeue)

    def _install(self, number: int, handler: Callable[[int, Any], None]) -> None:
        previous = signal.getsignal(number)
        if previous is None:  # installed by C code, Python could not put it back
            return
        self._previous[number] = previous
        signal.signal(number, handler)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        rank_zero_info(f"Received SIGTERM: {number}. The step that is running will finish.")
        self.received_sigterm = self.pending = True
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _on_sigint(self, number: int, frame: Any) -> None:
        if self.received_sigint:
            raise KeyboardInterrupt
        self.received_sigint = self.pending = True
        rank_zero_warn(
            "Ctrl-C: the step that is running finishes and what is due is saved. Press Ctrl-C again to stop at once."
        )

    def _on_requeue(self, number: int, frame: Any) -> None:
        rank_zero_info("Received SIGUSR1: the step that is running finishes, then the job is saved and requeued.")
        self.received_requeue = self.pending = True

    def check(self) -> None:
        """Raise what a received signal asks for; the loops call it between batches when `pending` is set.

        Raises:
            SIGTERMException: After SIGTERM; the process ends with code 143.
            KeyboardInterrupt: After Ctrl-C.
        """
        if self.received_sigterm:
            self.pending = False
            raise SIGTERMException
        if self.received_sigint:
            self.pending = False
            raise KeyboardInterrupt
        if self.received_requeue:
            self.received_requeue = self.pending = False
            requeue(self.trainer)

    def teardown(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
        self._previous.clear()
