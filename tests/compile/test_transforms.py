"""Inside JAX's own transforms: networks and attributes can be used, effects are refused by name, transform and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.models import LinenNet, batches, make_engine

import jaxlightning as pl
from jaxlightning import LightningModule

DATA = batches()


class Net(LightningModule):
    def __init__(self, inside: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.net = LinenNet()
        self.outputs: list[Any] = []
        self.scale = jnp.ones(())
        self.inside = inside

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.net(batch[0]).mean() + self.inside(self, batch[0])

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def _log(self: Any, x: Any) -> Any:
    def f(x: Any) -> Any:
        self.log("inner", x.sum())
        return x.sum()

    return jax.grad(f)(x).sum()


def _append(self: Any, x: Any) -> Any:
    return jax.lax.scan(lambda carry, row: (carry, self.outputs.append(row.sum())), 0.0, x)[0]


def _assign(self: Any, x: Any) -> Any:
    def f(row: Any) -> Any:
        self.scale = row.sum()
        return row.sum()

    return jax.vmap(f)(x).sum()


def _number(self: Any, x: Any) -> Any:
    def f(row: Any) -> Any:
        self.count = 3
        return row.sum()

    return jax.checkpoint(f)(x)


def _statistics(self: Any, x: Any) -> Any:
    return jax.lax.scan(lambda carry, row: (carry + self.net(row[None]).sum(), None), 0.0, x)[0]


def _print(self: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda: (self.print("x"), 1.0)[1], lambda: 0.0)


def _params(self: Any, x: Any) -> Any:
    def f(i: Any, carry: Any) -> Any:
        self.net.params = self.net.params
        return carry + x.sum()

    return jax.lax.fori_loop(0, 3, f, 0.0)


@pytest.mark.parametrize(
    ("inside", "what", "transform"),
    [
        (_log, r"`self.log\('inner', ...\)`", "jax.grad"),
        (_append, r"`self.outputs.append\(...\)`", "jax.lax.scan"),
        (_assign, r"`self.scale = ...`", "jax.vmap"),
        (_number, r"The assignment of `self.count`", "jax.checkpoint"),
        (_statistics, r"Network `self.net` with collections \['batch_stats'\]", "jax.lax.scan"),
        (_print, r"`self.print\(...\)`", "jax.lax.cond"),
        (_params, r"`self.net.params = ...`", "jax.lax.fori_loop"),
    ],
)
def test_an_effect_inside_a_transform_names_it_and_the_line(inside: Any, what: str, transform: str) -> None:
    module = Net(inside)
    with pytest.raises(RuntimeError, match=rf"{what}.*test_transforms.py:\d+.*transform of your own, `{transform}`"):
        make_engine(module).train_step(DATA[0], batch_idx=0)
    assert module.outputs == []
    assert float(module.scale) == 1


def _uses(self: Any, x: Any) -> Any:
    total = jax.vmap(lambda row: (row * self.scale).sum())(x).sum()
    total += jax.lax.scan(lambda carry, row: (carry + (self.scale * row).sum(), None), 0.0, x)[0]
    total += jax.lax.cond(x.sum() > 0, lambda: self.critic(x).sum(), lambda: self.scale)
    total += (jax.grad(lambda x: self.critic(x).sum())(x) ** 2).sum()
    total += jax.checkpoint(lambda x: self.critic(x).sum())(x)
    return total + jax.vmap(self.critic)(x[:, None]).sum()


def test_networks_and_attributes_are_used_inside_transforms() -> None:
    class Uses(Net):
        def __init__(self) -> None:
            super().__init__(_uses)
            self.critic = nn.Dense(3)

    results = []
    for jit in (True, False):
        module = Uses()
        engine = make_engine(module, jit=jit)
        out = [
            engine.train_step(DATA[i], batch_idx=i, micro_step=i, want_outputs=True).outputs["loss"] for i in range(3)
        ]
        results.append((out, engine.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), *results)


def _gradient_penalty(self: Any, x: Any) -> Any:
    def critic(x: Any) -> Any:
        y, updates = self.net(x, mutable=["batch_stats"])
        return y.sum(), updates

    gradient, updates = jax.grad(critic, has_aux=True)(x)
    self.net.variables = updates
    return ((jnp.linalg.norm(gradient.reshape(len(x), -1), axis=1) - 1) ** 2).mean()


def test_a_critic_with_batch_norm_returns_its_statistics_from_the_gradient_penalty() -> None:
    results = []
    for jit in (True, False):
        module = Net(_gradient_penalty)
        engine = make_engine(module, jit=jit)
        for i in range(3):
            engine.train_step(DATA[i], batch_idx=i, micro_step=i)
        results.append((engine.params, engine.variables))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *results)
    once = make_engine(Net(lambda self, x: 0.0))
    for i in range(3):
        once.train_step(DATA[i], batch_idx=i, micro_step=i)
    moved = [
        np.abs(np.asarray(a) - np.asarray(b)).max()
        for a, b in zip(jax.tree.leaves(results[0][1]), jax.tree.leaves(once.variables), strict=True)
    ]
    assert max(moved) > 1e-3  # two updates a step, not one


class Lifted(nn.Module):
    """A network made with Flax's own transforms."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.remat(nn.Dense)(8)(x)
        cell = nn.scan(nn.SimpleCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)(
            features=4
        )
        carry = cell.initialize_carry(jax.random.key(0), x.shape)
        return cell(carry, x[:, None].repeat(3, 1))[0]


def test_networks_made_with_flax_transforms_run_inside_transforms() -> None:
    class Wraps(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Lifted()

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            penalty = (jax.grad(lambda x: self.net(x).sum())(batch[0]) ** 2).mean()
            return self.net(batch[0]).mean() + penalty

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    losses = []
    for jit in (True, False):
        engine = make_engine(Wraps(), jit=jit)
        losses.append(
            [
                float(engine.train_step(DATA[i], batch_idx=i, micro_step=i, want_outputs=True).outputs["loss"])
                for i in range(2)
            ]
        )
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize("look", [float, lambda loss: loss.item(), lambda loss: loss > 0 and loss])
def test_an_eager_step_says_how_to_look_at_what_is_differentiated(tmp_path: Path, look: Any) -> None:
    class Looks(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Dense(1)
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = self.net(batch).mean()
            look(loss)
            return loss

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    class Behind(Looks):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = self.net(batch).mean()
            look(jax.lax.stop_gradient(loss))
            return loss

    data = pl.ArrayLoader(np.ones((4, 2), np.float32), batch_size=2)
    flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 2}
    if look is float:  # the others JAX allows
        with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
            pl.Trainer(jit=False, default_root_dir=tmp_path, **flags).fit(Looks(), data)
        assert any("jax.lax.stop_gradient(loss)" in note for note in caught.value.__notes__)
    trainer = pl.Trainer(jit=False, default_root_dir=tmp_path, **flags)
    trainer.fit(Behind(), data)
    assert trainer.global_step == 2
