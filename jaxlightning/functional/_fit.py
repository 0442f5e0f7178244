"""`fit`: the loop that people copy around, on the trainer's own loops."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlightning.functional._checkpoints import BestCheckpoint, LastCheckpoint, newest_last
from jaxlightning.functional._forms import FORMS, LossForm, form_of, is_jitted
from jaxlightning.functional._held import NnxHeld, is_array, is_nnx_module, make_held
from jaxlightning.functional._module import StepModule, Steps
from jaxlightning.functional._program import loss_step, trainable_of
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn
from jaxlightning.utilities.seed import global_seed

__all__ = ["fit", "load_state"]

_NOT_AROUND_A_STEP = {
    "accumulate_grad_batches": (1, "wrap the optimizer in `optax.MultiSteps`"),
    "gradient_clip_val": (None, "put `optax.clip_by_global_norm` or `optax.clip` in front of the optimizer"),
    "gradient_clip_algorithm": (None, "put `optax.clip_by_global_norm` or `optax.clip` in front of the optimizer"),
    "precision": (None, "give the network its `dtype`, or cast in the step"),
    "on_nonfinite": (None, "wrap the optimizer in `optax.apply_if_finite`"),
    "steps_per_dispatch": (1, "use `jax.lax.scan` in the step"),
    "pad_batches": (False, "fill the last batch in the loader, or drop it"),
}


def fit(
    state: Any,
    train_ds: Any,
    test_ds: Any = None,
    train_step: Callable[..., Any] | None = None,
    eval_step: Callable[..., Any] | None = None,
    eval_freq: int = 1,
    num_epochs: int = 10,
    log_name: str = "fit",
    hparams: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    opt_state: Any = None,
    optimizer: Any = None,
    key: Any = None,
    monitor: str | None = None,
    mode: str | None = None,
    loss_names: Sequence[str] = (),
    callbacks: Any = None,
    logger: Any = True,
    ckpt_path: str | os.PathLike[str] | None = None,
    default_root_dir: str | os.PathLike[str] | None = None,
    trainer: Any = None,
    **trainer_flags: Any,
) -> Any:
    """Trains with a step of your own: a bar, TensorBoard, evaluation, the best and the last checkpoint.

    The form of the step is found from its arguments and its result:

        train_step(state, batch, opt_state) -> (state, loss_dict, opt_state)
        train_step(state, batch)            -> (state, loss_dict)
        train_step(params, batch)           -> (params, loss)
        train_step(params, opt_state, batch, key) -> (params, opt_state, loss, *parts)
        train_step(model, optimizer, batch) -> loss or loss_dict       (NNX; both are changed in place)
        loss_fn(params, batch)              -> (loss, aux)              (the step is written for you)

    A step that is jitted is called as it is; any other is jitted here, and its state donated. Every entry of
    `loss_dict` and the learning rate go to the loggers and, the loss and the rate, to the bar.

    Args:
        state: What is trained: a `TrainState`, parameters, an NNX or Equinox module. It stays as it is; the trained
            one is returned (NNX objects get their new values).
        train_ds: Batches: a torch DataLoader, a `tf.data` or TFDS data set, a list of batches, ...
        test_ds: Batches for `eval_step`.
        train_step: The step.
        eval_step: `(state, batch) -> accuracy` or a dict of metrics; their means over the data set are logged.
        eval_freq: Evaluate after every so many epochs.
        num_epochs: How often to go through the data.
        log_name: Folder of the logs and checkpoints, below `default_root_dir`.
        hparams: Hyper-parameters, saved at the start and logged at the end with the best metric: a dict, an
            `argparse.Namespace` or a dataclass.
        loss_fn: In place of `train_step`: a loss function alone.
        opt_state: Optimizer state that is passed to the step beside the state; by default that of a TrainState, else
            a fresh one of `optimizer`.
        optimizer: An optax transformation, or the `nnx.Optimizer` of an NNX step.
        key: The first random key for a step that takes one. Each step gets `subkey` of
            `key, subkey = jax.random.split(key)`. By default the state's, else one made of the seed.
        monitor: The metric of the best checkpoint; by default `accuracy`, else the first of `eval_step`.
        mode: Whether the highest (`"max"`) or the lowest (`"min"`) is best; by default by the metric's name.
        loss_names: Names of losses that a step returns without one, after the first, for example `("mse", "kl")`.
        callbacks: Callbacks, as for `Trainer`.
        logger: True for TensorBoard, False for none, or loggers.
        ckpt_path: Continue from this checkpoint; `"last"` finds the newest of `log_name`.
        default_root_dir: Where everything goes; the working directory by default.
        trainer: A Trainer of your own; it is told about epochs, logs and callbacks itself, and nothing of that here.
        **trainer_flags: More flags of `Trainer`.

    Returns:
        The trained state; `(state, opt_state)` when `opt_state` was given.

    Raises:
        TypeError: If the form of a step is not clear.
        MisconfigurationException: If something cannot be done around a hand-written step.

    Example:
        ```python
        state = jaxlightning.fit(state, train_ds, test_ds, train_step=train_step, eval_step=eval_step, num_epochs=5)
        ```
    """
    steps = _sort(state, train_step, loss_fn, eval_step, opt_state, optimizer, key, loss_names)
    best: list[BestCheckpoint] = []

    def metrics_known(names: Sequence[str]) -> None:
        for each in best:
            each.metrics_known(names)

    given = _as_dict(hparams)
    module = StepModule(steps, given or None, metrics_known)
    if test_ds is None and eval_step is not None:
        rank_zero_warn("`fit` was given an `eval_step` and no `test_ds`, so nothing is evaluated.")
    if test_ds is not None and eval_step is None:
        raise MisconfigurationException("`fit` was given a `test_ds` and no `eval_step` to evaluate it with.")
    loaders = _as_loader(train_ds, "train_ds"), _as_loader(test_ds, "test_ds")
    if trainer is None:
        _require_counts(num_epochs, eval_freq)
        _refuse_flags(trainer_flags)
        trainer, ckpt_path = _make_trainer(
            best,
            callbacks,
            logger,
            ckpt_path,
            default_root_dir,
            log_name,
            monitor,
            mode,
            max_epochs=num_epochs,
            check_val_every_n_epoch=eval_freq,
            flags=trainer_flags,
        )
    else:
        own = {
            "eval_freq": (eval_freq, 1), "num_epochs": (num_epochs, 10), "log_name": (log_name, "fit"),
            "monitor": (monitor, None), "mode": (mode, None), "callbacks": (callbacks, None), "logger": (logger, True),
            "default_root_dir": (default_root_dir, None),
        }  # fmt: skip
        said = [name for name, (value, default) in own.items() if value is not default and value != default]
        _refuse_beside_trainer(trainer, [*trainer_flags, *said])
        best += [each for each in trainer.callbacks if isinstance(each, BestCheckpoint)]
    module.__dict__["on_train_end"] = functools.partial(_log_hparams, module, trainer, given, best)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return _result(state, steps, module, gave_opt_state=opt_state is not None)


def load_state(path: str | os.PathLike[str], state: Any, *, opt_state: Any = None) -> Any:
    """Reads a checkpoint of `fit` into a state.

    Args:
        path: The checkpoint.
        state: A state of the same structure, for example a fresh one.
        opt_state: The optimizer state beside it, where `fit` had one.

    Returns:
        The state with the values of the checkpoint; `(state, opt_state)` when `opt_state` was given.

    Raises:
        FileNotFoundError: There is nothing at the path.
        RuntimeError: The checkpoint does not fit.
    """
    from jaxlightning.checkpoint._stored import StoredCheckpoint

    stored = StoredCheckpoint(path)
    kind = "model" if is_nnx_module(state) else "state" if _is_train_state(state) else "params"
    held = make_held(state, opt_state, None, kind, live=False)
    flat = {section: stored.tree(name) or {} for section, name in _TREES.items()}
    variables = flat["variables"].get("model", {})
    if kind == "params" and _next_key(variables):
        held.key = jax.random.key(0)
    engine = StepModule(
        Steps(
            train_step=_never, train_form=LossForm(("params", "batch"), "`load_state`"), eval_step=None, eval_form=None,
            eval_view=_never, held=held,
        ),
        None,
        lambda names: None,
    )._require_engine()  # fmt: skip
    optimizers = flat["optimizers"]
    engine.load_state_dict({"params": flat["params"], "variables": flat["variables"]}, strict=False, weights_only=True)
    if optimizers:
        # A step that passes its optimizer state twice, in the state and beside it, saved both.
        engine.load_optimizer_states(list(optimizers), strict=False)
    carry = held.user_carry()
    return (carry, held.opt) if opt_state is not None else carry


class _Batches:
    """A list of batches; a bare list would mean a collection of loaders to the trainer."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _as_loader(data: Any, name: str) -> Any:
    """What the trainer takes for a user's data: a list whose items are batches, and no loaders, is one loader."""
    if not isinstance(data, list | tuple):
        return data
    if not data:
        raise MisconfigurationException(f"`fit` was given an empty list as `{name}`: there is no batch in it.")
    is_batch = hasattr(data[0], "dtype") or isinstance(data[0], Mapping | list | tuple)
    leaves = jax.tree_util.tree_leaves(data[0]) if is_batch else []
    return _Batches(data) if any(hasattr(leaf, "dtype") or isinstance(leaf, int | float) for leaf in leaves) else data


