"""What `ckpt_path="best"`, `"last"`, `"hpc"`, a path or None means for a verb of the Trainer."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlightning.checkpoint import _layout, _remote
from jaxlightning.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

_HPC_PREFIX = "hpc_ckpt_"


def resolve(
    trainer: Trainer, fn: str, ckpt_path: str | os.PathLike[str] | None, *, model_provided: bool, model_connected: bool
) -> str | os.PathLike[str] | None:
    """Turn the argument into the path of a checkpoint.

    Args:
        trainer: The trainer.
        fn: The verb: "fit", "validate", "test" or "predict".
        ckpt_path: The user's argument.
        model_provided: Whether the user passed a model to the verb.
        model_connected: Whether the trainer has one.

    Returns:
        The path, or None when nothing is to be loaded.

    Raises:
        ValueError: The keyword names nothing, such as "best" without a saved best checkpoint.
    """
    on_exception = [c for c in trainer.callbacks if type(c).__name__ == "OnExceptionCheckpoint"]
    if ckpt_path is None and on_slurm() and hpc_resume_path(trainer.default_root_dir) is not None:
        ckpt_path = "hpc"
    if ckpt_path is None and on_exception and fn == "fit":
        ckpt_path = "last"
        rank_zero_warn(
            "`.fit(ckpt_path=None)` was called and there is an OnExceptionCheckpoint: the last checkpoint of an "
            "earlier `fit` is used if there is one. Pass `ckpt_path='last'` or `ckpt_path='best'` to say so "
            "yourself and silence this warning."
        )
    if ckpt_path is None and model_provided:
        return None
    if ckpt_path is None and model_connected:
        ckpt_path = "best"
        tip = (
            " There is also an on-exception checkpoint available, however it is used by default only when fitting."
            if on_exception
            else ""
        )
        rank_zero_warn(
            f"`.{fn}(ckpt_path=None)` was called without a model. The best model of the previous `fit` call will be "
            f"used.{tip} You can pass `.{fn}(ckpt_path='best')` to use the best model or `.{fn}(ckpt_path='last')` to "
            "use the last model. If you pass a value, this warning will be silenced."
        )
    if ckpt_path == "best":
        ckpt_path = _best(trainer, fn)
    elif ckpt_path == "last":
        ckpt_path = _last(trainer, fn, on_exception)
        if ckpt_path is None:
            return None
    elif ckpt_path == "hpc":
        ckpt_path = hpc_resume_path(trainer.default_root_dir)
        if ckpt_path is None:
            raise ValueError(
                f'`.{fn}(ckpt_path="hpc")` is set but no HPC checkpoint was found in {trainer.default_root_dir}. '
                f"Please pass an exact checkpoint path to `.{fn}(ckpt_path=...)`"
            )
    if not ckpt_path:
        raise ValueError(
            f"`.{fn}()` found no path for the best weights: {ckpt_path!r}. Please specify a path for a checkpoint "
            f"`.{fn}(ckpt_path=PATH)`"
        )
    return ckpt_path


def _best(trainer: Trainer, fn: str) -> Any:
    if len(trainer.checkpoint_callbacks) > 1:
        rank_zero_warn(
            f'`.{fn}(ckpt_path="best")` is called with Trainer configured with multiple `ModelCheckpoint` callbacks. '
            "It will use the best checkpoint path from first checkpoint callback."
        )
    callback = trainer.checkpoint_callback
    if callback is None:
        raise ValueError(f'`.{fn}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured.')
    best = getattr(callback, "best_model_path", None)
    if hasattr(callback, "best_model_path") and not best:
        if trainer.fast_dev_run:
            raise ValueError(
                f'You cannot execute `.{fn}(ckpt_path="best")` with `fast_dev_run=True`. Please pass an exact '
                f"checkpoint path to `.{fn}(ckpt_path=...)`"
            )
        raise ValueError(
            f'`.{fn}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save the best model.'
        )
    return best


def _last(trainer: Trainer, fn: str, on_exception: list[Any]) -> str | None:
    candidates: set[str] = {os.fspath(c.ckpt_path) for c in on_exception}
    for callback in trainer.checkpoint_callbacks:
        finder = getattr(callback, "_find_last_checkpoints", None)
        if finder is not None:
            candidates |= {os.fspath(path) for path in finder(trainer)}
    dated = {
        path: _remote.commit_time(path) if _layout.is_remote(path) else _layout.commit_time(Path(path))
        for path in candidates
        if (_remote.exists(path) if _layout.is_remote(path) else Path(path).exists())
    }
    if not dated:
        rank_zero_warn(
            f'.{fn}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint will be loaded. '
            "HINT: Set `ModelCheckpoint(..., save_last=True)`."
        )
        return None
    return max(sorted(dated), key=dated.__getitem__)


def on_slurm() -> bool:
    """Say whether this process was started by a SLURM job that is not an interactive shell."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def hpc_version(folder: str | os.PathLike[str]) -> int | None:
    """Return the highest number of a ``hpc_ckpt_<n>.ckpt`` in a folder, or None."""
    if _layout.is_remote(folder):
        names = [path.rpartition("/")[2] for path in _remote.listing(folder)]
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [re.fullmatch(rf"{_HPC_PREFIX}(\d+)\.ckpt", name) for name in names]
    return max((int(match.group(1)) for match in found if match), default=None)


def hpc_resume_path(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest checkpoint that a requeued job left in a folder, or None."""
    version = hpc_version(folder)
    return None if version is None else os.path.join(folder, f"{_HPC_PREFIX}{version}.ckpt")


def hpc_save_path(folder: str | os.PathLike[str]) -> str:
    """Return where a job that is about to be requeued saves."""
    return os.path.join(folder, f"{_HPC_PREFIX}{(hpc_version(folder) or 0) + 1}.ckpt")
