"""What the Trainer's flags may be: environment variables, batch limits, barebones mode, and what is not built yet."""

from __future__ import annotations

import functools
import inspect
import math
import os
from ast import literal_eval
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from jaxlightning.compile.precision import Precision, make_precision
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

_Init = TypeVar("_Init", bound=Callable[..., None])
_ENV_PREFIX = "PL_TRAINER_"

PRECISIONS = (
    "transformer-engine",
    "transformer-engine-float16",
    "16-true",
    "16-mixed",
    "bf16-true",
    "bf16-mixed",
    "32-true",
    "64-true",
)
_OLD_PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def defaults_from_env(init: _Init) -> _Init:
    """Let `PL_TRAINER_<ARGUMENT>` give the default of every argument, and positional values find their names.

    Args:
        init: The constructor; its arguments are keyword-only.

    Returns:
        The constructor with the environment in front of it; an explicit argument wins.
    """
    names = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(names):
            raise TypeError(f"Trainer() takes at most {len(names)} arguments, but {len(args)} were given.")
        for name, value in zip(names, args, strict=False):
            if name in kwargs:
                raise TypeError(f"Trainer() got multiple values for argument '{name}'.")
            kwargs[name] = value
        for name in names:
            text = os.environ.get(_ENV_PREFIX + name.upper())
            if text is not None and name not in kwargs:
                try:
                    kwargs[name] = literal_eval(text)
                except (ValueError, SyntaxError):  # a bare word such as `cpu`
                    kwargs[name] = text
        init(self, **kwargs)

    return wrapped  # type: ignore[return-value]


def check_barebones(flags: dict[str, Any]) -> None:
    """Refuse what contradicts `barebones=True`, and switch the features off in `flags`.

    Args:
        flags: The values as passed; changed in place.

    Raises:
        ValueError: For a feature that was asked for explicitly.
    """
    reasons = {
        "enable_checkpointing": ("Checkpointing can impact", False),
        "logger": ("Logging can impact", False),
        "enable_progress_bar": ("The progress bar can impact", False),
        "log_every_n_steps": ("Logging can impact", 0),
        "enable_model_summary": ("Model summary can impact", False),
        "num_sanity_val_steps": ("Sanity checking can impact", 0),
        "detect_anomaly": ("Anomaly detection can impact", False),
        "profiler": ("Profiling can impact", None),
    }
    for name, (reason, off) in reasons.items():
        value = flags[name]
        if value is not None and value is not False and value != 0:
            raise ValueError(
                f"`Trainer(barebones=True, {name}={value!r})` was passed. {reason} raw speed so it is disabled in"
                " barebones mode."
            )
        flags[name] = off
    if flags["fast_dev_run"]:
        raise ValueError(
            f"`Trainer(barebones=True, fast_dev_run={flags['fast_dev_run']!r})` was passed. Development run is not"
            " meant for raw speed evaluation so it is disabled in barebones mode."
        )
    rank_zero_info(
        "You are running in `Trainer(barebones=True)` mode: checkpointing, progress bar, model summary, logging, sanity"
        " checking, anomaly detection and profiling are off, to show what the Trainer itself costs."
    )


def set_normal_defaults(flags: dict[str, Any]) -> None:
    """Fill in the features that are on unless switched off."""
    defaults = {
        "enable_checkpointing": True,
        "logger": True,
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "log_every_n_steps": 50,
        "num_sanity_val_steps": 2,
    }
    for name, value in defaults.items():
        if flags[name] is None:
            flags[name] = value


def batch_limit(value: int | float | None, name: str) -> int | float:
    """Check a flag that counts batches (int) or takes a fraction (float).

    Args:
        value: The value as passed.
        name: The flag.

    Returns:
        The value; 1.0 for None.

    Raises:
        MisconfigurationException: For a negative value or a fraction above 1.
    """
    if value is None:
        return 1.0
    if isinstance(value, int) and value == 1:
        meaning = {
            "limit_train_batches": "1 batch per epoch will be used.",
            "val_check_interval": "validation will run after every batch.",
        }
        rank_zero_info(f"`Trainer({name}=1)` was configured so {meaning.get(name, '1 batch will be used.')}")
    elif isinstance(value, float) and value == 1.0:
        meaning = {
            "limit_train_batches": "100% of the batches per epoch will be used.",
            "val_check_interval": "validation will run at the end of the training epoch.",
        }
        rank_zero_info(
            f"`Trainer({name}=1.0)` was configured so {meaning.get(name, '100% of the batches will be used.')}."
        )
    if 0 <= value <= 1:
        return value
    if value > 1 and value % 1.0 == 0:
        return int(value)
    raise MisconfigurationException(
        f"You have passed invalid value {value} for {name}, it has to be in [0.0, 1.0] or an int."
    )


