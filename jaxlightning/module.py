"""`JaxLightningModule`: the words a user overrides or calls.

The hooks with their defaults are in `hooks`; this file holds what a module can be asked and told. How its steps become
compiled functions is `compile`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxlightning.compile.batch_mask import BatchMask
from jaxlightning.compile.effects import INTERNAL, has_networks
from jaxlightning.compile.freezing import Decision, decide, patterns_of
from jaxlightning.compile.host_trainer import NoTrainer
from jaxlightning.compile.networks import stamp_origin
from jaxlightning.compile.paths import flatten, merge
from jaxlightning.compile.selection import ParameterSelection, TrainableSelection
from jaxlightning.compile.trace import Scalars, current_trace
from jaxlightning.compile.user_code import asked_by_us
from jaxlightning.hooks import ModuleHooks
from jaxlightning.module_arrays import ModuleArrays
from jaxlightning.module_logging import ModuleLogging
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.hparams import HyperparametersMixin
from jaxlightning.utilities.model_helpers import restricted_classmethod

if TYPE_CHECKING:
    from typing import Self

    import jax

    from jaxlightning.compile.engine import Engine
    from jaxlightning.trainer import Trainer

__all__ = ["JaxLightningModule", "LightningModule"]


class JaxLightningModule(ModuleArrays, ModuleLogging, ModuleHooks, HyperparametersMixin):
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

    def _raw_parameter(self, name: str) -> Any:
        engine = self.__dict__.get("_engine")
        if engine is None:
            init = self.__dict__["_raw_parameters"][name]
            if callable(init):
                raise RuntimeError(
                    f"The parameter `{name}` has no value yet: its key follows from the seed of the run. Call "
                    "`module.init(batch)`, or start `fit`."
                )
            return init
        return engine.params_of(engine.path_of(self, name))

    def _set_raw_parameter(self, name: str, value: Any) -> None:
        engine = self.__dict__.get("_engine")
        if engine is None:
            self.__dict__["_raw_parameters"][name] = value
        else:
            engine.params = {**engine.params, engine.path_of(self, name): value}

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__.get("_carried", ()) and current_trace() is None:
            self._require_engine().delete_attribute(self, name)
            return
        object.__delattr__(self, name)
        engine = self.__dict__.get("_engine")
        if engine is not None and current_trace() is None:
            engine.mark_dirty()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_trainer"] = None
        return state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`; outside a step with the current variables and in the module's current mode."""
        if current_trace() is None:
            self._require_engine()
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `model(x)` and the default `predict_step` compute.

        Raises:
            NotImplementedError: Unless overridden.
        """
        raise NotImplementedError(f"`{type(self).__name__}` has no `forward` method, which `model(...)` calls.")

    def _require_engine(self) -> Engine:
        if self._engine is None:
            from jaxlightning.compile.engine import Engine

            Engine(self, seed=_seed()).attach()
        engine = self._engine
        if engine is None:
            raise RuntimeError("The engine did not attach.")
        return engine

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

    # --- where the module is ------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer.

        Raises:
            RuntimeError: If the module is not attached to one.
        """
        trace = current_trace()
        if self._trainer is None:
            if trace is not None and trace.creating:
                return NoTrainer(type(self).__name__)  # type: ignore[return-value]
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")
        if trace is not None and trace.view is not None and not asked_by_us():
            view: Trainer = trace.view
            return view
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        for value in self.__dict__.values():
            if isinstance(value, JaxLightningModule) and value is not self:
                value.trainer = trainer

    @property
    def current_epoch(self) -> Any:
        """Index of the epoch, from 0; inside a step a 0-d integer that follows it."""
        trace = current_trace()
        if trace is not None:
            return trace.scalars.current_epoch
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> Any:
        """Optimizer steps so far; inside a step a 0-d integer that follows it."""
        trace = current_trace()
        if trace is not None:
            return trace.scalars.global_step
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Index of this process among all."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return 0 if self._trainer is None else self._trainer.local_rank

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Arrays of every process, stacked along a new first axis.

        A compiled step, and any run with one process, sees whole arrays already, whatever the number of devices: there
        the data come back as they are.

        Args:
            data: A pytree of arrays.
            group: Must be None: all processes take part.
            sync_grads: Accepted for Lightning's sake; inside a step gradients flow through whole arrays.

        Returns:
            The pytree; with several processes each leaf has shape (processes, ...).

        Raises:
            ValueError: For a group.
        """
        if group is not None:
            raise ValueError(f"`all_gather(group={group!r})`: groups of processes do not exist here; leave it out.")
        import jax

        if current_trace() is not None or jax.process_count() == 1:
            return data
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(data)

    @property
    def on_gpu(self) -> bool:
        """Whether the variables are on a GPU."""
        return self._engine is not None and self._engine.strategy.root_device.platform == "gpu"

    @property
    def device(self) -> Any:
        """The (first) JAX device of the run, None before one started."""
        return None if self._engine is None else self._engine.strategy.root_device

    @property
    def logger(self) -> Any:
        """The trainer's first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The trainer's loggers."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def fabric(self) -> None:
        """Always None: there is no Fabric here."""
        return None

    # --- modes --------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Puts the module and its networks in training mode (or evaluation mode with `mode=False`)."""
        self.training = mode
        if self._engine is not None:
            self._engine.binding.set_mode(mode)
            self._engine.modes_changed()
        return self

    def eval(self) -> Self:
        """Puts the module and its networks in evaluation mode."""
        return self.train(False)

    def freeze(self, *networks: Any) -> None:
        """Freezes all parameters and goes into evaluation mode.

        A frozen parameter is not differentiated; an optimizer changes neither it nor its part of the state.

        Args:
            *networks: Freeze only these: networks such as `self.encoder` (the way for NNX, whose objects have no
                `freeze` of their own), path patterns such as `"encoder/Dense_0"`, or selections.
        """
        self._freeze(networks, True)

    def unfreeze(self, *networks: Any) -> None:
        """Lets all parameters (or those of `networks`, see `freeze`) be trained again, in training mode."""
        self._freeze(networks, False)

    def _freeze(self, networks: tuple[Any, ...], frozen: bool) -> None:
        patterns = patterns_of(self, networks) if networks else ("*",)
        decide(self, Decision(patterns=patterns, frozen=frozen, mode=not frozen))
        if not networks:
            self.train(not frozen)
        elif self._engine is not None:
            self._engine.binding.set_network_modes(patterns, not frozen)
            self._engine.modes_changed()

    # --- optimizers -----------------------------------------------------------------------------------------------

    def parameters(self, *, requires_grad: bool | None = None) -> ParameterSelection | TrainableSelection:
        """A lazy selection of parameters, for an optimizer in `configure_optimizers`.

        Args:
            requires_grad: True for those only that are not frozen now: what
                `filter(lambda p: p.requires_grad, self.parameters())` is in torch. False for the frozen ones.

        Returns:
            The selection.
        """
        selection = ParameterSelection(("*",), lambda: None if self._engine is None else self._engine.flat_params())
        return selection if requires_grad is None else TrainableSelection(self, selection, requires_grad)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer of the run, or the list of them.

        Args:
            use_pl_optimizer: False gives the wrapped objects.
        """
        found = self.trainer.optimizers if self._trainer is not None else self._provisional().optimizers
        handles = [h if use_pl_optimizer else h.optimizer for h in found]
        return handles[0] if len(handles) == 1 else handles

    def _provisional(self) -> Any:
        """Optimizers and schedulers for `init(batch)` before there is a trainer; nothing steps then.

        Raises:
            RuntimeError: Outside of `init`.
        """
        trace = current_trace()
        if self._engine is None or trace is None or not trace.creating:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")
        return self._engine.manual.provisional()

    def lr_schedulers(self) -> Any:
        """The scheduler of the run, the list of them, or None."""
        configs = self.trainer.lr_scheduler_configs if self._trainer is not None else self._provisional().schedulers
        schedulers = [config.scheduler for config in configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Any, *args: Any, gradient: Any = None, **kwargs: Any) -> None:
        """Adds the gradients of `loss` to those of the parameters, in manual optimization.

        Args:
            loss: A scalar array of this step.
            *args: `gradient`, as torch's `backward` takes it.
            gradient: The cotangent of a loss that is no scalar.
            **kwargs: torch's `retain_graph` and `create_graph` are accepted: what was computed can always be
                differentiated again here.

        Raises:
            MisconfigurationException: In automatic optimization, or outside of `training_step`.
            TypeError: For other arguments.
        """
        if self.automatic_optimization:
            raise MisconfigurationException(
                "to use manual_backward, please disable automatic optimization: set model property "
                "`automatic_optimization` as False"
            )
        unknown = set(kwargs) - {"retain_graph", "create_graph"}
        if unknown or len(args) > 3:
            raise TypeError(f"`manual_backward` got unexpected arguments: {sorted(unknown) or args}.")
        if args and gradient is None:
            gradient = args[0]
        self._require_engine().manual.backward(loss, gradient)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Until `untoggle_optimizer`, only the parameters of this optimizer have gradients.

        Args:
            optimizer: One of `self.optimizers()`.
        """
        self._require_engine().manual.toggle(optimizer, True)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Ends what `toggle_optimizer` began.

        Args:
            optimizer: The same optimizer.
        """
        self._require_engine().manual.toggle(optimizer, False)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """`toggle_optimizer` for the length of a `with` block.

        Args:
            optimizer: One of `self.optimizers()`.
        """
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the gradients between backward and update; called in `configure_gradient_clipping`.

        Args:
            optimizer: The optimizer of the hook.
            gradient_clip_val: The largest norm or absolute value; None takes the trainer's.
            gradient_clip_algorithm: `"norm"` or `"value"`; None takes the trainer's.

        Raises:
            MisconfigurationException: If the values contradict those of the trainer.
        """
        trace = current_trace()
        if trace is not None and trace.creating:
            return  # there may be no trainer yet, and there are no gradients
        trainer = self.trainer
        val, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if gradient_clip_val is None:
            gradient_clip_val = val or 0.0
        elif val is not None and val != gradient_clip_val:
            raise MisconfigurationException(
                f"You have set `Trainer(gradient_clip_val={val!r})` and have passed "
                f"`clip_gradients(gradient_clip_val={gradient_clip_val!r})`. Please use only one of them."
            )
        if gradient_clip_algorithm is None:
            gradient_clip_algorithm = algorithm or "norm"
        else:
            gradient_clip_algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)).lower()
            if algorithm is not None and algorithm != gradient_clip_algorithm:
                raise MisconfigurationException(
                    f"You have set `Trainer(gradient_clip_algorithm={algorithm!r})` and have passed "
                    f"`clip_gradients(gradient_clip_algorithm={gradient_clip_algorithm!r})`. Please use only one of "
                    "them."
                )
        if not isinstance(gradient_clip_val, int | float):
            raise TypeError(f"`gradient_clip_val` should be an int or a float. Got {gradient_clip_val!r}.")
        if gradient_clip_algorithm not in ("norm", "value"):
            raise MisconfigurationException(
                f"`gradient_clip_algorithm` {gradient_clip_algorithm} is invalid. Allowed algorithms: ['value', "
                "'norm']."
            )
        if gradient_clip_val and gradient_clip_val > 0:
            engine = self._require_engine()
            if self.automatic_optimization:
                engine.clip_gradients(float(gradient_clip_val), gradient_clip_algorithm)
            else:
                engine.manual.clip(optimizer, float(gradient_clip_val), gradient_clip_algorithm)

    # --- random numbers and values ----------------------------------------------------------------------------------

    def next_rng(self) -> jax.Array:
        """A typed JAX key, another one at every call and, inside a step, in every step.

        Inside a step it is a function of the seed, the batch's number and the call, so a resumed run draws the same.
        """
        trace = current_trace()
        if trace is not None:
            return trace.next_key()
        import jax

        self._host_rng_calls += 1
        seed = self._engine.seed if self._engine is not None else _seed()
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x686F7374), self._host_rng_calls)

    def state_dict(self) -> dict[str, Any]:
        """All parameters and other variables as copies, flat by dotted path (`"net.Dense_0.kernel"`)."""
        if self._engine is None:
            return {}
        flat = flatten(self._engine.params, separator=".")
        for network, collections in self._engine.variables.items():
            for collection, tree in collections.items():
                prefix = network if collection == "nnx" else f"{network}.{collection}"
                flat.update({f"{prefix}.{path}": leaf for path, leaf in flatten(tree, separator=".").items()})
        flat.update(self._engine.buffer_values())
        return flat

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Sets parameters and variables from what `state_dict` gave.

        Args:
            state_dict: Arrays by dotted path.
            strict: Whether missing and unexpected paths are errors.

        Raises:
            RuntimeError: If the variables do not exist yet, or paths or shapes do not fit.
        """
        engine = self._require_engine()
        current = self.state_dict()
        if not current:
            raise RuntimeError(
                f"`{type(self).__name__}` has no variables yet, so paths cannot be matched. Call `init(batch)` first."
            )
        missing = [path for path in current if path not in state_dict]
        unexpected = [path for path in state_dict if path not in current]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"The state dict does not fit {type(self).__name__}: missing {missing[:20]}, unexpected "
                f"{unexpected[:20]}. "
                "Pass `strict=False` to set what fits."
            )
        params, variables = flatten(engine.params, separator="."), {}
        new_params = {path: state_dict[path] for path in params if path in state_dict}
        for network, collections in engine.variables.items():
            for collection, tree in collections.items():
                prefix = network if collection == "nnx" else f"{network}.{collection}"
                for path in flatten(tree, separator="."):
                    if f"{prefix}.{path}" in state_dict:
                        variables[f"{network}.{collection}.{path}"] = state_dict[f"{prefix}.{path}"]
        # Network names may hold dots (`blocks.0`), so leaves are put in place by walking the present trees.
        engine.params = merge(engine.params, _place(engine.params, new_params))
        engine.variables = merge(engine.variables, _place(engine.variables, variables))
        engine.set_buffers({name: state_dict[name] for name in engine.buffer_values() if name in state_dict})

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "stablehlo",
        inputs: Any = None,
        batch: int | None = None,
    ) -> Any:
        """Writes `forward` with its weights for another runtime, or the weights alone.

        Args:
            path: The file, or the directory of a SavedModel.
            format: `"stablehlo"`, `"saved_model"`, `"tflite"`, `"onnx"` or `"safetensors"`.
            inputs: Example inputs of `forward`; by default `example_input_array`.
            batch: A fixed batch size; any size by default.

        Returns:
            The path.
        """
        from jaxlightning.export import export_module

        return export_module(self, path, format=format, inputs=inputs, batch=batch)

    @property
    def strict_loading(self) -> bool:
        """Whether checkpoints must fit exactly."""
        return True if self._strict_loading is None else self._strict_loading

    @strict_loading.setter
    def strict_loading(self, strict: bool) -> None:
        self._strict_loading = strict

    @restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Rebuilds a module from its saved hyper-parameters and weights; needs no example input.

        Args:
            checkpoint_path: A checkpoint directory.
            map_location: Must be None: arrays go to the default device.
            hparams_file: A YAML or CSV file with hyper-parameters, in place of the saved ones.
            strict: Whether paths must fit exactly.
            **kwargs: Arguments of `__init__` that override the saved ones.

        Returns:
            The module, with its variables.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
            RuntimeError: If the weights do not fit.
        """
        from jaxlightning.checkpoint import load_module_from_checkpoint

        if map_location is not None:
            raise NotImplementedError("`map_location` has no meaning here: arrays are restored on the default device.")
        return load_module_from_checkpoint(cls, checkpoint_path, hparams_file=hparams_file, strict=strict, **kwargs)


LightningModule = JaxLightningModule
"""Lightning's name for the same class."""


def _seed() -> int:
    try:
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))
    except ValueError:
        return 0


def _place(tree: Mapping[str, Any], flat: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            out[key] = _place(value, flat, path)
        elif path in flat:
            out[key] = flat[path]
    return out
