"""`JaxLightningModule`: the words a user overrides or calls.

The hooks with their defaults are in `hooks`; what a module can be asked and told, by topic, in `module_base`,
`module_arrays`, `module_logging`, `module_optimization` and `module_weights`. This file holds its attributes, its first
variables and its random keys. How its steps become compiled functions is `compile`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlightning.compile.batch_mask import BatchMask
from jaxlightning.compile.effects import INTERNAL, has_networks
from jaxlightning.compile.networks import stamp_origin
from jaxlightning.compile.trace import Scalars, current_trace
from jaxlightning.hooks import ModuleHooks
from jaxlightning.module_arrays import ModuleArrays
from jaxlightning.module_copies import detached_state
from jaxlightning.module_logging import ModuleLogging
from jaxlightning.module_optimization import ModuleOptimization
from jaxlightning.module_weights import ModuleWeights
from jaxlightning.utilities.hparams import HyperparametersMixin
from jaxlightning.utilities.seed import global_seed

if TYPE_CHECKING:
    from typing import Self

    import jax

    from jaxlightning.compile.engine import Engine
    from jaxlightning.trainer import Trainer

__all__ = ["JaxLightningModule", "LightningModule"]


class JaxLightningModule(
    ModuleArrays, ModuleLogging, ModuleOptimization, ModuleWeights, ModuleHooks, HyperparametersMixin
):
    """The class to subclass: Lightning's `LightningModule` with steps in `jax.numpy`.

    Put Flax networks (linen or NNX) on `self` in `__init__`; call them in the steps as in Lightning. The trainer traces
    each step once and compiles it to a pure function of parameters, state and batch.

    Attributes:
        training: Whether the module is in training mode.
        automatic_optimization: Whether the framework computes gradients and applies the optimizer.
        example_input_array: Input of `forward` from which variables are created and summaries get shapes; a tuple is
            passed as positional arguments, a dict by name.
        batch_mask: Inside a step, which rows of its batch are real, bool of shape [rows]; all of them unless
            `Trainer(pad_batches=...)` fills up short batches.

    Example:
        ```python
        class Net(JaxLightningModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Dense(10)

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = optax.softmax_cross_entropy_with_integer_labels(self.net(x), y).mean()
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return optax.adam(1e-3)
        ```
    """

    batch_mask = BatchMask()

    def __init__(self) -> None:
        super().__init__()
        self.training: bool = True
        self.automatic_optimization: bool = True
        self.example_input_array: Any = None
        self._trainer: Trainer | None = None
        self._engine: Engine | None = None
        self._current_fx_name: str | None = None
        self._modes: dict[str, Any] | None = None
        self._strict_loading: bool | None = None
        self._host_rng_calls = 0

    # --- attributes ---------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in INTERNAL:
            object.__setattr__(self, name, value)
            return
        carried = self.__dict__.get("_carried")
        if (
            carried
            and name in carried
            and current_trace() is None
            and self._require_engine().write_attribute(self, name, value)
        ):
            return
        if name in self.__dict__.get("_raw_parameters", ()) and current_trace() is None:
            self._set_raw_parameter(name, value)
            return
        stamp_origin(value)
        stash = self.__dict__.get("_nnx_attributes")
        if stash is not None:
            stash.pop(name, None)
        object.__setattr__(self, name, value)
        engine = self.__dict__.get("_engine")
        if engine is not None and current_trace() is None:
            engine.mark_dirty()
            if has_networks(value):
                engine.attach()

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are not set: NNX networks of an attached module live beside `__dict__`.
        stash = self.__dict__.get("_nnx_attributes")
        if stash is not None and name in stash:
            engine = self.__dict__["_engine"]
            return stash[name] if engine is None else engine.nnx_attribute(stash[name])
        if name in self.__dict__.get("_carried", ()):
            return self.__dict__["_engine"].read_attribute(self, name)
        if name in self.__dict__.get("_raw_parameters", ()):
            return self._raw_parameter(name)
        if "_current_fx_name" not in self.__dict__ and name in (
            "training",
            "automatic_optimization",
            "_trainer",
            "_engine",
        ):
            raise RuntimeError(
                f"`{type(self).__name__}.__init__` does not call `super().__init__()`. Make that its first line."
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__.get("_carried", ()) and current_trace() is None:
            self._require_engine().delete_attribute(self, name)
            return
        object.__delattr__(self, name)
        engine = self.__dict__.get("_engine")
        if engine is not None and current_trace() is None:
            engine.mark_dirty()

    def __getstate__(self) -> dict[str, Any]:
        return detached_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`; outside a step with the current variables and in the module's current mode."""
        if current_trace() is None:
            self._require_engine()
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `model(x)` and the default `predict_step` compute.

        Args:
            *args: Whatever the override takes; the default `predict_step` gives the batch.
            **kwargs: Whatever the override takes.

        Returns:
            Whatever the override gives.

        Raises:
            NotImplementedError: Unless overridden.
        """
        raise NotImplementedError(f"`{type(self).__name__}` has no `forward` method, which `model(...)` calls.")

    def init(self, batch: Any) -> Self:
        """Creates the variables of linen networks from an example batch.

        `fit` does this by itself with its first batch; call it to use `model(x)` before. The values are the same.

        Args:
            batch: What `training_step` gets (or, if there is none, the next step that is overridden).

        Returns:
            The module.
        """
        engine = self._require_engine()
        base = ModuleHooks
        for stage, name in (("train", "training_step"), ("validate", "validation_step"), ("test", "test_step")):
            if getattr(type(self), name, None) is not getattr(base, name):
                engine.ensure_created(stage, batch, Scalars(0, 0, 0, 0))
                return self
        engine.ensure_created("predict", batch, Scalars(0, 0, 0, 0))
        return self

    # --- random numbers --------------------------------------------------------------------------------------------

    def next_rng(self) -> jax.Array:
        """A typed JAX key, another one at every call and, inside a step, in every step.

        Inside a step it is a function of the seed, the batch's number and the call, so a resumed run draws the same.
        """
        trace = current_trace()
        if trace is not None:
            return trace.next_key()
        import jax

        self._host_rng_calls += 1
        seed = self._engine.seed if self._engine is not None else global_seed()
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x686F7374), self._host_rng_calls)


LightningModule = JaxLightningModule
"""Lightning's name for the same class."""