def _as_dict(hparams: Any) -> dict[str, Any]:
    if hparams is None:
        return {}
    if isinstance(hparams, argparse.Namespace):
        return dict(vars(hparams))
    if dataclasses.is_dataclass(hparams) and not isinstance(hparams, type):
        return {field.name: getattr(hparams, field.name) for field in dataclasses.fields(hparams)}
    if isinstance(hparams, Mapping):
        return dict(hparams)
    raise TypeError(
        f"`fit(hparams=...)` takes a dict, an `argparse.Namespace` or a dataclass, not {type(hparams).__name__}."
    )


_TREES = {"params": "params", "variables": "variables", "optimizers": "optimizer_states"}


def _next_key(variables: Mapping[str, Any]) -> bool:
    return "next_key" in variables.get("state", {})


def _never(*_args: Any) -> Any:
    raise RuntimeError("Nothing is trained here.")


def _is_train_state(state: Any) -> bool:
    return hasattr(state, "params") and hasattr(state, "opt_state") and hasattr(state, "replace")


def _sort(
    state: Any,
    train_step: Any,
    loss_fn: Any,
    eval_step: Any,
    opt_state: Any,
    optimizer: Any,
    key: Any,
    loss_names: Sequence[str],
) -> Steps:
    if (train_step is None) == (loss_fn is None):
        raise TypeError(f"`fit` wants either `train_step` or `loss_fn`. The forms are:\n{FORMS}")
    nnx = is_nnx_module(state)
    train_state = _is_train_state(state)
    tx = getattr(state, "tx", None) if train_state and optimizer is None else None if nnx else optimizer
    if loss_fn is not None:
        if is_jitted(loss_fn):
            loss_fn = getattr(loss_fn, "__wrapped__", loss_fn)
        form: Any = form_of(loss_fn, "loss_fn", nnx=nnx, loss=True)
        if nnx:
            raise TypeError(
                "`loss_fn` alone is for parameters that are passed around. With NNX write the step, "
                "`train_step(model, optimizer, batch)`."
            )
        if tx is None:
            raise TypeError("`fit(..., loss_fn=...)` needs `optimizer=`, an optax transformation.")
        train_step, form = loss_step(loss_fn, form, None if train_state and optimizer is None else tx)
    else:
        form = form_of(train_step, "train_step", nnx=nnx)
    _refuse_pmap(train_step, "train_step")
    _refuse_pmap(eval_step, "eval_step")
    carry, beside = _carry_and_optimizer(state, form, opt_state, optimizer, tx, nnx=nnx)
    kind = "model" if nnx else "params" if form.carry == "params" else "state"
    if "key" in form.roles and key is None:
        key = getattr(state, "key", None) if train_state else None
        key = jax.random.key(global_seed()) if key is None else key
    if not nnx and not any(map(is_array, jax.tree_util.tree_leaves(carry))):
        raise TypeError(
            f"`fit` was given a {type(carry).__name__} in which JAX sees no arrays, so that there is nothing to train. "
            "Register its class as a pytree (`flax.struct.dataclass`, `jax.tree_util.register_dataclass`), or pass its "
            "parameters."
        )
    held = make_held(carry, beside, key if "key" in form.roles else None, kind, live=nnx and is_jitted(train_step))
    eval_form = None if eval_step is None else form_of(eval_step, "eval_step", nnx=nnx)
    return Steps(
        train_step=train_step,
        train_form=form,
        eval_step=eval_step,
        eval_form=eval_form,
        eval_view=functools.partial(
            _view, state if train_state else None, None if eval_form is None else eval_form.carry
        ),
        held=held,
        tx=tx if tx is not None else getattr(optimizer, "tx", None),
        loss_names=tuple(loss_names),
        type_name=_type_name(state),
    )


