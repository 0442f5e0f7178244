"""Remembers who was in train mode, so that an evaluation puts everything back as it was."""

from __future__ import annotations

from typing import Any


class ModuleMode:
    """The train or eval mode of a module and of every network in it."""

    def __init__(self) -> None:
        self._module: bool | None = None
        self._networks: dict[str, bool] = {}

    def capture(self, module: Any, engine: Any) -> None:
        """Remember the modes, before a hook changes them.

        Args:
            module: The user's module.
            engine: Its engine, which knows the networks.
        """
        self._module = bool(module.training)
        self._networks = engine.binding.modes()

    def restore(self, module: Any, engine: Any) -> None:
        """Put the remembered modes back; does nothing when none were taken."""
        if self._module is None:
            return
        module.training = self._module
        engine.binding.restore_modes(self._networks)
        engine.sync_modes()
        self._module = None
