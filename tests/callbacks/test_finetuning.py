"""Freezing by hand and by the finetuning callbacks: what stays, what moves, and which optimizer states are touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlightning as pl
from jaxlightning import optim
from jaxlightning.callbacks import BackboneFinetuning, BaseFinetuning
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
Y = RNG.normal(size=(24, 2)).astype(np.float32)


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(4)(x))


class NnxBackbone(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.dense(x))


class Tuned(pl.LightningModule):
    def __init__(self, backbone: Any = None, head: Any = None, optimizer: Any = None) -> None:
        super().__init__()
        self.backbone = Backbone() if backbone is None else backbone
        self.head = nn.Dense(2) if head is None else head
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((self.head(self.backbone(x)) - y) ** 2)

    def configure_optimizers(self) -> Any:
        return optim.Adam(self.parameters(), lr=0.1) if self.optimizer is None else self.optimizer(self)


class History(pl.Callback):
    """What the weights and the optimizer state are after each epoch."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Any]] = []
        self.states: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights.append(dict(pl_module.state_dict()))
        self.states.append(jax.device_get(trainer.state.opt_state))


def data() -> Any:
    return pl.ArrayLoader(X, Y, batch_size=8)


def fit(module: Any, epochs: int, *callbacks: Any, **options: Any) -> tuple[Any, History]:
    history = History()
    resume = options.pop("ckpt_path", None)
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[*callbacks, history], **{**QUIET, **options})
    trainer.fit(module, data(), ckpt_path=resume)
    return trainer, history


def adam(state: Any) -> Any:
    """The state of Adam inside an optimizer state (of one group)."""
    found = [node for node in jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "mu")) if hasattr(node, "mu")]
    assert len(found) == 1
    return found[0]


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if not np.array_equal(before[name], after[name])}


@pytest.mark.catalogue("OP17", adaptation="frozen parameters are not differentiated and masked in the update")
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_frozen_network_does_not_move_and_the_rest_keeps_its_state(kind: str) -> None:
    class Thaws(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.freeze(pl_module.backbone)
            if trainer.current_epoch == 2:
                pl_module.unfreeze(pl_module.backbone)

    module = Tuned(Backbone() if kind == "linen" else NnxBackbone(nnx.Rngs(0)))
    trainer, history = fit(module, 3, Thaws())
    first, second, third = history.weights
    assert moved(first, second) == {"head.kernel", "head.bias"}
    assert all(name.startswith("head") or name in moved(second, third) for name in first)
    for state, later in ((history.states[0], history.states[1]),):
        first_adam, after = adam(state), adam(later)
        same = jax.tree.map(np.array_equal, first_adam.mu["backbone"], after.mu["backbone"])
        assert jax.tree.all(same)
        assert not np.array_equal(first_adam.mu["head"]["kernel"], after.mu["head"]["kernel"])
        assert int(after.count) == 6
    assert trainer._engine.trace_counts["train"] <= 3  # as it began, frozen, and perhaps once more


def test_the_whole_module_freezes_and_thaws() -> None:
    module = Tuned()
    module.init((X[:8], Y[:8]))
    before = dict(module.state_dict())
    module.freeze()
    assert not module.training
    fit(module, 1)
    assert moved(before, dict(module.state_dict())) == set()
    module.unfreeze()
    assert module.training
    fit(module, 1)
    assert "backbone.Dense_0.kernel" in moved(before, dict(module.state_dict()))


def test_a_wrapped_linen_network_has_freeze_and_unfreeze() -> None:
    module = Tuned()
    module.init((X[:8], Y[:8]))
    before = dict(module.state_dict())
    module.backbone.freeze()
    assert not module.backbone.training
    fit(module, 1)
    assert moved(before, dict(module.state_dict())) == {"head.kernel", "head.bias"}
    module.backbone.unfreeze()
    assert module.backbone.training


def test_networks_can_be_frozen_before_anything_exists() -> None:
    class Early(Tuned):
        def __init__(self) -> None:
            super().__init__()
            self.freeze(self.backbone)

    module = Early()
    _, history = fit(module, 2)
    assert moved(*history.weights) == {"head.kernel", "head.bias"}
    assert not module.backbone.training


def test_frozen_parameters_are_not_differentiated() -> None:
    def flops(module: Any) -> float:
        trainer, _ = fit(module, 1)
        return float(trainer._engine.compiled["train"].cost_analysis()["flops"])

    frozen = Tuned(nn.Dense(64))
    frozen.freeze("backbone")
    assert flops(frozen) < 0.9 * flops(Tuned(nn.Dense(64)))


def test_what_is_no_network_of_the_module_is_refused() -> None:
    with pytest.raises(TypeError, match="Dense is no network that Tuned holds"):
        Tuned().freeze(nn.Dense(1))


def test_a_group_that_is_frozen_as_a_whole_keeps_its_step_count() -> None:
    def configure(module: Any) -> Any:
        return optim.Adam([{"params": "backbone"}, {"params": "head"}], lr=0.1)

    module = Tuned(optimizer=configure)
    module.freeze("backbone")
    _, history = fit(module, 1)
    counts = [int(adam(part).count) for part in history.states[0]]
    assert counts == [0, 3]


@pytest.mark.parametrize("train_bn", [True, False])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_batch_norm_of_a_frozen_backbone(kind: str, train_bn: bool) -> None:
    """Lightning leaves the layer alone with `train_bn`; without, weights and running statistics stand still."""

    class Freezes(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone, train_bn=train_bn)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            pass

    module = Tuned(Backbone() if kind == "linen" else NnxBackbone(nnx.Rngs(0)))
    _, history = fit(module, 2, Freezes())
    norm = {name for name in history.weights[0] if "norm" in name.lower()}
    assert len(norm) == 4
    assert moved(*history.weights) == {"head.kernel", "head.bias"} | (norm if train_bn else set())


class Later(BaseFinetuning):
    def __init__(self, epoch: int = 1, **options: Any) -> None:
        super().__init__()
        self.epoch, self.options = epoch, options

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, **self.options)


