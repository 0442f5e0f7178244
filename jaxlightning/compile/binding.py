"""A module, its networks and its optimizers as the pure step functions need them."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxlightning.compile.effects import INTERNAL
from jaxlightning.compile.foreign_networks import ForeignNetwork, adapt, is_foreign
from jaxlightning.compile.freezing import decisions_of, initial_mode
from jaxlightning.compile.networks import LinenNetwork, is_linen, is_nnx, is_nnx_variable, rebuild, walk
from jaxlightning.compile.nnx_networks import NnxGroup
from jaxlightning.compile.owners import owners_of
from jaxlightning.compile.precision import Precision, cast_floats
from jaxlightning.compile.trace import Trace
from jaxlightning.optim import remember_network

if TYPE_CHECKING:
    from jaxlightning.compile.engine import Engine
    from jaxlightning.optim import OptimizerHandle

__all__ = ["Binding"]


class _InOrder:
    """Gives each network that `rebuild` meets the next of the paths that `walk` found in the same order."""

    def __init__(self, paths: list[str], wrap: Callable[[Any, str], Any]) -> None:
        self._paths = iter(paths)
        self._wrap = wrap

    def __call__(self, network: Any) -> Any:
        return self._wrap(network, next(self._paths))


def _refuse_equal_paths(found: list[tuple[str, Any]]) -> None:
    """Two networks of one path would share their variables without a word."""
    seen: dict[str, Any] = {}
    for path, network in found:
        if seen.setdefault(path, network) is not network:
            raise ValueError(
                f"Two networks have the same path `self.{path}`: the keys of a dictionary are joined with dots and "
                "written as text, so that 0 and '0' are one key, and 'a.b' is 'b' below 'a'. Rename one of the keys."
            )


class Binding:
    """Finds and wraps the networks of a module and binds them to the variables of a trace.

    Args:
        module: The user's module.
        engine: Its engine; linen wrappers ask it for current variables outside a step.
        jit: Whether steps are compiled.
    """

    def __init__(self, module: Any, engine: Engine, *, jit: bool) -> None:
        self.module = module
        self.engine = engine
        self.jit = jit
        self.owners: dict[str, Any] = {"": module}
        self.linen: dict[str, LinenNetwork] = {}
        self.nnx: NnxGroup | None = None
        self.nnx_training: dict[str, bool] = {}
        self.optimizers: list[OptimizerHandle] = []
        self.precision = Precision()
        self.on_nonfinite: str | None = None
        self.raw: dict[str, tuple[Any, str]] = {}
        self._wrappers: dict[int, LinenNetwork] = {}

    @property
    def skips_updates(self) -> bool:
        """Whether the compiled step may leave an update out."""
        return self.precision.scaler is not None or self.on_nonfinite in ("skip", "raise")

    def attach(self) -> None:
        """Wraps every network found in the module's attributes; safe to call again after new ones were assigned."""
        nnx_modules: dict[str, Any] = {}
        self.owners = owners_of(self.module)
        for prefix, owner in self.owners.items():
            self._attach_owner(owner, prefix, nnx_modules)
            for name in owner.__dict__.get("_raw_parameters", ()):
                self.raw[prefix + name] = (owner, name)
        if nnx_modules and (self.nnx is None or list(self.nnx.modules) != list(nnx_modules)):
            self.nnx = NnxGroup(nnx_modules)
            for name in nnx_modules:
                self.nnx_training.setdefault(name, self._first_mode(name))

    def _first_mode(self, path: str) -> bool:
        training = bool(self.module.__dict__.get("training", True))
        return initial_mode(decisions_of(self.owners), path, training)

    @property
    def freezing_key(self) -> tuple[Any, ...]:
        """What the decisions of `freeze` and `unfreeze` are, as a hashable value."""
        return decisions_of(self.owners)

    def _attach_owner(self, owner: Any, prefix: str, nnx_modules: dict[str, Any]) -> None:
        """Wraps the networks of the module or of one of its child modules."""
        instance = owner.__dict__
        instance["_engine"] = self.engine
        stash: dict[str, Any] = instance.setdefault("_nnx_attributes", {})
        for name in list(instance):
            if name in INTERNAL or name.startswith(("__", "_hparams")):
                continue
            found = walk(instance[name], prefix + name)
            if not found:
                continue
            _refuse_equal_paths(found)
            instance[name] = rebuild(instance[name], _InOrder([path for path, _ in found], self._wrap))
            if any(is_nnx(network) for _, network in found):
                # Served by `__getattr__`, which can then refresh the user's objects lazily.
                stash[name] = instance.pop(name)
        for name, value in stash.items():
            found_here = {path: network for path, network in walk(value, prefix + name) if is_nnx(network)}
            nnx_modules.update(found_here)
            for path, network in found_here.items():
                if not is_nnx_variable(network):  # those cannot be referenced weakly; they are chosen by path
                    remember_network(network, path)

    def _wrap(self, network: Any, path: str) -> Any:
        if isinstance(network, LinenNetwork):
            if self.linen.get(network._path) is not network:
                network._path, network._engine = path, self.engine
                self.linen[path] = network
                if network._copy_of is not None:
                    self.engine.copy_variables(network._copy_of, path)
            return network
        foreign = is_foreign(network)
        if not is_linen(network) and not foreign:
            return network
        known = self._wrappers.get(id(network))
        if known is not None:
            return known  # the same object under two names: one network, tied
        origin = None if foreign else network.__dict__.get("_jaxlightning_origin")
        init_path = next(
            (
                w._init_path
                for w in self.linen.values()
                if origin and w._module.__dict__.get("_jaxlightning_origin") == origin
            ),
            path,
        )
        wrapper = (
            ForeignNetwork(adapt(network), path, self.engine, init_path)
            if foreign
            else LinenNetwork(network, path, self.engine, init_path)
        )
        wrapper.training = self._first_mode(path)
        self._wrappers[id(network)] = wrapper
        self.linen[path] = wrapper
        return wrapper

    def copy_network(self, network: LinenNetwork, memo: dict[int, Any]) -> LinenNetwork:
        """What `copy.deepcopy` of a wrapped network gives: an unplaced one that starts equal to its source."""
        module = copy.deepcopy(network._module, memo)
        duplicate = type(network)(module, network._path, network._engine, network._init_path)
        duplicate.training = network.training
        duplicate._copy_of = network._path
        return duplicate

    @property
    def names(self) -> list[str]:
        """Paths of all networks."""
        return [*self.linen, *(self.nnx.modules if self.nnx is not None else ()), *self.raw]

    def missing(self, params: dict[str, Any]) -> list[str]:
        """Linen networks without variables."""
        return [path for path in self.linen if path not in params]

    def mode_key(self) -> tuple[Any, ...]:
        """What the training/evaluation modes of the module and its networks are, as a hashable value."""
        return (
            tuple(owner.__dict__.get("training", True) for owner in self.owners.values()),
            tuple(network.training for network in self.linen.values()),
            tuple(self.nnx_training.values()),
        )

    def set_mode(self, training: bool) -> None:
        """Puts every network and child module in training or evaluation mode."""
        for prefix, owner in self.owners.items():
            if prefix:
                owner.training = training
        for network in self.linen.values():
            network.training = training
        for name in self.nnx_training:
            self.nnx_training[name] = training

    def set_network_modes(self, patterns: tuple[str, ...], training: bool) -> None:
        """Sets the mode of the networks that are meant as a whole by path patterns."""
        for path in self.names:
            if any(pattern == path or fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                if path in self.linen:
                    self.linen[path].training = training
                else:
                    self.nnx_training[path] = training

    def modes(self) -> dict[str, bool]:
        """The mode of each network."""
        children = {prefix: owner.training for prefix, owner in self.owners.items() if prefix}
        return {**{path: network.training for path, network in self.linen.items()}, **self.nnx_training, **children}

    def restore_modes(self, modes: dict[str, bool]) -> None:
        """Sets modes read by `modes`; networks that came later keep theirs."""
        for path, training in modes.items():
            if path in self.linen:
                self.linen[path].training = training
            elif path in self.nnx_training:
                self.nnx_training[path] = training
            elif path in self.owners:
                self.owners[path].training = training

    @contextmanager
    def bound(self, trace: Trace) -> Iterator[None]:
        """Lets the module's NNX attributes be modules bound to the trace's variables, and parameters be there."""
        with self._raw_standing(trace):
            if self.nnx is None:
                yield
            else:
                with self._nnx_bound(trace, self.nnx):
                    yield

    @contextmanager
    def _raw_standing(self, trace: Trace) -> Iterator[None]:
        self.place_raw(trace)
        try:
            yield
            self.take_raw(trace)
        finally:
            for path in trace.raw:
                owner, name = self.raw[path]
                owner.__dict__.pop(name, None)

    def place_raw(self, trace: Trace) -> None:
        """Lets the module's own parameters be those of a trace; anew after an optimizer stepped in it."""
        placed = {path: trace.params[path] for path in self.raw if path in trace.params}
        if self.precision.casts and not trace.creating:
            placed = self.precision.convert_compute(placed)
        trace.raw = placed
        for path, value in placed.items():
            owner, name = self.raw[path]
            owner.__dict__[name] = value

    def take_raw(self, trace: Trace) -> None:
        """Takes over own parameters of the module that the step assigned."""
        standing = {path: owner.__dict__.get(name) for path, (owner, name) in self.raw.items() if path in trace.raw}
        changed = {path: now for path, now in standing.items() if now is not trace.raw[path]}
        trace.raw.update(changed)
        for path, now in changed.items():
            trace.write_params(path, cast_floats(now, trace.params[path].dtype))

    @contextmanager
    def _nnx_bound(self, trace: Trace, nnx: NnxGroup) -> Iterator[None]:
        in_evaluation = frozenset(name for name, training in self.nnx_training.items() if not training)
        merged = nnx.bind(trace, in_evaluation, self.precision)
        by_id = {id(original): merged[path] for path, original in nnx.modules.items()}
        for owner in self.owners.values():
            for name, value in owner.__dict__["_nnx_attributes"].items():
                owner.__dict__[name] = rebuild(value, lambda network: by_id.get(id(network), network))
        try:
            yield
            nnx.collect(trace)
        finally:
            for owner in self.owners.values():
                for name in owner.__dict__["_nnx_attributes"]:
                    owner.__dict__.pop(name, None)

    def owned_by(self, handle: OptimizerHandle) -> Callable[[str], bool] | None:
        """Which parameter paths an optimizer owns; None means all."""
        return None if handle.owns is None else handle.owns.matches

    @property
    def owned(self) -> Callable[[str], bool] | None:
        """Which parameter paths any optimizer owns; None means all."""
        owners = [self.owned_by(handle) for handle in self.optimizers]
        if any(owner is None for owner in owners):
            return None
        return lambda path: any(owner(path) for owner in owners if owner is not None)
