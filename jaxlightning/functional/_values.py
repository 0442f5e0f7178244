"""The losses of a step and its learning rate, left on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlightning.functional._forms import Form, read_logs
from jaxlightning.optim._closures import find_learning_rate

__all__ = ["RATE", "LogReader", "Rate", "StepResult", "Values"]

RATE = "learning_rate"
"""Name under which the learning rate is logged."""


class LogReader:
    """Knows the names of a step's losses and where they go in the vector of step values.

    Args:
        form: The form of the step, for messages.
        names: Names of losses that have none.
        first: Name of the first loss.
    """

    def __init__(self, form: Form, names: Sequence[str], first: str = "loss") -> None:
        self.form = form
        self.names = names
        self.first = first
        self.slots: dict[str, int] = {}
        self.size = 0

    def read(self, parts: Any) -> dict[str, Any]:
        """The losses by name."""
        return read_logs((parts,), self.form, self.names, self.first)

    def require_known(self, logs: Mapping[str, Any]) -> None:
        """Refuses entries that are others than those of the first batch.

        Args:
            logs: The losses by name.

        Raises:
            ValueError: If one is new, or missing.
        """
        if len(logs) != len(self.slots) or not logs.keys() <= self.slots.keys():
            first = [name for name in self.slots if name != RATE or name in logs]
            if set(first) != set(logs):
                raise ValueError(
                    f"{self.form.where} returned the losses {sorted(logs)}, and in its first batch {sorted(first)}. "
                    "It must return the same ones for every batch."
                )


class Rate:
    """Where the learning rate of a step can be read.

    Attributes:
        get: Takes an optimizer state to the array that holds the rate, or None.
        schedule: A function of the number of updates, or a number, where the state does not hold the rate.
        offset: What the optimizer had counted before the first batch.
    """

    def __init__(self, tree: Any, tx: Any) -> None:
        self.get: Callable[[Any], Any] | None = None
        self.schedule: Any = None
        self.offset = 0
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        for path, _ in flat:
            words = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
            if "hyperparams" in words and words[-1 if words[-1] != "value" else -2] == RATE:
                self.get = _getter(path)
                return
        if tx is not None:
            self.schedule = find_learning_rate(tx)
            for path, leaf in flat:
                if jax.tree_util.keystr(path[-1:], simple=True) == "count" and jax.numpy.ndim(leaf) == 0:
                    self.offset = int(leaf)
                    break

    @property
    def known(self) -> bool:
        """Whether there is a rate to show."""
        return self.get is not None or self.schedule is not None

    def at(self, count: int) -> float:
        """The rate of update number `count` of this run, from the schedule."""
        value = self.schedule(self.offset + count) if callable(self.schedule) else self.schedule
        return float(value)


def _getter(path: Any) -> Callable[[Any], Any]:
    def get(tree: Any) -> Any:
        for entry in path:
            if isinstance(entry, jax.tree_util.GetAttrKey):
                tree = getattr(tree, entry.name)
            elif isinstance(entry, jax.tree_util.SequenceKey):
                tree = tree[entry.idx]
            elif isinstance(entry, jax.tree_util.DictKey):
                tree = tree[entry.key]
            else:
                children = jax.tree_util.default_registry.flatten_one_level(tree)
                tree = list(children[0])[entry.key]
        return tree

    return get


class Values:
    """The step values of one batch as the result collection takes them: an array once somebody asks for it.

    The losses of a step are separate outputs of the user's own function. Nothing is done with them in the loop; at a
    log point all of them come to the host together.
    """

    __slots__ = ("_count", "_parts", "_rate", "_rates", "_reader")

    def __init__(self, reader: LogReader, parts: Any, rate: Any, rates: Rate, count: int) -> None:
        self._reader = reader
        self._parts = parts
        self._rate = rate
        self._rates = rates
        self._count = count

    def copy_to_host_async(self) -> None:
        """Begins the copies to the host."""
        for leaf in jax.tree_util.tree_leaves((self._parts, self._rate)):
            if hasattr(leaf, "copy_to_host_async"):
                leaf.copy_to_host_async()

    def named(self) -> dict[str, Any]:
        """The losses by name, still on the device."""
        return self._reader.read(self._parts)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        logs, rate = jax.device_get((self.named(), self._rate))
        reader = self._reader
        reader.require_known(logs)
        # Each by itself: NumPy has no common type for all of float32, bool and bfloat16 together.
        kinds = {np.result_type(np.float32, np.asarray(value).dtype) for value in logs.values()}
        out = np.zeros(reader.size, np.float64 if np.dtype(np.float64) in kinds else np.float32)
        for name, value in logs.items():
            out[reader.slots[name]] = np.asarray(value).reshape(())
        if RATE in reader.slots and RATE not in logs:
            out[reader.slots[RATE]] = self._rates.at(self._count) if rate is None else np.asarray(rate).reshape(())
        return out if dtype is None else out.astype(dtype)


class StepResult:
    """What one step gives to the loops, as `compile.StepOutput` does.

    Attributes:
        plan: The keys that the step logs.
        values: Their values.
        states: Always empty: a hand-written step has no metric objects.
        skipped: Always False.
    """

    __slots__ = ("plan", "states", "values")
    skipped = False

    def __init__(self, plan: Any, values: Any) -> None:
        self.plan = plan
        self.values = values
        self.states = ()

    @property
    def outputs(self) -> Any:
        """What callbacks get as `outputs`: the losses by name."""
        return self.values.named() if isinstance(self.values, Values) else None
