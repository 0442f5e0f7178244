"""Gather the state of a trainer into Lightning's checkpoint dictionary."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxlightning.checkpoint import _contents, _host_rng, _running

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer
    from jaxlightning.utilities.host_memory import HostCopies

#: The version of Lightning whose dictionary this is; tools that read checkpoints look for the key.
LIGHTNING_VERSION = "2.6.6"

#: Keys of hyper-parameters: name of the argument, the values.
MODULE_KEYS = ("hparams_name", "hyper_parameters")
DATAMODULE_KEYS = ("datamodule_hparams_name", "datamodule_hyper_parameters")


def gather(
    trainer: Trainer, weights_only: bool, copies: HostCopies | None = None
) -> tuple[dict[str, Any], dict[str, _contents.Place]]:
    """Gather everything, and run the hooks that may change it, in Lightning's order.

    Args:
        trainer: The trainer, with a module.
        weights_only: Leave out callbacks, optimizers, schedulers, metrics and random generators.
        copies: Gives the copies that an earlier checkpoint of the same state made; only for `hands_out_arrays` False.

    Returns:
        The dictionary, whose arrays are host copies, and where the entries of its `state_dict` belong.
    """
    from jaxlightning.loops import call

    module, datamodule = trainer.lightning_module, trainer.datamodule
    sections = module._require_engine().state_dict(copies)
    flat = _contents.state_dict_places(sections["params"], sections["variables"])
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": _own_state_dict(module, {name: leaf for name, (_, leaf) in flat.items()}),
        "loops": {
            "fit_loop": trainer.fit_loop.state_dict(),
            "validate_loop": trainer.validate_loop.state_dict(),
            "test_loop": trainer.test_loop.state_dict(),
            "predict_loop": trainer.predict_loop.state_dict(),
        },
    }
    bare = module._require_engine().bare_networks()
    if bare:
        checkpoint["networks_without_variables"] = bare
    attributes = module._require_engine().attribute_values(copies)
    if attributes:
        checkpoint["attributes"] = attributes
    if not weights_only:
        _add_training_state(trainer, checkpoint, sections)
    for obj, (name_key, values_key) in ((module, MODULE_KEYS), (datamodule, DATAMODULE_KEYS)):
        hparams = getattr(obj, "hparams", None)
        if obj is not None and hparams:
            checkpoint[name_key] = getattr(obj, "_hparams_name", None)
            checkpoint[values_key] = dict(hparams)
    if datamodule is not None:
        state = call.call_lightning_datamodule_hook(trainer, "state_dict")
        if state:
            checkpoint[type(datamodule).__qualname__] = state
    if not weights_only:
        call.call_callback_hooks(trainer, "on_save_checkpoint", checkpoint)
    call.call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    return checkpoint, {name: place for name, (place, _) in flat.items()}


def hands_out_arrays(trainer: Trainer) -> bool:
    """Say whether code of the user's sees the arrays of a checkpoint, and so might change them."""
    from jaxlightning.loops.call import is_overridden
    from jaxlightning.module import JaxLightningModule

    module = trainer.lightning_module
    return (
        is_overridden("on_save_checkpoint", module)
        or is_overridden("state_dict", module, JaxLightningModule)
        or any(is_overridden("on_save_checkpoint", callback) for callback in trainer.callbacks)
    )


def _own_state_dict(module: Any, flat: dict[str, Any]) -> dict[str, Any]:
    """Return the module's own `state_dict()` where the user wrote one (to leave out a frozen part, for instance)."""
    from jaxlightning.loops.call import is_overridden
    from jaxlightning.module import JaxLightningModule

    return dict(module.state_dict()) if is_overridden("state_dict", module, JaxLightningModule) else flat


def _add_training_state(trainer: Trainer, checkpoint: dict[str, Any], sections: dict[str, Any]) -> None:
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    checkpoint["callbacks"] = {key: state for key, state in states.items() if state}
    optimizer_states = sections["optimizer_states"] or [None for _ in trainer.optimizers]  # none before the first step
    checkpoint["optimizer_states"] = [
        {"state": state, **handle.state_dict()}
        for handle, state in zip(trainer.optimizers, optimizer_states, strict=True)
    ]
    checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    numbers = trainer.lightning_module._require_engine().number_values()
    if numbers:
        checkpoint["numbers"] = numbers
    plugin, scaler = trainer.precision_plugin, sections.get("scaler")
    if scaler is not None and plugin.scaler is not None:
        options = dataclasses.asdict(plugin.scaler)
        checkpoint[type(plugin).__qualname__] = {
            "scale": float(scaler["scale"]),
            **{key: options[key] for key in ("growth_factor", "backoff_factor", "growth_interval")},
            "_growth_tracker": int(scaler["growth_tracker"]),
            "skipped": int(scaler["skipped"]),
        }
    if sections.get("nonfinite") is not None:
        checkpoint["nonfinite_updates"] = {name: int(value) for name, value in sections["nonfinite"].items()}
    manual = not trainer.lightning_module.automatic_optimization
    if sections.get("gradients") and (manual or trainer.fit_loop._should_accumulate()):
        checkpoint["gradients"] = sections["gradients"]
    checkpoint["metrics"] = _running.collect(trainer)
    streams = trainer._checkpoint_connector.noted("streams")
    checkpoint["rng"] = _host_rng.collect(seed=trainer.lightning_module._require_engine().seed, states=streams)
