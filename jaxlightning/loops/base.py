"""What every loop shares: its state dictionary, in the flat form with dotted prefixes that Lightning writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.loops.progress import AnyProgress

if TYPE_CHECKING:
    from jaxlightning.trainer import Trainer


class no_stray_stop_iteration:
    """Turns a StopIteration out of the user's code into an error that names the place.

    Python ends loops with it, so one that escapes from a step could end an epoch without a word. (`contextlib` has
    its own plans for this exception, hence a class.)

    Args:
        module: The user's module, which knows the hook that runs.

    Raises:
        RuntimeError: In place of the StopIteration.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, StopIteration):
            place = f"{type(self._module).__name__}.{vars(self._module).get('_current_fx_name')}"
            raise RuntimeError(
                f"A StopIteration came out of `{place}`. To end an epoch early return -1 from `on_train_batch_start`;"
                " to end training set `trainer.should_stop = True`."
            ) from error


class Loop:
    """Base of the loops.

    Args:
        trainer: The trainer that runs the loop.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._restarting = False

    @property
    def restarting(self) -> bool:
        """Whether the loop's state was loaded and its next pass continues an unfinished one."""
        return self._restarting

    @restarting.setter
    def restarting(self, value: bool) -> None:
        self._restarting = value
        for child in vars(self).values():
            if isinstance(child, Loop):
                child.restarting = value

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return what the loop keeps besides its progress counters."""
        return {}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` returned."""

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """Return the counters of this loop and its children.

        Args:
            destination: A dictionary to fill; a new one by default.
            prefix: Put before every key.

        Returns:
            A flat dictionary that JSON can hold.
        """
        destination = {} if destination is None else destination
        destination[prefix + "state_dict"] = self.on_save_checkpoint()
        for name, value in vars(self).items():
            if isinstance(value, AnyProgress):
                destination[prefix + name] = value.state_dict()
            elif isinstance(value, Loop):
                value.state_dict(destination, f"{prefix}{name}.")
        return destination

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Load the counters of this loop and its children, and mark them as restarting.

        Args:
            state_dict: What `state_dict` returned.
            prefix: Put before every key.
        """
        for name, value in list(vars(self).items()):
            key = prefix + name
            if isinstance(value, AnyProgress):
                if key in state_dict:
                    value.load_state_dict(state_dict[key])
            elif isinstance(value, Loop):
                value.load_state_dict(state_dict, key + ".")
        if prefix + "state_dict" in state_dict:
            self.on_load_checkpoint(state_dict[prefix + "state_dict"])
        self.restarting = True

    def teardown(self) -> None:
        """Release what the run held."""

    def reset_progress(self) -> None:
        """Set every counter of this loop and its children to zero."""
        for value in vars(self).values():
            if isinstance(value, AnyProgress):
                value.reset()
            elif isinstance(value, Loop):
                value.reset_progress()
