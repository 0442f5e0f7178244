"""The engine of a hand-written step: what `compile.Engine` is for a module, with the same words for the loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlightning.compile.log_plan import LogMeta, LogPlan
from jaxlightning.compile.packing import SlotTable
from jaxlightning.compile.trees import device_copy
from jaxlightning.functional._evaluation import EvalProgram
from jaxlightning.functional._held import nested
from jaxlightning.functional._program import RepeatedProgram, TrainProgram
from jaxlightning.functional._values import RATE, LogReader, Rate, StepResult, Values
from jaxlightning.functional._views import HeldViews
from jaxlightning.metrics._batch_size import extract_batch_size
from jaxlightning.utilities.exceptions import MisconfigurationException

__all__ = ["FunctionalEngine"]


class FunctionalEngine(HeldViews):
    """Calls a hand-written step for the trainer's loops.

    What `Engine` carries stays empty here, so that its other words have nothing to say: the state is in `held`.

    Args:
        module: The `StepModule` that holds the step and its state.
        strategy: Devices and shardings.
        jit: Whether a step that is not jitted is jitted.
        seed: Seed of the run.
        log_compiles: Accepted for symmetry: `jax.log_compiles` tells about a function of the user's own.
        detect_anomaly: Whether a loss or a new parameter that is not finite raises, at the price of a read per step.
        checkify: Kinds of run-time checks that the training step carries.
        precision: Always that of full precision: `fit` refuses others.
        on_nonfinite: Always None: `fit` refuses others.
    """

    has_variables = True

    def __init__(
        self,
        module: Any,
        *,
        strategy: Any = None,
        jit: bool = True,
        seed: int = 0,
        log_compiles: bool = False,
        detect_anomaly: bool = False,
        checkify: tuple[str, ...] = (),
        precision: Any = None,
        on_nonfinite: str | None = None,
    ) -> None:
        super().__init__(module, strategy=strategy, jit=jit, seed=seed, log_compiles=log_compiles)
        self.detect_anomaly = detect_anomaly
        self.checks = checkify
        self.updates = 0
        self.held = module.steps.held
        self._program: TrainProgram | None = None
        self._evaluations: dict[Any, EvalProgram] = {}
        self._reader = LogReader(module.steps.train_form, module.steps.loss_names)
        self._plan = LogPlan()
        self._rate: Rate | None = None
        self._spread = self.strategy.batches_per_step > 1

    # --- life ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts the state on the devices of the run, as copies: the user's arrays stay valid."""
        self.module.__dict__["_engine"] = self
        copied = device_copy(self.held.dynamic())
        self.held.set_dynamic(self.strategy.put(copied))

    def detach(self) -> None:
        """Gives NNX objects their last values."""
        self.held.set_dynamic(self.held.dynamic())

    def set_optimizers(self, handles: list[Any] | None) -> None:
        """Takes the handle by which callbacks see the optimizer."""
        self.binding.optimizers = list(handles or [])
        for handle in self.binding.optimizers:
            handle.bind(get_state=lambda: self.held.opt)

    def mark_dirty(self) -> None:
        """A hand-written step reads nothing from the module."""

    ensure_optimizer_states = ensure_gradient_buffer = reset_optimizer_states = refresh_nnx = mark_dirty
    modes_changed = sync_modes = check_constants = create_from_example = host_code_ran = mark_dirty

    def ensure_created(self, stage: str, batch: Any, scalars: Any) -> None:
        """The state came complete."""

    def block_until_ready(self) -> None:
        """Waits until the last dispatched step is done."""
        jax.block_until_ready(self.held.dynamic())  # type: ignore[no-untyped-call]

    # --- training -----------------------------------------------------------------------------------------------

    def train_batch(
        self,
        batch: Any,
        batch_idx: int,
        current_epoch: int,
        global_step: int,
        micro_step: int,
        clip: tuple[float | None, str | None],
        want_outputs: bool,
    ) -> Any:
        """Runs one batch; the arguments are those of `compile.Engine.train_batch`."""
        program = self._program
        if program is None:
            program = self._start(micro_step)
        held = self.held
        if self._spread:
            batch = self._placed_batch(batch)
        before = (held.carry, held.opt, held.key) if self.detect_anomaly else None
        held.carry, held.opt, held.key, parts, rate = program.call(held.carry, held.opt, held.key, batch)
        self.updates += 1
        values = Values(self._reader, parts, rate, program.rate, micro_step)
        if not self._plan.metas:
            self._first_values(values)
        if before is not None:
            self._require_finite(values, before, batch, micro_step)
        return StepResult(self._plan, values)

    def train_step(
        self, batch: Any, *, batch_idx: int, micro_step: int = 0, accumulate: int = 1, **options: Any
    ) -> Any:
        """The same, as the loops call it for accumulation, which a hand-written step has to do itself.

        Raises:
            MisconfigurationException: If batches are to be accumulated.
        """
        if accumulate != 1:
            raise MisconfigurationException(
                f"`accumulate_grad_batches={accumulate}` cannot be done around a hand-written step, which makes its "
                "own update. Wrap the optimizer: `optax.MultiSteps(tx, every_k_schedule=...)`."
            )
        return self.train_batch(
            batch, batch_idx, options.get("current_epoch", 0), options.get("global_step", 0), micro_step, (None, None),
            bool(options.get("want_outputs")),
        )  # fmt: skip

    def repeated_step(self, clip: tuple[float | None, str | None], want_outputs: bool) -> Any:
        """What runs batches between which nothing is due; None before the first one."""
        if self._program is None or not self._plan.metas or self.detect_anomaly or self._spread:
            return None
        program = self._program

        def finish(count: int, parts: Any, rate: Any, micro_step: int) -> StepResult:
            self.updates += count
            return StepResult(self._plan, Values(self._reader, parts, rate, program.rate, micro_step))

        return RepeatedProgram(self.held, program, finish)

    def grad_step(self, *args: Any, **options: Any) -> Any:
        """There is no place between gradient and update in a hand-written step.

        Raises:
            MisconfigurationException: Always.
        """
        raise MisconfigurationException(
            "A callback overrides a hook between gradient and update (on_before_backward ... on_before_optimizer_step)."
            " A hand-written step computes both in one call, so these hooks cannot run. Use a LightningModule for "
            "them, or compute what they need in the step and return it in its loss_dict."
        )

    update_step = grad_step

    def _start(self, micro_step: int) -> TrainProgram:
        steps = self.module.steps
        source = self.held.opt if self.held.opt is not None else self.held.dynamic()[0]
        self._rate = Rate(source, steps.tx)
        self._rate.offset -= micro_step
        self._program = TrainProgram(
            steps.train_step,
            steps.train_form,
            self.held,
            self._rate,
            jit=self.jit,
            donate=not self.detect_anomaly,
            checks=self.checks,
        )
        return self._program

    def _first_values(self, values: Values) -> None:
        """Learns which keys the step logs; the rate comes last unless the step logs it itself."""
        table = self._table("train")
        names = list(values.named())
        if self._rate is not None and self._rate.known and RATE not in names:
            names.append(RATE)
        metas = tuple(
            LogMeta(
                fx="training_step", name=name, on_step=True, on_epoch=False, prog_bar=name in ("loss", RATE, names[0])
            )
            for name in names
        )
        slots = tuple(table.add(meta) for meta in metas)
        table.capacity = max(table.capacity, table.needed)
        self._reader.slots = dict(zip(names, slots, strict=True))
        self._reader.size = table.capacity
        self._plan = LogPlan(metas, slots)

    def _placed_batch(self, batch: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self.strategy.batch_sharding(leaf)), batch)

    def _require_finite(self, values: Values, before: Any, batch: Any, micro_step: int) -> None:
        named = [(f"the loss {name!r}", value) for name, value in values.named().items()]
        carry = self.held.rebuild(self.held.carry)
        named += [
            (f"the updated {jax.tree_util.keystr(path, simple=True, separator='/')}", leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(carry)[0]
            if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        flags = np.asarray(_all_finite([value for _, value in named]))
        if flags.all():
            return
        self.held.carry, self.held.opt, self.held.key = before
        from jaxlightning.compile.anomaly import raise_anomaly

        raise_anomaly(
            named[int(np.argmin(flags))][0],
            batch,
            micro_step,
            self.module.steps.train_form.where,
            self.module,
            params=nested(self._sections(lambda leaf: leaf)["params"]),
        )

    # --- evaluation ---------------------------------------------------------------------------------------------

    def eval_step(
        self, stage: str, batch: Any, *, batch_idx: int, dataloader_idx: int | None = None, **_options: Any
    ) -> Any:
        """Runs one evaluation batch."""
        table = self._table(stage)
        program = self._evaluations.get((stage, dataloader_idx))
        dynamic = self.held.dynamic()
        if self._spread:
            batch = self._placed_batch(batch)
        if program is None:
            program = self._start_evaluation(stage, dataloader_idx, dynamic, batch, table)
        weight = extract_batch_size(batch)
        acc, values = program(dynamic, self._eval_acc[stage], batch, weight, batch_idx)
        self._eval_acc[stage] = acc
        return StepResult(program.plan, values)

    def _start_evaluation(
        self, stage: str, dataloader_idx: int | None, dynamic: Any, batch: Any, table: SlotTable
    ) -> EvalProgram:
        steps = self.module.steps
        program = EvalProgram(
            steps.eval_step,
            steps.eval_form,
            self.held,
            steps.eval_view,
            taken=set(self._reader.slots),
            dataloader_idx=dataloader_idx,
            jit=self.jit,
        )
        names = program.prepare(dynamic, batch, table)
        if table.needed > table.capacity:
            self.grow_accumulators(table)
        self._evaluations[stage, dataloader_idx] = program
        self.module.on_metrics_known(names)
        return program

    def predict_step(self, batch: Any, **_options: Any) -> Any:
        """A hand-written step predicts nothing.

        Raises:
            MisconfigurationException: Always.
        """
        raise MisconfigurationException(
            "`jaxlightning.fit` trains and evaluates; call the network yourself to predict."
        )

    # --- views --------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates of this run."""
        return self.updates

    @property
    def grads(self) -> Any:
        """None: the gradients stay inside a hand-written step."""
        return None

    @grads.setter
    def grads(self, value: Any) -> None:
        self.grad_step()

    def zero_grad(self) -> None:
        """There is nothing to forget."""


@jax.jit
def _all_finite(values: list[Any]) -> Any:
    return jnp.stack([jnp.all(jnp.isfinite(value)) for value in values])
