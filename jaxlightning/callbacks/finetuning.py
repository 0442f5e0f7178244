"""Callbacks that freeze a part of a module and let it be trained from some epoch on."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxlightning.callbacks.callback import Callback
from jaxlightning.compile.freezing import Decision, decide, decisions_of, is_frozen, norm_layers, patterns_of
from jaxlightning.compile.owners import owners_of
from jaxlightning.utilities.exceptions import MisconfigurationException
from jaxlightning.utilities.rank_zero import rank_zero_warn

__all__ = ["BackboneFinetuning", "BaseFinetuning", "multiplicative"]

_log = logging.getLogger("jaxlightning")

_modules: list[Any] = []
"""The module that a finetuning callback works on right now; the static methods have no argument for it."""


def multiplicative(epoch: int) -> float:
    """Two: the factor by which BackboneFinetuning raises the backbone's learning rate at every epoch by default."""
    return 2.0


@contextmanager
def _working_on(module: Any) -> Iterator[None]:
    _modules.append(module)
    try:
        yield
    finally:
        _modules.pop()


def _module_of(modules: Any) -> Any:
    """The Lightning module that holds the networks which a user named."""
    if _modules:
        return _modules[-1]
    first = modules
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    engine = getattr(first, "_engine", None)
    if engine is not None:
        return engine.module
    raise RuntimeError(
        "Freezing by a finetuning callback works inside `freeze_before_training` and `finetune_function`, where the "
        "module is known; elsewhere use `module.freeze(...)` and `module.unfreeze(...)`."
    )


def _paths(module: Any, patterns: tuple[str, ...]) -> list[str]:
    """The existing parameters that patterns mean."""
    meant = Decision(patterns=patterns, frozen=True)
    engine = module._require_engine()
    return [path for path in engine.flat_params() or {} if meant.matches(path)]


