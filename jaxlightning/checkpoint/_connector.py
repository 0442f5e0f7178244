"""The Trainer's side of checkpoints: gather a state, save it, find it again, restore it in the right order.

Restoring has Lightning's phases. Module, datamodule and callbacks come back before `configure_optimizers` (HK37);
loops, optimizers, schedulers and the rest of the training state after `on_fit_start` (HK02).
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

from jaxlightning.checkpoint import _contents, _host_rng, _io, _resolve, _running, _stored
from jaxlightning.checkpoint._discover import open_newest
from jaxlightning.checkpoint._gather import DATAMODULE_KEYS, MODULE_KEYS, gather, hands_out_arrays
from jaxlightning.checkpoint._layout import is_remote
from jaxlightning.checkpoint._weights import load_dictionary, load_weights_into
from jaxlightning.checkpoint._writer import CheckpointWriter
from jaxlightning.loggers import adopt_versions, logger_positions
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.host_memory import HostCopies
from jaxlightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from jaxlightning.utilities.seed import collect_rng_states
from jaxlightning.utilities.serialization import describe
from jaxlightning.utilities.warnings import WarningCache

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer

_NO_OPTIMIZERS = (
    "Trying to restore {what} state but checkpoint contains only the model. This is probably due to "
    "`ModelCheckpoint.save_weights_only` being set to `True`. To continue from the weights alone, load them with "
    "`load_from_checkpoint` and call `fit` without `ckpt_path`."
)


class CheckpointConnector:
    """Saves and restores for one trainer.

    Args:
        trainer: The trainer.
        background: Whether saves during `fit` are written while training goes on.
    """

    def __init__(self, trainer: Trainer, *, background: bool = True) -> None:
        self.trainer = trainer
        self.writer = CheckpointWriter(background=background)
        self._ckpt_path: str | os.PathLike[str] | None = None
        self._user_managed = False
        self._opened: _stored.StoredCheckpoint | None = None  # what `auto_resume` found and read
        self.auto_resumed = False
        #: Whether the loggers go on in the records of the run that is continued, so that they get every row of it.
        self.continues_records = False
        self._loaded: dict[str, Any] = {}
        self._metrics: dict[str, Any] | None = None
        self._places: dict[str, _contents.Place] = {}
        self._stored: _stored.StoredCheckpoint | None = None
        self._warnings = WarningCache()
        self._copies = HostCopies()
        #: Random streams and the loggers' positions before the validation that runs; see `before_evaluation`.
        self.before: dict[str, Any] = {}
        self._training = False  # between the end of restoring and the end of `fit`: saves may go on in the background

    # --- which checkpoint -----------------------------------------------------------------------------------------

    @property
    def ckpt_path(self) -> str | os.PathLike[str] | None:
        """The path of the last call that loaded (or the one that the user set)."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | os.PathLike[str] | None) -> None:
        self._ckpt_path = path
        self._user_managed = bool(path)

    def resolve_ckpt_path(
        self, fn: str, ckpt_path: str | os.PathLike[str] | None, model_provided: bool, model_connected: bool
    ) -> str | os.PathLike[str] | None:
        """Decide what a verb loads.

        Args:
            fn: "fit", "validate", "test" or "predict" (a `TrainerFn` works too).
            ckpt_path: The verb's argument: a path, "best", "last", "hpc" or None.
            model_provided: Whether a model was passed to the verb.
            model_connected: Whether the trainer has a model.

        Returns:
            The path, or None when nothing is to be loaded.

        Raises:
            ValueError: A keyword names nothing.
        """
        self.writer.wait()
        self._opened, self.auto_resumed, self.continues_records = None, False, False
        if ckpt_path is None and not self._user_managed and str(getattr(fn, "value", fn)) == "fit":
            found = self._find_interrupted_run()
            if found is not None:
                return found
        if self._user_managed:
            if not ckpt_path:
                return self._ckpt_path
            rank_zero_warn(
                f"`trainer.ckpt_path = {self._ckpt_path!r}` was called but then you passed "
                f"`trainer.fit(ckpt_path={ckpt_path!r})`. The latter will be loaded."
            )
            self._ckpt_path, self._user_managed = None, False
        return _resolve.resolve(
            self.trainer,
            str(getattr(fn, "value", fn)),
            ckpt_path,
            model_provided=model_provided,
            model_connected=model_connected,
        )

    def _find_interrupted_run(self) -> str | None:
        """With `auto_resume`: the checkpoint from which this process continues what an earlier one began."""
        trainer = self.trainer
        begun = trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0  # a second `fit` goes on from memory
        if not trainer.auto_resume or trainer.fast_dev_run or begun:
            return None
        self._opened = open_newest(trainer.default_root_dir, clean=trainer.is_global_zero)
        if self._opened is None:
            rank_zero_info("`Trainer(auto_resume=True)` found no checkpoint in %s.", trainer.default_root_dir)
            return None
        self.auto_resumed = True
        adopt_versions(trainer.loggers, (self._opened.body().get("metrics") or {}).get("loggers") or [])
        return str(self._opened.path)

    # --- what a resume runs again ---------------------------------------------------------------------------------

    def before_evaluation(self) -> None:
        """Note what a checkpoint that is saved within the coming evaluation takes from before it.

        A resume runs that evaluation again from its beginning: with the same draws, and its rows are written once.
        """
        self.before = {"streams": collect_rng_states(), "loggers": logger_positions(self.trainer.loggers)}

    def noted(self, what: str) -> Any:
        """What `before_evaluation` noted, if an evaluation that a resume runs again is under way."""
        trainer = self.trainer
        repeats = trainer.sanity_checking or trainer.fit_loop.epoch_loop._phase == "validation"
        return self.before.get(what) if repeats else None

    # --- gather -----------------------------------------------------------------------------------------------------

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Gather everything into Lightning's dictionary and run the hooks that may change it.

        Args:
            weights_only: Leave out callbacks, optimizers and schedulers.

        Returns:
            The dictionary; its arrays are host copies.
        """
        checkpoint, self._places = gather(self.trainer, bool(weights_only))
        return checkpoint

    # --- save -------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Save the present state.

        During `fit` this returns when the state is copied; it is on disk after `wait()`, at the latest when `fit` ends.

        Args:
            filepath: The directory to make; what has that name is replaced when the new one is complete.
            weights_only: Leave out what only a continued training needs.
            storage_options: For the file system of a path with a scheme.

        Raises:
            AttributeError: The trainer has no model.
            TypeError: A state cannot be written without pickle; the message names it.
        """
        if self.trainer.lightning_module is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call "
                "`Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        if storage_options and not is_remote(filepath):
            raise TypeError(
                f"`Trainer.save_checkpoint(..., storage_options=...)` is for paths with a scheme, such as "
                f"s3://, but the path is {os.fspath(filepath)!r}."
            )
        # At most one state is held beside the live one. Several checkpoints of one state (`last`, another callback's)
        # hold the same copies; otherwise what is being written has to be on disk before the next copy is made.
        engine, shares = self.trainer.lightning_module._require_engine(), not hands_out_arrays(self.trainer)
        beside = shares and self.writer.busy and engine.has_copies(self._copies)
        if beside:
            self.writer.check()
        else:
            self.writer.wait()
            self._copies.forget()
        checkpoint, self._places = gather(self.trainer, bool(weights_only), self._copies if shares else None)
        body, trees = _contents.split_for_disk(checkpoint, self._places, self._network_names())
        payload = _io.snapshot(
            body,
            trees,
            target=filepath,
            header=_contents.versions(),
            trees_are_ours=True,
            ours=("attributes",),
            lenient={MODULE_KEYS[1]: self._describe_hparam, DATAMODULE_KEYS[1]: self._describe_hparam},
        )
        self.writer.save(payload, filepath, storage_options, beside=beside)
        self._finish_unless_training()

    def remove_checkpoint(
        self, filepath: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None
    ) -> None:
        """Delete a checkpoint once everything saved earlier is committed.

        Args:
            filepath: The checkpoint; anything else is left alone, with a warning.
            within: The directory up to which folders that became empty are removed.
        """
        if self.trainer.is_global_zero:
            self.writer.remove(filepath, within=within)
            self._finish_unless_training()

    def wait(self) -> None:
        """Wait for what is being written; raise what went wrong. From here to the next `fit` saves return when done."""
        self._training = False
        self.writer.wait()

    def _finish_unless_training(self) -> None:
        if not self._training:
            self.writer.wait()

    def _network_names(self) -> list[str]:
        engine = self.trainer.lightning_module._require_engine()
        return [network.name for network in engine.networks()]

    def _describe_hparam(self, path: tuple[str, ...], value: Any) -> None:
        name = path[1] if len(path) > 1 else "?"
        self._warnings.warn(
            f"Attribute {name!r} of the hyper-parameters cannot be written to a checkpoint (it is {describe(value)}): "
            f"its description is stored, and unless it is what the class itself names (a default, or a member of an "
            f"enumeration in the annotation) it must be given again, as in `load_from_checkpoint(path, {name}=...)`. "
            f"You can suppress this warning by setting `self.save_hyperparameters(ignore=[{name!r}])`.",
            key=f"{path[0]}/{name}",
        )

    # --- restore ----------------------------------------------------------------------------------------------------

    def resume_start(self, checkpoint_path: str | os.PathLike[str] | None, weights_only: bool | None = None) -> None:
        """Read the checkpoint (nothing for None).

        Raises:
            FileNotFoundError: There is nothing at the path.
            CheckpointError: It is no whole checkpoint.
        """
        self._ckpt_path = checkpoint_path
        self._stored, self._loaded, self._training, self._metrics = None, {}, False, None
        if not checkpoint_path:
            return
        rank_zero_info("Restoring states from the checkpoint path at %s", checkpoint_path)
        opened, self._opened = self._opened, None
        self._stored = opened if opened is not None else _stored.StoredCheckpoint(checkpoint_path)
        self._loaded = load_dictionary(self._stored, training_state=self._is_fit())

    def restore_modules_and_callbacks(
        self, checkpoint_path: str | os.PathLike[str] | None, weights_only: bool | None = None
    ) -> None:
        """First phase: read, then bring back module, datamodule and callbacks, in this order.

        Args:
            checkpoint_path: What `resolve_ckpt_path` returned.
            weights_only: Accepted for Lightning's sake; nothing in a checkpoint is ever unpickled.
        """
        self.resume_start(checkpoint_path, weights_only)
        self.restore_model()
        self.restore_datamodule()
        self.restore_callbacks()

    def restore_model(self) -> None:
        """Call the module's `on_load_checkpoint`, then set its parameters and variables.

        Raises:
            RuntimeError: They do not fit; the message lists the paths.
        """
        if not self._loaded:
            return
        from jaxlightning.loops import call

        module = self.trainer.lightning_module
        call.call_lightning_module_hook(self.trainer, "on_load_checkpoint", self._loaded)
        load_weights_into(module, self._loaded["state_dict"], stored=self._stored, strict=module.strict_loading)
        module._require_engine().load_attributes(self._loaded.get("attributes") or {})

    def restore_datamodule(self) -> None:
        """Give the datamodule its state."""
        datamodule = self.trainer.datamodule
        name = type(datamodule).__qualname__
        if self._loaded and datamodule is not None and name in self._loaded:
            from jaxlightning.loops import call

            call.call_lightning_datamodule_hook(self.trainer, "load_state_dict", self._loaded[name])

    def restore_callbacks(self) -> None:
        """Call every callback's `on_load_checkpoint`, then give each its state."""
        if not self._loaded or self._loaded.get("callbacks") is None:
            return
        from jaxlightning.loops import call

        states = self._loaded["callbacks"]
        present = {callback.state_key for callback in self.trainer.callbacks}
        missing = [key for key in states if key not in present]
        if missing:
            rank_zero_warn(
                "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided "
                f"during `Trainer` instantiation. Please add the following callbacks: {missing}."
            )
        call.call_callback_hooks(self.trainer, "on_load_checkpoint", self._loaded)
        for callback in self.trainer.callbacks:
            state = states.get(callback.state_key)
            if state:
                callback.load_state_dict(copy.deepcopy(state))

    def restore_training_state(self) -> None:
        """Second phase: loops; for `fit` also optimizers, schedulers, gradients, metric sums and random generators.

        Raises:
            KeyError: The checkpoint holds weights only.
            MisconfigurationException: It is from a later epoch than `max_epochs`.
            RuntimeError: The optimizers do not fit.
        """
        if not self._loaded:
            return
        self.restore_loops()
        if self._is_fit():
            self.restore_optimizers_and_schedulers()
            self.trainer.lightning_module._require_engine().load_numbers(self._loaded.get("numbers") or {})
            self._metrics = self._loaded.get("metrics")
            if self.auto_resumed and self.trainer.fit_loop.was_stopping:
                self.trainer.should_stop = True
            self._restore_rng()

    @property
    def logger_positions(self) -> Any:
        """How far each logger had come when the loaded checkpoint was written."""
        return (self._loaded.get("metrics") or {}).get("loggers")

    def restore_loops(self) -> None:
        """Bring the counters of the running verb's loop back."""
        trainer, states = self.trainer, self._loaded.get("loops")
        fn = str(getattr(trainer.state.fn, "value", trainer.state.fn))
        if states is not None:
            loop = {
                "fit": trainer.fit_loop,
                "validate": trainer.validate_loop,
                "test": trainer.test_loop,
                "predict": trainer.predict_loop,
            }[fn]
            loop.load_state_dict(states[f"{fn}_loop"])
        if fn == "fit" and trainer.max_epochs not in (None, -1) and trainer.current_epoch > trainer.max_epochs:
            raise MisconfigurationException(
                f"You restored a checkpoint with current_epoch={trainer.current_epoch}, but you have set "
                f"Trainer(max_epochs={trainer.max_epochs})."
            )

    def restore_optimizers_and_schedulers(self) -> None:
        """Bring optimizers and schedulers back.

        Raises:
            KeyError: The checkpoint holds weights only.
            RuntimeError: Their number or structure differs.
        """
        for key, what in (("optimizer_states", "optimizer"), ("lr_schedulers", "learning rate scheduler")):
            if key not in self._loaded:
                raise KeyError(_NO_OPTIMIZERS.format(what=what))
        trainer = self.trainer
        states = self._loaded["optimizer_states"]
        if len(states) != len(trainer.optimizers):
            raise RuntimeError(
                f"The checkpoint has the states of {len(states)} optimizers, but `configure_optimizers` returned "
                f"{len(trainer.optimizers)}. Return the same optimizers as when it was saved, or load only the weights."
            )
        for handle, state in zip(trainer.optimizers, states, strict=True):
            handle.load_state_dict({key: value for key, value in state.items() if key != "state"})
        engine = trainer.lightning_module._require_engine()
        saved_states = [state.get("state") for state in states]
        if None not in saved_states:  # saved before the first step there are none, and the optimizers begin anew
            engine.load_optimizer_states(saved_states)
        scaler = self._loaded.get(type(trainer.precision_plugin).__qualname__)
        if isinstance(scaler, dict) and "scale" in scaler:
            engine.load_scaler(
                {
                    "scale": scaler["scale"],
                    "growth_tracker": scaler["_growth_tracker"],
                    "skipped": scaler.get("skipped", 0),
                }
            )
        if self._loaded.get("nonfinite_updates"):
            engine.load_nonfinite(self._loaded["nonfinite_updates"])
        manual = not trainer.lightning_module.automatic_optimization
        if self._loaded.get("gradients") and manual:
            engine.load_manual_gradients(self._loaded["gradients"])
        elif self._loaded.get("gradients") and trainer.fit_loop.continues_epoch:
            engine.load_gradients(self._loaded["gradients"])
        for config, saved in zip(trainer.lr_scheduler_configs, self._loaded["lr_schedulers"], strict=False):
            config.scheduler.load_state_dict(saved)

    def restore_metrics(self) -> None:
        """Bring back what was logged; after the sanity check, which empties the dictionaries of metrics."""
        metrics, self._metrics = self._metrics, None
        if metrics:
            _running.restore(self.trainer, metrics)

    def _restore_rng(self) -> None:
        rng = self._loaded.get("rng")
        if isinstance(rng, dict):
            _host_rng.restore(rng, seed=self.trainer.lightning_module._require_engine().seed)

    def resume_end(self) -> None:
        """Forget the checkpoint in memory; everything is restored."""
        if self._ckpt_path and self._stored is not None:
            what = "Restored all states" if self._is_fit() else "Loaded model weights"
            rank_zero_info("%s from the checkpoint at %s", what, self._ckpt_path)
        self._loaded, self._stored = {}, None
        self._training = self._is_fit()

    def restore(self, checkpoint_path: str | os.PathLike[str] | None, weights_only: bool | None = None) -> None:
        """Restore everything at once, for a trainer that is set up already."""
        self.restore_modules_and_callbacks(checkpoint_path, weights_only)
        self.restore_training_state()
        self.resume_end()

    def _is_fit(self) -> bool:
        fn = self.trainer.state.fn
        return str(getattr(fn, "value", fn)) == "fit"
