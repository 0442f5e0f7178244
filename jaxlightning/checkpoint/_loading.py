"""`load_from_checkpoint`: an object rebuilt from its saved hyper-parameters, with its state."""

from __future__ import annotations

import inspect
import os
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from jaxlightning.checkpoint import _stored
from jaxlightning.checkpoint._gather import DATAMODULE_KEYS, MODULE_KEYS
from jaxlightning.checkpoint._weights import load_dictionary, load_weights_into
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.hparams import load_hparams_from_tags_csv, load_hparams_from_yaml
from jaxlightning.utilities.parsing import parse_class_init_keys
from jaxlightning.utilities.rank_zero import rank_zero_warn
from jaxlightning.utilities.serialization import Unwritten, describe

T = TypeVar("T")


def load_module_from_checkpoint(
    cls: type[T],
    checkpoint_path: str | os.PathLike[str],
    *,
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    **overrides: Any,
) -> T:
    """Build a module from the hyper-parameters in a checkpoint and give it the saved weights.

    Args:
        cls: The module's class.
        checkpoint_path: The checkpoint.
        hparams_file: A .yaml, .yml or .csv file whose values replace the saved hyper-parameters.
        strict: Whether missing and unexpected parameters are an error; the module's `strict_loading` by default.
        **overrides: Arguments of `__init__` in place of saved ones; those that it does not take are dropped, unless
            it has `**kwargs`.

    Returns:
        The module, with its variables.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        MisconfigurationException: A hyper-parameter could not be saved and is not given.
        RuntimeError: The weights do not fit; the message lists the paths.
        ValueError: The file has another ending, or ``strict`` contradicts the module.
    """
    stored = _stored.StoredCheckpoint(checkpoint_path)
    checkpoint = load_dictionary(stored, training_state=_wants_everything(cls))
    module: Any = _build(cls, checkpoint, MODULE_KEYS, hparams_file, overrides, checkpoint_path)
    own = module._strict_loading
    if own is not None and strict is not None and strict != own:
        raise ValueError(
            f"You set `.load_from_checkpoint(..., strict={strict!r})` which is in conflict with "
            f"`{cls.__name__}.strict_loading={own!r}`. Please set the same value for both of them."
        )
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    flat = checkpoint["state_dict"]
    if not flat:
        rank_zero_warn(f"The state dict in {os.fspath(checkpoint_path)!r} contains no parameters.")
        return module  # type: ignore[no-any-return]
    load_weights_into(module, flat, stored=stored, strict=module.strict_loading if strict is None else strict)
    module._require_engine().load_attributes(checkpoint.get("attributes") or {})
    return module  # type: ignore[no-any-return]


def load_datamodule_from_checkpoint(
    cls: type[T],
    checkpoint_path: str | os.PathLike[str],
    *,
    hparams_file: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> T:
    """Build a datamodule from the hyper-parameters in a checkpoint and give it the saved state.

    Args:
        cls: The datamodule's class.
        checkpoint_path: The checkpoint.
        hparams_file: A .yaml, .yml or .csv file whose values replace the saved hyper-parameters.
        **overrides: Arguments of `__init__` in place of saved ones.

    Returns:
        The datamodule.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        MisconfigurationException: A hyper-parameter could not be saved and is not given.
        ValueError: The file has another ending.
    """
    checkpoint = _stored.StoredCheckpoint(checkpoint_path).body()
    datamodule: Any = _build(cls, checkpoint, DATAMODULE_KEYS, hparams_file, overrides, checkpoint_path)
    state = checkpoint.get(cls.__qualname__)
    if state is not None:
        datamodule.load_state_dict(state)
    return datamodule  # type: ignore[no-any-return]


def _wants_everything(cls: type) -> bool:
    """Say whether the class looks into the checkpoint itself; only then are optimizer states read for it."""
    return any(
        "on_load_checkpoint" in base.__dict__ for base in cls.__mro__ if not base.__module__.startswith("jaxlightning.")
    )


def _build(
    cls: type[Any],
    checkpoint: dict[str, Any],
    keys: tuple[str, str],
    hparams_file: str | os.PathLike[str] | None,
    overrides: dict[str, Any],
    path: str | os.PathLike[str],
) -> Any:
    name_key, values_key = keys
    if hparams_file is not None:
        checkpoint[values_key] = _read_hparams(hparams_file)
    saved = {**(checkpoint.get(values_key) or {}), **overrides}
    checkpoint[values_key] = saved
    if "_instantiator" in saved:
        raise ValueError(
            f"The checkpoint {os.fspath(path)} asks to be built by {saved['_instantiator']!r}. Nothing that a "
            "checkpoint names is called, to prevent the execution of unknown code."
        )
    parameters = inspect.signature(cls.__init__).parameters
    dropped = {name for name in parse_class_init_keys(cls) if name}
    accepted = [name for name in parameters if name not in dropped]
    argument = checkpoint.get(name_key)
    arguments = saved
    if argument and argument in accepted:  # save_hyperparameters(config): one argument holds them all
        arguments = {argument: {k: v for k, v in saved.items() if k not in overrides or k not in accepted}, **overrides}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    arguments = {
        name: _recognized(value, parameters[name], cls)
        if isinstance(value, Unwritten) and name in parameters
        else value
        for name, value in arguments.items()
    }
    lost = {name: found for name, value in arguments.items() if (found := _unwritten(value)) is not None}
    if lost:
        listing = ", ".join(f"{name} (it was {value.text})" for name, value in lost.items())
        call = ", ".join(f"{name}=..." for name in lost)
        raise MisconfigurationException(
            f"{len(lost)} hyper-parameter(s) of {cls.__name__} could not be written to the checkpoint and must be "
            f"given again: {listing}. Call `{cls.__name__}.load_from_checkpoint({os.fspath(path)!r}, {call})`."
        )
    return cls(**arguments)


def _recognized(value: Unwritten, parameter: inspect.Parameter, cls: type[Any]) -> Any:
    """Return what a description can only stand for, seen from the code of the class; otherwise the description.

    A checkpoint names no class or function that is imported, but the class that is built names some itself: a default
    that is a function, a type or a member of an enumeration, and an enumeration as the annotation of an argument.
    """
    candidates = [parameter.default]
    for kind in (type(parameter.default), *_types(parameter, cls)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            candidates.extend(kind)
    for candidate in candidates:
        unique = isinstance(candidate, Enum) or (
            callable(candidate) and "<" not in getattr(candidate, "__qualname__", "<")
        )
        if unique and (describe(candidate), type(candidate).__name__) == (value.text, value.type_name):
            return candidate
    return value


def _types(parameter: inspect.Parameter, cls: type[Any]) -> tuple[Any, ...]:
    """Return the types that the annotation of an argument allows; none when Python cannot tell."""
    try:
        annotation = typing.get_type_hints(cls.__init__).get(parameter.name)
    except Exception:  # a name that exists for type checkers only, for instance
        return ()
    return (annotation, *typing.get_args(annotation))


def _unwritten(value: Any) -> Unwritten | None:
    """Return the first description in place of a value, also inside containers."""
    if isinstance(value, Unwritten):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return next((found for item in items if (found := _unwritten(item)) is not None), None)


def _read_hparams(file: str | os.PathLike[str]) -> dict[str, Any]:
    suffix = Path(file).suffix.lower()
    if suffix == ".csv":
        return load_hparams_from_tags_csv(Path(file))
    if suffix in (".yml", ".yaml"):
        return load_hparams_from_yaml(Path(file))
    raise ValueError(f".csv, .yml or .yaml is required for `hparams_file`, got {os.fspath(file)!r}.")