def _carry_and_optimizer(
    state: Any, form: Any, opt_state: Any, optimizer: Any, tx: Any, *, nnx: bool
) -> tuple[Any, Any]:
    wants = "opt" in form.roles
    if nnx:
        if wants and optimizer is None:
            raise TypeError(f"{form.where} takes an optimizer: pass `fit(model, ..., optimizer=nnx.Optimizer(...))`.")
        return state, optimizer
    train_state = _is_train_state(state)
    carry = state.params if train_state and form.carry == "params" else state
    if not wants:
        if opt_state is not None:
            raise TypeError(f"`fit(opt_state=...)` was given, but {form.where} takes no optimizer state.")
        return carry, None
    if opt_state is not None:
        return carry, opt_state
    if train_state and tx is getattr(state, "tx", None):
        return carry, state.opt_state
    if tx is None:
        raise TypeError(
            f"{form.where} takes an optimizer state: pass `fit(..., opt_state=tx.init(params))` or `optimizer=tx`."
        )
    return carry, tx.init(trainable_of(carry))


def _view(state: Any, wanted: str | None, carry: Any, opt: Any) -> Any:
    """What `eval_step` sees: the state that `fit` was given with new values, its parameters, or the carry itself."""
    if state is None:
        return carry
    trains_params = not _is_train_state(carry)
    if wanted == "params":
        return carry if trains_params else carry.params
    return state.replace(params=carry, **({} if opt is None else {"opt_state": opt})) if trains_params else carry


