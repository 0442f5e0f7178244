"""One run of the Trainer, from the first hook to the last: setting up, restoring, running a stage, tearing down.

The order of these calls is what `hooks_full.json` of the conformance suite pins; do not move one without running it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from jaxlightning.compile.persistent_cache import persistent_cache
from jaxlightning.loggers import resume_loggers
from jaxlightning.loops.call import (
    call_callback_hooks,
    call_lightning_datamodule_hook,
    call_lightning_module_hook,
    is_overridden,
)
from jaxlightning.loops.checks import verify_loop_configuration
from jaxlightning.loops.nonfinite import NonfiniteWatch
from jaxlightning.trainer_callbacks import attach_model_callbacks
from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from jaxlightning.utilities.seed import global_seed, isolate_rng
from jaxlightning.utilities.states import RunningStage, TrainerFn, TrainerStatus
from jaxlightning.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


def run(trainer: Trainer, model: Any, ckpt_path: Any, weights_only: bool | None) -> Any:
    """Run the verb that `trainer.state` names.

    Args:
        trainer: The trainer, with data attached.
        model: The module.
        ckpt_path: A checkpoint to restore, or None.
        weights_only: Handed to the checkpoint connector.

    Returns:
        What the loop returns.
    """
    with persistent_cache(trainer._compilation_cache), trainer.precision_plugin.scope():
        return _run(trainer, model, ckpt_path, weights_only)


def _run(trainer: Trainer, model: Any, ckpt_path: Any, weights_only: bool | None) -> Any:
    fitting = trainer.state.fn == TrainerFn.FITTING
    if fitting:
        settle_loop_limits(trainer)
    if trainer.barebones:
        rank_zero_info(
            "`Trainer(barebones=True)` started running. The progress bar is disabled so you might want to manually"
            " print the progress in your model."
        )
    trainer._begin_run(model)
    attach_model_callbacks(trainer)
    trainer._hooks.reset()
    verify_loop_configuration(trainer)
    profiler = trainer._active_profiler
    if profiler is not None:
        local_rank = trainer.local_rank if trainer.world_size > 1 else None
        profiler.setup(stage=str(trainer.state.fn), local_rank=local_rank, log_dir=trainer.log_dir)
    trainer._data_connector.prepare_data()
    # Before the setup hooks open the loggers: a resumed run keeps what an interrupted one wrote.
    resumes = fitting and ckpt_path is not None and not weights_only
    if resumes:
        resume_loggers(trainer.loggers)
    _setup_hooks(trainer)
    if is_overridden("configure_model", model):
        call_lightning_module_hook(trainer, "configure_model")
    attach_engine(trainer)
    trainer._checkpoint_connector.restore_modules_and_callbacks(ckpt_path, weights_only)
    trainer._engine.create_from_example()
    trainer._logger_connector.begin_run(trainer.state.fn)
    if fitting:
        _configure_optimizers(trainer)
        call_callback_hooks(trainer, "on_fit_start")
        call_lightning_module_hook(trainer, "on_fit_start")
    if trainer.enable_autolog_hparams:
        from jaxlightning.loggers import log_hyperparams

        log_hyperparams(trainer)
    trainer._checkpoint_connector.restore_training_state()
    if resumes:
        connector = trainer._checkpoint_connector
        same = resume_loggers(trainer.loggers, trainer.fit_loop.epoch_loop.next_axis_value, connector.logger_positions)
        connector.continues_records = same or connector.auto_resumed
    trainer._checkpoint_connector.resume_end()
    trainer._signal_connector.register()
    results = _run_stage(trainer)
    trainer._teardown()
    if fitting:
        call_callback_hooks(trainer, "on_fit_end")
        call_lightning_module_hook(trainer, "on_fit_end")
    _teardown_hooks(trainer)
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None
    return results


def settle_loop_limits(trainer: Trainer) -> None:
    """Decide the epoch limits that the user left open."""
    loop = trainer.fit_loop
    if loop.max_epochs is None:
        from jaxlightning.callbacks import Timer

        if loop.max_steps == -1 and not any(isinstance(each, Timer) for each in trainer.callbacks):
            rank_zero_warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set"
                " `max_epochs=-1`.",
                category=PossibleUserWarning,
            )
            loop.max_epochs = 1000
        else:
            loop.max_epochs = -1
    if loop.min_epochs is None:
        # With 1 a stop that is asked for in `on_fit_start` is looked at again after an epoch.
        loop.min_epochs = 0 if loop.min_steps is None else 1


def attach_engine(trainer: Trainer) -> None:
    """Give the module an engine for this trainer's devices; values of an earlier run move along.

    Args:
        trainer: The trainer, with its module attached and configured.
    """
    from jaxlightning.compile import Engine
    from jaxlightning.compile.fused_step import make_fusion

    module, strategy = trainer.lightning_module, trainer.strategy
    before = vars(module).get("_engine")
    seed = trainer._seed()
    # `JAX_DISABLE_JIT=1` is how JAX people ask for the same as `jit=False`; compiled calls refuse it.
    jit = trainer._jit and not jax.config.jax_disable_jit  # type: ignore[attr-defined]
    settings = (jit, trainer._detect_anomaly, trainer._log_compiles, trainer._checkify)
    same = (
        before is not None
        and before is trainer._engine
        and before.module is module
        and before.strategy is strategy
        and before.seed == seed
    )
    if same:
        engine = before
        engine.attach()
    else:
        kind: type[Engine] = Engine
        if trainer._pad_batches:
            from jaxlightning.compile.padding import PaddingEngine

            kind = PaddingEngine
        # The module that stands for a hand-written step has an engine of its own.
        make = getattr(module, "_make_engine", None) or functools.partial(kind, module)
        engine = make(
            strategy=strategy,
            jit=settings[0],
            seed=seed,
            detect_anomaly=settings[1],
            log_compiles=settings[2],
            precision=trainer.precision_plugin,
            on_nonfinite=trainer.on_nonfinite,
            checkify=settings[3],
        )
        modes = None if before is None else before.binding.modes()
        # Until `attach` the networks still answer to the old engine, which holds the newest values.
        sections = None
        if before is not None and before.params:
            sections = {"params": before.params, "variables": before.variables}
        engine.attach()
        if sections is not None:
            engine.load_state_dict(sections, strict=False, weights_only=True)
        if modes:
            engine.binding.restore_modes(modes)
    if trainer._pad_batches:
        engine.padding = make_padding(trainer)
    engine.fusion = make_fusion(trainer._steps_per_dispatch, engine, trainer.log_every_n_steps)
    trainer._engine = engine
    trainer.state._engine = engine


def make_padding(trainer: Trainer) -> Any:
    """Make what fills up short batches: to the number given, or to the loaders' batch sizes where they are known."""
    from jaxlightning.compile.padding import BatchPadding

    given, fitting = trainer._pad_batches, trainer.state.fn == TrainerFn.FITTING

    def expected(stage: str, dataloader_idx: int | None) -> int | None:
        loop: Any = {
            "train": trainer.fit_loop,
            "validate": trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop,
            "test": trainer.test_loop,
            "predict": trainer.predict_loop,
        }[stage]
        feed = loop.feed
        if feed is None or (dataloader_idx is None and len(feed.sources) > 1):
            return None
        size = feed.sources[dataloader_idx or 0].batch_size
        return None if size is None else size * trainer.strategy.batches_per_step

    return BatchPadding(None if given is True else given, expected)