class BaseFinetuning(Callback):
    """The frame of a finetuning: override `freeze_before_training` and `finetune_function`.

    `freeze_before_training` runs before `configure_optimizers` and freezes what is to wait. `finetune_function` runs at
    the start of every training epoch and unfreezes, usually with `unfreeze_and_add_param_group`: what it adds gets an
    optimizer state of its own, the state of the rest stays as it is. Give the optimizer only what is not frozen:
    `Adam(self.parameters(requires_grad=True))`.

    Where Lightning takes modules, these methods take networks on the module (`pl_module.backbone`), path patterns such
    as `"net/Dense_0"`, selections, or lists of these.
    """

    def __init__(self) -> None:
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        self._restarting = False
        self._saved_freezing: list[dict[str, Any]] | None = None
        self._module: Callable[[], Any] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        """The parameter groups that were added, by paths, and what is frozen."""
        module = self._module()
        decisions = [] if module is None else decisions_of(owners_of(module))
        return {
            "internal_optimizer_metadata": {
                str(index): groups for index, groups in self._internal_optimizer_metadata.items()
            },
            "freezing": [dataclasses.asdict(decision) for decision in decisions],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; it is applied when `fit` starts."""
        self._restarting = True
        saved = state_dict["internal_optimizer_metadata"]
        self._internal_optimizer_metadata = {int(index): groups for index, groups in saved.items()}
        self._saved_freezing = state_dict.get("freezing")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Freeze what is to wait."""
        self._module = weakref.ref(pl_module)
        with _working_on(pl_module):
            self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """After a restart: add the parameter groups again that were added before, and freeze what was frozen.

        Raises:
            MisconfigurationException: If a group was not chosen by paths.
        """
        if not self._restarting:
            return
        self._restarting = False
        if self._saved_freezing is not None:
            pl_module.__dict__["_freezing"] = []
            for saved in self._saved_freezing:
                decide(pl_module, Decision(**{**saved, "patterns": tuple(saved["patterns"])}))
        for index, optimizer in enumerate(trainer.optimizers):
            groups = self._internal_optimizer_metadata.get(index, [])
            for group in groups[len(optimizer.param_groups) :]:
                if group["params"] is None:
                    raise MisconfigurationException(
                        "A parameter group that `finetune_function` added was chosen by a function, which a "
                        "checkpoint cannot hold. Choose it by networks or path patterns."
                    )
                optimizer.add_param_group({key: _untupled(value) for key, value in group.items()})

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Call `finetune_function` for every optimizer, and remember the groups that it adds."""
        for index, optimizer in enumerate(trainer.optimizers):
            with _working_on(pl_module):
                self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            known = self._internal_optimizer_metadata.setdefault(index, [])
            known.extend(_describe(group) for group in optimizer.param_groups[len(known) :])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze here what is due.

        Args:
            pl_module: The module.
            epoch: Index of the epoch that begins, from 0.
            optimizer: One of the optimizers; called for each.

        Raises:
            NotImplementedError: Unless overridden.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must override `finetune_function`.")

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze here what is to wait.

        Raises:
            NotImplementedError: Unless overridden.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must override `freeze_before_training`.")

    # --- what the two methods call

    @staticmethod
    def freeze(modules: Any, train_bn: bool = True) -> None:
        """Freeze networks; they stay in training mode.

        Args:
            modules: What to freeze.
            train_bn: Whether batch normalisation layers are left out, and trained. Otherwise they are frozen as well
                and keep their running statistics, while they go on to normalise with those of the batch.
        """
        module = _module_of(modules)
        patterns = patterns_of(module, modules)
        decide(module, Decision(patterns=patterns, frozen=True, train_norms=train_bn, statistics=False))

    @staticmethod
    def freeze_module(module: Any) -> None:
        """Freeze a network with its batch normalisation layers."""
        BaseFinetuning.freeze(module, train_bn=False)

    @staticmethod
    def make_trainable(modules: Any) -> None:
        """Unfreeze networks."""
        module = _module_of(modules)
        decide(module, Decision(patterns=patterns_of(module, modules), frozen=False))

    @staticmethod
    def filter_params(modules: Any, train_bn: bool = True, requires_grad: bool = True) -> Iterator[str]:
        """Paths of the parameters of networks.

        Args:
            modules: The networks; their parameters must exist.
            train_bn: Whether those of batch normalisation layers are given.
            requires_grad: Whether the trainable ones are given, or the frozen ones.

        Yields:
            Paths such as `"backbone/Dense_0/kernel"`.
        """
        module = _module_of(modules)
        layers = norm_layers(module._require_engine().variables_live)
        decisions = decisions_of(owners_of(module))
        for path in _paths(module, patterns_of(module, modules)):
            if not train_bn and path.rpartition("/")[0] in layers:
                continue
            if is_frozen(decisions, path, layers) is not requires_grad:
                yield path

    @staticmethod
    def filter_on_optimizer(optimizer: Any, params: Any) -> list[str]:
        """The paths that no group of the optimizer has yet; warns about the others.

        Args:
            optimizer: The optimizer.
            params: Paths of parameters.

        Returns:
            Those that are new to it.
        """
        paths = list(params)
        fresh = [path for path in paths if optimizer.owns is not None and not optimizer.owns.matches(path)]
        if len(fresh) < len(paths):
            rank_zero_warn(
                "The provided params to be frozen already exist within another group of this optimizer. Those "
                "parameters will be skipped.\nHINT: give the optimizer only what is not frozen: "
                f"{optimizer.name}(self.parameters(requires_grad=True), ...)."
            )
        return fresh

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Any,
        optimizer: Any,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze networks and give their parameters to an optimizer as a new group.

        Args:
            modules: What to unfreeze.
            optimizer: The optimizer, one of `jaxlightning.optim`.
            lr: Learning rate of the new group.
            initial_denom_lr: Without `lr`: that of the first group is divided by this.
            train_bn: Whether batch normalisation layers are part of the group.

        Raises:
            MisconfigurationException: If the optimizer is an optax transformation, whose groups are fixed.
        """
        BaseFinetuning.make_trainable(modules)
        first = optimizer.param_groups[0]["lr"]
        rate = first / initial_denom_lr if lr is None else float(lr)
        params = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        fresh = BaseFinetuning.filter_on_optimizer(optimizer, params)
        if not fresh:
            return
        if not hasattr(optimizer, "add_param_group"):
            raise MisconfigurationException(
                f"{optimizer.name} is an optax transformation, to which no parameter group can be added. Use an "
                "optimizer of `jaxlightning.optim`, or give it all parameters: frozen ones are left alone."
            )
        optimizer.add_param_group({"params": fresh, "lr": rate})


class BackboneFinetuning(BaseFinetuning):
    """Trains `self.backbone` from an epoch on, with a learning rate of its own that grows.

    Args:
        unfreeze_backbone_at_epoch: The epoch.
        lambda_func: Factor of the backbone's learning rate at every later epoch; gets the number of the next one.
        backbone_initial_ratio_lr: The backbone's first learning rate, as a share of that of the rest.
        backbone_initial_lr: The backbone's first learning rate, in place of a share.
        should_align: Whether it stops growing when it reaches that of the rest, and follows it.
        initial_denom_lr: As in `unfreeze_and_add_param_group`.
        train_bn: Whether batch normalisation layers are unfrozen with the backbone.
        verbose: Whether both learning rates are reported at INFO.
        rounding: Digits of them.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, and the backbone's last learning rate."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict(state_dict)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the module.

        Raises:
            MisconfigurationException: If it has no network called `backbone`.
        """
        _check_backbone(pl_module)
        super().on_fit_start(trainer, pl_module)

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze the backbone but for its batch normalisation layers."""
        _check_backbone(pl_module)
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze the backbone when it is due; raise its learning rate afterwards."""
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        current = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            first = self.backbone_initial_lr
            rate = current * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(
                pl_module.backbone, optimizer, rate, train_bn=self.train_bn, initial_denom_lr=self.initial_denom_lr
            )
        else:
            rate = self.lambda_func(epoch + 1) * (self.previous_backbone_lr or 0.0)
            if self.should_align and rate > current:
                rate = current
            optimizer.param_groups[-1]["lr"] = rate
        self.previous_backbone_lr = rate
        if self.verbose:
            _log.info(
                "Current lr: %s, Backbone lr: %s", round(float(current), self.rounding), round(rate, self.rounding)
            )


def _check_backbone(module: Any) -> None:
    from jaxlightning.compile.networks import is_network

    if not is_network(getattr(module, "backbone", None)):
        raise MisconfigurationException("The LightningModule should have a nn.Module `backbone` attribute")


def _describe(group: Any) -> dict[str, Any]:
    patterns = getattr(group["params"], "patterns", None)
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
    return {**values, "params": None if patterns is None else list(patterns)}


def _untupled(value: Any) -> Any:
    numbers = isinstance(value, list) and all(isinstance(item, float) for item in value)
    return tuple(value) if numbers else value