def _result(state: Any, steps: Steps, module: StepModule, *, gave_opt_state: bool) -> Any:
    held = steps.held
    if isinstance(held, NnxHeld):
        held.user_carry()
        return state
    carry = held.user_carry()
    if _is_train_state(state) and not _is_train_state(carry):
        fields = {} if held.opt is None else {"opt_state": held.opt}
        carry = state.replace(params=carry, step=state.step + module._require_engine().updates, **fields)
    return (carry, held.opt) if gave_opt_state else carry


def _type_name(state: Any) -> str:
    owner = getattr(getattr(state, "apply_fn", None), "__self__", None)
    return type(state if owner is None else owner).__name__


def _refuse_pmap(step: Any, name: str) -> None:
    while isinstance(step, functools.partial):
        step = step.func
    # What `jax.pmap` returns is a plain function since JAX 0.8; only the module of its code tells.
    home = str(getattr(step, "__globals__", {}).get("__name__") or type(step).__module__)
    if home.startswith("jax.") and home.endswith("pmap"):
        raise TypeError(
            f"`{name}` is made by `jax.pmap`. Pass the plain step with `devices=N`: the batch is split over the "
            "devices, and jax.jit adds the sums between them; `axis_name` and `lax.pmean` are not needed."
        )


# --- the trainer ------------------------------------------------------------------------------------------------------


def _refuse_flags(flags: Mapping[str, Any]) -> None:
    for name, (default, way_out) in _NOT_AROUND_A_STEP.items():
        value = flags.get(name, default)
        if value != default and not (name == "precision" and value in ("32-true", "32", 32)):
            raise MisconfigurationException(
                f"`fit({name}={value!r})` cannot be done around a hand-written step, which makes its own update: "
                f"{way_out}. Or train a LightningModule with `Trainer({name}={value!r})`."
            )