def _setup_hooks(trainer: Trainer) -> None:
    # Loggers open their experiment first, so that hooks know its directory.
    for logger in trainer.loggers:
        _ = getattr(logger, "experiment", None)
    fn = trainer.state.fn
    if trainer.datamodule is not None:
        call_lightning_datamodule_hook(trainer, "setup", stage=fn)
    call_callback_hooks(trainer, "setup", stage=fn)
    call_lightning_module_hook(trainer, "setup", stage=fn)


def _configure_optimizers(trainer: Trainer) -> None:
    from jaxlightning.optim import parse_optimizers

    module = trainer.lightning_module
    returned = call_lightning_module_hook(trainer, "configure_optimizers")
    setup = parse_optimizers(module, returned)
    trainer._optimizers = list(setup.optimizers)
    trainer._lr_scheduler_configs = list(setup.schedulers)
    trainer._plateau_seen = {}
    trainer._engine.set_optimizers(trainer._optimizers)
    mode = trainer.on_nonfinite
    trainer._nonfinite_watch = None if mode is None else NonfiniteWatch(trainer._engine, mode)


def _run_stage(trainer: Trainer) -> Any:
    if trainer.evaluating:
        return trainer._evaluation_loop.run()
    if trainer.predicting:
        return trainer.predict_loop.run()
    with isolate_rng():
        trainer._checkpoint_connector.before_evaluation()
        run_sanity_check(trainer)
    trainer._checkpoint_connector.restore_metrics()
    trainer.fit_loop.run()
    return None


def run_sanity_check(trainer: Trainer) -> None:
    """Run a few validation batches before training, so that a mistake in validation shows early."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    if not trainer.enable_validation or trainer.num_sanity_val_steps <= 0 or trainer.fit_loop.continues_epoch:
        return
    stage = trainer.state.stage
    loaded = val_loop.batch_progress.state_dict() if trainer.fit_loop.restarting else None
    connector = trainer._logger_connector
    trainer.state.stage = RunningStage.SANITY_CHECKING
    connector.reset_results("sanity_check")
    connector.reset_metrics()
    call_callback_hooks(trainer, "on_sanity_check_start")
    val_loop.run()
    call_callback_hooks(trainer, "on_sanity_check_end")
    connector.reset_results("sanity_check")
    connector.reset_metrics()
    val_loop.reset_progress()
    if loaded is not None:
        val_loop.batch_progress.load_state_dict(loaded)
    trainer.state.stage = stage


def _teardown_hooks(trainer: Trainer) -> None:
    fn = trainer.state.fn
    if trainer.datamodule is not None:
        call_lightning_datamodule_hook(trainer, "teardown", stage=fn)
    call_callback_hooks(trainer, "teardown", stage=fn)
    call_lightning_module_hook(trainer, "teardown", stage=fn)
    vars(trainer.lightning_module)["_current_fx_name"] = None
    for logger in trainer.loggers:
        logger.finalize("success")
    if trainer._active_profiler is not None:
        trainer._active_profiler.describe()


def seed_from(given: int | None) -> int:
    """Return the seed of a run: the argument, else that of `seed_everything`, else 0."""
    if given is not None:
        return given
    return global_seed()