def time_interval_seconds(value: str | timedelta | dict[str, int]) -> float:
    """Return a wall-clock `val_check_interval` in seconds.

    Args:
        value: `"DD:HH:MM:SS"`, a timedelta, or its keyword arguments.

    Raises:
        MisconfigurationException: For another format.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return timedelta(**value).total_seconds()
    parts = value.split(":")
    if len(parts) != 4:
        raise MisconfigurationException(
            f"Invalid time format for `val_check_interval`: {value!r}. Expected 'DD:HH:MM:SS'."
        )
    try:
        days, hours, minutes, seconds = map(int, parts)
    except ValueError:
        raise MisconfigurationException(
            f"Non-integer component in `val_check_interval` string: {value!r}. Use 'DD:HH:MM:SS'."
        ) from None
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


def canonical_precision(value: Any) -> str:
    """Return the canonical name of a precision.

    Raises:
        ValueError: For a value that Lightning does not know either.
    """
    if value is None:
        return "32-true"
    text = str(value)
    if text not in PRECISIONS and text not in _OLD_PRECISIONS:
        allowed = (*PRECISIONS, 64, 32, 16, *_OLD_PRECISIONS)
        raise ValueError(f"Precision {value!r} is invalid. Allowed precision values: {allowed}")
    name = _OLD_PRECISIONS.get(text, text)
    if text in ("16", "bf16"):
        rank_zero_warn(
            f"`precision={text}` is supported for historical reasons but its usage is discouraged. Please set your"
            f" precision to {name} instead!"
        )
    return name


def select_precision(value: Any, plugins: Any) -> Precision:
    """Find the precision policy in the flags `precision` and `plugins`.

    Args:
        value: The flag `precision`; a policy object is taken as it is.
        plugins: None, a plugin, or a list of plugins.

    Returns:
        The policy.

    Raises:
        ValueError: For an unknown name, or when both flags name one.
        MisconfigurationException: For two policies.
        NotImplementedError: For plugins of another kind, and for Transformer Engine.
    """
    given = [] if plugins is None else list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    policies = [each for each in given if isinstance(each, Precision)]
    others = [each for each in given if not isinstance(each, Precision)]
    if others:
        raise NotImplementedError(
            f"`Trainer(plugins={plugins!r})` is not built yet in this version of jaxlightning for"
            f" {type(others[0]).__name__}; a precision policy of `jaxlightning.plugins` is."
        )
    if len(policies) > 1:
        raise MisconfigurationException(
            f"Received multiple values for Precision flags in `plugins`: {policies}. Expected one value."
        )
    if policies and value is not None:
        raise ValueError(f"Received both `precision={value}` and `plugins={policies[0]}`. Choose one.")
    if policies:
        return policies[0]
    return value if isinstance(value, Precision) else make_precision(canonical_precision(value))


def check_unbuilt(flags: dict[str, Any]) -> None:
    """Refuse flags that are not built, and say once what the torch-only ones mean here.

    Args:
        flags: The values as passed.

    Raises:
        ValueError: For a number of nodes that is no positive integer.
        NotImplementedError: For a value other than Lightning's default of a flag that is not built yet.
    """
    nodes = flags["num_nodes"]
    if not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"`num_nodes` must be a positive integer, but got {nodes}.")
    ways = {
        "num_nodes": (1, "Start one process per host with `jax.distributed` once it is."),
        "model_registry": (None, ""),
    }
    for name, (default, way) in ways.items():
        if flags[name] != default and flags[name] != []:
            raise NotImplementedError(
                f"`Trainer({name}={flags[name]!r})` is not built yet in this version of jaxlightning. {way}".rstrip()
            )
    notes = {
        "sync_batchnorm": (False, "batch statistics are computed over the global batch in the compiled step anyway"),
        "use_distributed_sampler": (True, "no sampler is ever replaced: the global batch is split over the devices"),
        "benchmark": (None, "it chooses between cuDNN algorithms; XLA tunes its own"),
        "inference_mode": (True, "evaluation is never differentiated"),
        "deterministic": (
            None,
            "XLA on a CPU or TPU is deterministic; on a GPU also set XLA_FLAGS=--xla_gpu_deterministic_ops=true",
        ),
    }
    for name, (default, meaning) in notes.items():
        if flags[name] != default and not (name == "deterministic" and flags[name] is False):
            rank_zero_info(f"`Trainer({name}={flags[name]!r})` changes nothing here: {meaning}.")
    if flags["deterministic"] not in (None, True, False, "warn"):
        raise ValueError(f"`deterministic` must be True, False or 'warn', but got {flags['deterministic']!r}.")


def check_clipping(value: Any, algorithm: str | None) -> str | None:
    """Check the clipping flags and return the algorithm in lower case.

    Raises:
        TypeError: When the value is no number.
        MisconfigurationException: For an unknown algorithm.
    """
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"`gradient_clip_val` should be an int or a float. Got {value}.")
    if value is not None and math.isnan(value):
        raise MisconfigurationException("`gradient_clip_val` is nan: every gradient clipped by it would be nan.")
    if algorithm is None:
        return None
    if algorithm.lower() not in ("value", "norm"):
        raise MisconfigurationException(
            f"`gradient_clip_algorithm` {algorithm} is invalid. Allowed algorithms: ['value', 'norm']."
        )
    return algorithm.lower()


def check_vectorize(value: Any) -> Any:
    """Check how torch DataLoaders over data in memory are read.

    Raises:
        ValueError: For anything but "auto", "distribution", True and False.
    """
    if value not in ("auto", "distribution", True, False) or isinstance(value, (int, float)) != isinstance(value, bool):
        raise ValueError(f'`vectorize` must be "auto", "distribution", True or False, but got {value!r}.')
    return value


def check_pad_batches(value: Any) -> bool | int:
    """Check how short batches are filled up.

    Raises:
        ValueError: For anything but True, False and a positive integer.
    """
    if isinstance(value, bool) or (isinstance(value, int) and value > 0):
        return value
    raise ValueError(
        f"`pad_batches` must be True (the loader's batch size), False or a positive number of rows, but got {value!r}."
    )


def check_prefetch_batches(value: Any) -> int:
    """Check how many batches are read ahead.

    Raises:
        ValueError: For anything but an integer that is not negative.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"`prefetch_batches` must be 0 (off) or a positive number of batches, but got {value!r}.")
    return value
