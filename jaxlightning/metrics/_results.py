"""What was logged in one stage: entries from host hooks and from compiled steps, merged under one order of keys.

The device side stays where it is: of each compiled variant (plan) the latest vector of step values is remembered, and
the epoch reductions live in the engine's accumulators until somebody asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxlightning.compile.log_plan import LogKey, LogMeta, LogPlan
from jaxlightning.metrics._emission import StepLayout
from jaxlightning.metrics._entries import Entry, Items, KnownPlans, Owner, StepValues, reduced, storage_key
from jaxlightning.metrics._host_value import HostValue
from jaxlightning.metrics._objects import PASSED, absorb_states, merge_passed
from jaxlightning.metrics._refs import Ref, Snapshot, fetch, resolve, resolve_in_place, to_scalar
from jaxlightning.metrics._values import default_dtype
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["ResultCollection"]


class ResultCollection:
    """Everything logged in one stage since its last reset.

    Args:
        stage: `"train"`, `"validate"`, `"test"` or `"sanity_check"`.
        owner: Gives the engine's accumulators and the metric objects of the module.
    """

    def __init__(self, stage: str, owner: Owner) -> None:
        self.stage = stage
        self.training = stage == "train"
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        # None: between epochs (epoch values count), True: the first batch, False: a later one (step values count).
        self.first_batch: bool | None = None
        # Whether some active key has step values for the loggers, so that a batch without any costs nothing.
        self.step_log = False
        # Whether step values came that nobody has put into the three dictionaries.
        self._fresh = False
        # Whether the accumulators hold sums from a checkpoint that no step of this run has added to.
        self._preloaded = False
        self._entries: dict[LogKey, Entry] = {}
        self._plan: LogPlan | None = None
        self._values: Any = None
        self._snapshot: Snapshot | None = None
        # Steps of the run so far: with it a step value tells whether it is a new one.
        self._steps = 0
        self._known = KnownPlans()
        self._canonical: LogPlan | None = None
        self._older: dict[int, tuple[LogPlan, Snapshot, int]] = {}
        self._active_plans: set[int] = set()
        self._accumulators: np.ndarray[Any, Any] | None = None
        self._owner = owner
        self._layout: StepLayout | None = None

    # --- Logging ---

    def register(self, meta: LogMeta) -> Entry:
        """The entry of a key; made at its first call.

        Raises:
            MisconfigurationException: If the key was logged before with other options.
        """
        key = storage_key(meta)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(meta)
        elif entry.meta is not meta and entry.meta != meta:
            changed = {
                word: (getattr(entry.meta, word), getattr(meta, word))
                for word in meta.__dataclass_fields__
                if getattr(entry.meta, word) != getattr(meta, word)
            }
            listed = ", ".join(f"{word} was {old!r} and is {new!r}" for word, (old, new) in changed.items())
            raise MisconfigurationException(
                f"You called `self.log({meta.name}, ...)` twice in `{meta.fx}` with different arguments. "
                f"This is not allowed: {listed}. Use another name for one of them."
            )
        return entry

    def log_host(self, meta: LogMeta, value: Any, weight: Any) -> None:
        """Log a value from a hook that runs on the host."""
        entry = self.register(meta)
        if meta.metric is None:
            if entry.host is None:
                entry.host = HostValue(meta.reduce_fx)
            entry.host.update(value, weight, on_epoch=meta.on_epoch)
        elif meta.metric == PASSED:
            entry.passed = value if entry.passed is None else entry.passed.merge(value)
        entry.host_calls += 1
        self._fresh = True
        self._activate(entry)

    def on_step_output(self, out: StepValues) -> None:
        """Take the output of a compiled step: a few attributes, whatever the number of keys."""
        if out.plan is not self._plan:
            self._switch_plan(out.plan)
        self._steps += 1
        self._fresh = True
        self._values = out.values
        self._snapshot = self._accumulators = None
        if out.plan.states:
            self._take_states(out)

    def on_step_outputs(self, batch: Any, out: StepValues, count: int) -> None:
        """Take the output of the last of several like steps, between which nobody read a value.

        Args:
            batch: The last batch.
            out: What its step gave.
            count: Number of steps.
        """
        self.start_batch(batch, None)
        self.first_batch = False
        self._steps += count - 1
        self.on_step_output(out)

    def _take_states(self, out: StepValues) -> None:
        for meta, value in absorb_states(out.plan.states, out.states):
            entry = self._entries[storage_key(meta)]
            entry.passed = value if entry.passed is None else merge_passed(entry.passed, value)

    def _switch_plan(self, plan: LogPlan) -> None:
        before, now = self._canonical, self._known.canonical(plan)
        self._plan, self._canonical = plan, now
        if now is before:
            return
        self._layout = None
        if before is not None:
            self._older.pop(id(before), None)
            self._older[id(before)] = (before, self._snapshot or Snapshot(self._values), self._steps)
        self._older.pop(id(now), None)
        if id(now) in self._active_plans:
            return
        self._active_plans.add(id(now))
        for meta, slot in zip(now.metas, now.slots, strict=True):
            entry = self.register(meta)
            entry.slot = slot
            self._activate(entry)

    def _activate(self, entry: Entry) -> None:
        entry.active = True
        self._layout = None
        if entry.meta.metric is not None and entry.meta.metric != PASSED:
            entry.metric = self._owner.find_metric(entry.meta.metric)
        self.step_log = self.step_log or (entry.meta.on_step and entry.meta.logger)

    # --- Reading ---

    def has_name(self, name: str) -> bool:
        """Whether some key of the stage is known to callbacks by this name."""
        return any(name in entry.names(on_step) for entry in self._entries.values() for on_step in (True, False))

    def items(self) -> Items:
        """What is logged at this moment: step values while batches run, epoch values between epochs."""
        return self._epoch_items() if self.first_batch is None else self.step_items()

    def step_items(self) -> Items:
        """The latest step values; nothing is fetched."""
        items = Items()
        places = self._places()
        for entry in self._visible():
            if not entry.meta.on_step:
                continue
            value, step = places.get(entry.slot, (None, 0)) if entry.slot is not None else (None, 0)
            if value is None and entry.host is not None:
                value = entry.host.step_value()
            if value is not None:
                self._put(items, entry, value, step, on_step=True)
        return items

    def step_layout(self) -> StepLayout | None:
        """Where the latest step values lie; None when not all of them are in the last step's vector."""
        if self._layout is None and self._plan is not None and not self._older and self.dataloader_idx is None:
            entries = [entry for entry in self._visible() if entry.meta.on_step]
            if all(entry.slot is not None and entry.slot in self._plan.slots for entry in entries):
                places = [(entry.meta, entry.names(True)[1], entry.slot) for entry in entries if entry.slot is not None]
                self._layout = StepLayout(
                    {name: slot for meta, name, slot in places if meta.logger},
                    {name: slot for meta, name, slot in places if meta.prog_bar},
                )
        return self._layout

    def new_step_items(self) -> Items:
        """The latest step values if they were not taken before, else nothing; nothing is fetched."""
        fresh, self._fresh = self._fresh, False
        return self.step_items() if fresh else Items()

    def _epoch_items(self) -> Items:
        """The epoch reductions; fetched with one read, and one more if host hooks logged device arrays."""
        entries = [entry for entry in self._visible() if entry.meta.on_epoch]
        fetch(snapshot for entry in entries if entry.host is not None for snapshot in entry.host.snapshots())
        items = Items()
        for entry in entries:
            if entry.meta.metric is not None:
                self._put(items, entry, self._metric_value(entry), self._steps, on_step=False)
                continue
            value = reduced(entry.meta.reduce_fx, list(self._rows(entry)))
            if value is not None:
                self._put(items, entry, value, self._steps, on_step=False)
        resolve_in_place(items.callback, items.log, items.bar)  # the values of metric objects
        return items

    def _metric_value(self, entry: Entry) -> Any:
        """The epoch value of a metric object, still on the device."""
        value = entry.passed.compute() if entry.metric is None else entry.metric.compute()
        if not isinstance(value, jax.Array | np.ndarray | np.generic) or value.size != 1:
            shape = getattr(value, "shape", None)
            raise ValueError(
                f"The `.compute()` return of the metric logged as {entry.meta.name!r} must be a tensor with a single "
                f"element. Found {f'shape {shape}' if shape is not None else repr(value)}."
            )
        value = value.reshape(())
        return Ref(Snapshot(value if value.dtype.kind == "f" else value.astype(default_dtype())), None)

    def _rows(self, entry: Entry) -> Iterator[tuple[Any, Any]]:
        if entry.slot is not None:
            if self._accumulators is None:
                self._accumulators = np.asarray(self._owner.read_accumulators(self.stage))
            yield self._accumulators[0, entry.slot], self._accumulators[1, entry.slot]
        if entry.host is not None and entry.host.total is not None:
            yield entry.host.row()

    def _put(self, items: Items, entry: Entry, value: Any, step: int, *, on_step: bool) -> None:
        meta = entry.meta
        name, forked = entry.names(on_step)
        if meta.logger:
            items.log[forked] = value
        # Step values of an evaluation are no metric of the model: only its epoch values reach callbacks.
        if self.training or not on_step:
            items.callback[name] = value
            items.callback[forked] = value
            version = (self.stage, meta.key, on_step, entry.host_calls, 0 if entry.slot is None else step)
            items.versions[name] = items.versions[forked] = version
        if meta.prog_bar:
            items.bar[forked] = value

    def _visible(self) -> Iterator[Entry]:
        current = self.dataloader_idx
        return (entry for entry in self._entries.values() if entry.active and entry.meta.dataloader_idx == current)

    def _places(self) -> dict[int, tuple[Ref, int]]:
        """For every slot its latest step value and that step, over all variants that ran since the last reset."""
        places: dict[int, tuple[Ref, int]] = {}
        for plan, snapshot, step in self._older.values():
            places.update((slot, (Ref(snapshot, slot), step)) for slot in plan.slots)
        latest = self.latest()
        if self._plan is not None and latest is not None:
            places.update((slot, (Ref(latest, slot), self._steps)) for slot in self._plan.slots)
        return places

    def latest(self) -> Snapshot | None:
        """The values of the last step, or None."""
        if self._snapshot is None and self._values is not None:
            self._snapshot = Snapshot(self._values)
        return self._snapshot

    # --- Checkpoints ---

    def state_dict(self) -> list[dict[str, Any]]:
        """What was logged since the last reset, as plain values: for each key its options, reduction and step value."""
        entries = [entry for entry in self._entries.values() if entry.active]
        places = self._places()
        steps = resolve(
            places[entry.slot][0] if entry.slot in places else entry.host.step_value() if entry.host else None
            for entry in entries
        )
        fetch(snapshot for entry in entries if entry.host is not None for snapshot in entry.host.snapshots())
        saved = []
        for entry, step in zip(entries, steps, strict=True):
            device, host = None, (None, 0)
            if entry.meta.on_epoch:
                rows = [(to_scalar(total), to_scalar(weight)) for total, weight in self._rows(entry)]
                device = list(rows.pop(0)) if entry.slot is not None else None
                host = rows[0] if rows else host
            saved.append(
                {
                    "meta": dataclasses.asdict(entry.meta),
                    "device": device,
                    "on_device": entry.slot is not None,
                    "total": host[0],
                    "weight": host[1],
                    "step": to_scalar(step) if entry.meta.on_step else None,
                    "state": None if entry.metric is None else _as_lists(entry.metric.state),
                }
            )
        return saved

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Continue from what `state_dict` gave; sums of compiled steps go on where they were, in the same order.

        Args:
            state: From `state_dict`.
        """
        self.reset()
        on_device = [saved for saved in state if saved["on_device"]]
        slots = self._owner.preload_accumulators(
            self.stage, [(LogMeta(**saved["meta"]), *(saved["device"] or (0.0, 0.0))) for saved in on_device]
        )
        places = {id(saved): slot for saved, slot in zip(on_device, slots, strict=True)}
        for saved in state:
            entry = self.register(LogMeta(**saved["meta"]))
            entry.slot = places.get(id(saved))
            entry.host = HostValue.restored(entry.meta.reduce_fx, saved["total"], saved["weight"], saved["step"])
            self._activate(entry)
            if entry.metric is not None:
                entry.metric.state = saved["state"]
        self._preloaded = bool(on_device)
        self._fresh = bool(state)
        self.first_batch = False if state else None

    # --- Moments ---

    def start_batch(self, batch: Any, dataloader_idx: int | None) -> None:
        """A batch begins: from now on step values count."""
        self.first_batch = self.first_batch is None
        self.batch = batch
        self.batch_size = None
        self.dataloader_idx = dataloader_idx

    def reset(self) -> None:
        """Forget all values; the options of known keys and their order stay."""
        for entry in self._entries.values():
            entry.reset()
        if self._plan is not None or self._preloaded:
            self._owner.reset_accumulators(self.stage)
        self._preloaded = False
        self.step_log = self._fresh = False
        self.first_batch = None
        self.batch = self.batch_size = self.dataloader_idx = None
        self._plan = self._canonical = self._values = self._snapshot = self._accumulators = None
        self._layout = None
        self._older.clear()
        self._active_plans.clear()


def _as_lists(state: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in jax.device_get(state).items()}