def _require_counts(num_epochs: Any, eval_freq: Any) -> None:
    if num_epochs is not None and not isinstance(num_epochs, int | np.integer):
        raise TypeError(f"`fit(num_epochs={num_epochs!r})`: how often to go through the data is an integer.")
    if eval_freq is not None and (not isinstance(eval_freq, int | np.integer) or eval_freq < 1):
        raise ValueError(
            f"`fit(eval_freq={eval_freq!r})`: give 1 to evaluate after every epoch, 2 after every second one. "
            "To evaluate never, leave out `test_ds` and `eval_step`."
        )


def _refuse_beside_trainer(trainer: Any, given: Sequence[str]) -> None:
    if given:
        raise MisconfigurationException(
            f"`fit(trainer=...)` was given together with {list(given)}: say these to the Trainer."
        )
    _refuse_flags(
        {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "precision": trainer.precision,
            "on_nonfinite": trainer.on_nonfinite,
            "steps_per_dispatch": trainer._steps_per_dispatch,
            "pad_batches": trainer._pad_batches,
        }
    )


def _make_trainer(
    best: list[BestCheckpoint],
    callbacks: Any,
    logger: Any,
    ckpt_path: Any,
    default_root_dir: Any,
    log_name: str,
    monitor: str | None,
    mode: str | None,
    *,
    max_epochs: int,
    check_val_every_n_epoch: int,
    flags: dict[str, Any],
) -> tuple[Any, Any]:
    from jaxlightning.trainer import Trainer

    root = os.fspath(default_root_dir or Path.cwd())
    if flags.get("barebones") and logger is True:
        logger = False
    folder, version = _run_folder(root, log_name, logger), None
    directory = None if logger or logger is None else os.path.join(folder, "checkpoints")
    if ckpt_path == "last":
        ckpt_path = newest_last(folder)
        if ckpt_path is None:
            rank_zero_warn(f"`fit(ckpt_path='last')` found no last checkpoint below {folder!r}: it starts anew.")
        elif Path(ckpt_path).parents[1] != Path(folder):
            # Logs and checkpoints go on where they were.
            directory, version = os.path.dirname(ckpt_path), Path(ckpt_path).parents[1].name
    if logger is True or logger is None:
        from jaxlightning.loggers import TensorBoardLogger

        logger = TensorBoardLogger(root, name=log_name, version=version, default_hp_metric=False)
    given = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    if flags.get("enable_checkpointing", True) and not flags.get("barebones"):
        best.append(BestCheckpoint(monitor, mode, directory))
        given += [*best, LastCheckpoint(directory)]
    flags.setdefault("num_sanity_val_steps", 0)
    trainer = Trainer(
        max_epochs=max_epochs,
        check_val_every_n_epoch=check_val_every_n_epoch,
        logger=logger,
        callbacks=given,
        default_root_dir=root,
        **flags,
    )
    return trainer, ckpt_path


def _run_folder(root: str, log_name: str | None, logger: Any) -> str:
    """Where the logs and checkpoints of runs of this name are, each in a folder of its own unless nothing logs."""
    first = logger[0] if isinstance(logger, list | tuple) and logger else logger
    name = log_name
    if first is not None and not isinstance(first, bool | list | tuple):
        root, name = os.fspath(first.save_dir or root), first.name
    return os.path.join(root, str(name or ""))


def _log_hparams(module: Any, trainer: Any, hparams: dict[str, Any], best: Sequence[BestCheckpoint]) -> None:
    """At the end: the hyper-parameters with the best value of the metric, where a logger can keep both."""
    scored = [each for each in best if each.monitor is not None and each.best_model_score is not None]
    metrics = {f"best_{each.monitor}": float(each.best_model_score) for each in scored}
    if not metrics:
        return
    trainer._logger_connector.flush()
    for each in trainer.loggers:
        if hparams and "metrics" in inspect.signature(each.log_hyperparams).parameters:
            each.log_hyperparams(hparams, metrics, step=trainer.global_step)
        else:
            each.log_metrics(metrics, step=trainer.global_step)