def filtered(module: Any) -> Any:
    return optim.Adam(module.parameters(requires_grad=True), lr=0.1)


@pytest.mark.catalogue("CB09", adaptation="modules are networks or path patterns")
def test_unfreezing_adds_a_group_with_a_state_of_its_own() -> None:
    trainer, history = fit(Tuned(optimizer=filtered), 2, Later())
    (optimizer,) = trainer.optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, pytest.approx(0.01)]
    assert "backbone" not in adam(history.states[0]).mu
    head, backbone = history.states[1]
    assert [int(adam(head).count), int(adam(backbone).count)] == [6, 3]
    assert {"backbone.Dense_0.kernel", "backbone.batch_stats.BatchNorm_0.mean"} <= moved(*history.weights)


def test_batch_norm_can_be_left_out_of_the_new_group() -> None:
    _, history = fit(Tuned(optimizer=filtered), 2, Later(train_bn=False, lr=0.5))
    changed = moved(*history.weights)
    assert "backbone.Dense_0.kernel" in changed
    assert not {"backbone.BatchNorm_0.scale", "backbone.BatchNorm_0.bias"} & changed


def test_parameters_that_the_optimizer_has_already_are_skipped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="already exist within another group of this optimizer"):
        trainer, history = fit(Tuned(), 2, Later())
    assert len(trainer.optimizers[0].param_groups) == 1
    assert "backbone.Dense_0.kernel" in moved(*history.weights)


def test_optax_has_no_groups_to_add() -> None:
    def configure(module: Any) -> Any:
        return {"optimizer": optax.inject_hyperparams(optax.adam)(0.1), "params": "head"}

    with pytest.raises(MisconfigurationException, match="to which no parameter group can be added"):
        fit(Tuned(optimizer=configure), 2, Later())


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")  # BatchNorm, as in Lightning
@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_finetuning_continues_exactly(tmp_path: Path, stop: int) -> None:
    def callback() -> BackboneFinetuning:
        return BackboneFinetuning(1, backbone_initial_ratio_lr=0.2)

    straight = Tuned(optimizer=filtered)
    fit(straight, 4, callback())
    first, _ = fit(Tuned(optimizer=filtered), stop, callback(), default_root_dir=tmp_path)
    first.save_checkpoint(tmp_path / "a.ckpt")
    again = Tuned(optimizer=filtered)
    trainer, _ = fit(again, 4, callback(), ckpt_path=tmp_path / "a.ckpt")
    assert moved(dict(straight.state_dict()), dict(again.state_dict())) == set()
    assert len(trainer.optimizers[0].param_groups) == 2


def test_a_backbone_is_required() -> None:
    class None_(pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: Any) -> Any: ...

        def configure_optimizers(self) -> Any: ...

    with pytest.raises(MisconfigurationException, match=r"should have a nn\.Module `backbone` attribute"):
        pl.Trainer(max_epochs=1, callbacks=BackboneFinetuning(), **QUIET).fit(None_(), data())


@pytest.mark.lightning
@pytest.mark.torch
def test_the_weights_and_rates_are_those_of_lightning() -> None:
    import lightning.pytorch as lightning
    import torch
    from lightning.pytorch.callbacks import BackboneFinetuning as Theirs

    class Torch(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Linear(3, 4)
            self.head = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return ((self.head(self.backbone(batch[0])) - batch[1]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)

    class Ours(Tuned):
        def on_train_start(self) -> None:
            engine = self._engine
            engine.params = {
                name: {"kernel": start[f"{name}.weight"].T, "bias": start[f"{name}.bias"]}
                for name in ("backbone", "head")
            }

    theirs = Torch()
    start = {name: value.detach().numpy().copy() for name, value in theirs.state_dict().items()}
    pairs = [(torch.from_numpy(X[i : i + 8]), torch.from_numpy(Y[i : i + 8])) for i in range(0, 24, 8)]
    options = {"backbone_initial_ratio_lr": 0.3, "lambda_func": lambda epoch: 1.5}
    trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", devices=1, callbacks=Theirs(2, **options), **QUIET)
    trainer.fit(theirs, torch.utils.data.DataLoader(pairs, batch_size=None))
    ours = Ours(nn.Dense(4), optimizer=filtered)
    ours.init((X[:8], Y[:8]))
    mine, _ = fit(ours, 5, BackboneFinetuning(2, **options))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert [group["lr"] for group in mine.optimizers[0].param_groups] == pytest.approx(rates)
    for name in ("backbone", "head"):
        weights = theirs.state_dict()
        # float32 sums in another order, 15 updates
        np.testing.assert_allclose(ours.state_dict()[f"{name}.kernel"], weights[f"{name}.weight"].T, atol=2e-5)
        np.testing.assert_allclose(ours.state_dict()[f"{name}.bias"], weights[f"{name}.bias"], atol=2e-5)
