"""Manual optimization as people write it: adversarial networks, several optimizers, accumulation by hand, closures."""

from __future__ import annotations

import copy
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import Beside, check

import jaxlightning as pl

pytestmark = [pytest.mark.slow]

RNG = np.random.RandomState(0)
REAL = RNG.randn(32, 6)
NOISE = RNG.randn(32, 3)


class MLP(nn.Module):
    """Two layers, as torch.nn.Sequential(Linear, Tanh, Linear)."""

    features: int
    hidden: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(nn.Dense(self.hidden)(x))
        return nn.Dense(self.features)(x)


def torch_mlp(inputs: int, features: int, hidden: int = 8) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, features))


GAN_LAYERS = {
    "generator.Dense_0": "generator.0",
    "generator.Dense_1": "generator.2",
    "critic.Dense_0": "critic.0",
    "critic.Dense_1": "critic.2",
}


class GAN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = MLP(6)
        self.critic = MLP(1)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        real, noise = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(noise)
        loss_g = jax.nn.softplus(-self.critic(fake)).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        loss_d = jax.nn.softplus(-self.critic(real)).mean()
        loss_d += jax.nn.softplus(self.critic(jax.lax.stop_gradient(fake))).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.log_dict({"g": loss_g, "d": loss_d}, prog_bar=True)
        return None

    def configure_optimizers(self) -> Any:
        return [
            {"optimizer": optax.adam(1e-2, b1=0.5), "params": self.generator},
            {"optimizer": optax.adam(1e-2, b1=0.5), "params": [self.critic]},
        ]


def torch_gan() -> Any:
    import lightning.pytorch as lightning
    import torch
    from torch.nn.functional import softplus

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = torch_mlp(3, 6)
            self.critic = torch_mlp(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            real, noise = batch
            opt_g, opt_d = self.optimizers()
            fake = self.generator(noise)
            loss_g = softplus(-self.critic(fake)).mean()
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
            loss_d = softplus(-self.critic(real)).mean()
            loss_d = loss_d + softplus(self.critic(fake.detach())).mean()
            opt_d.zero_grad()
            self.manual_backward(loss_d)
            opt_d.step()
            self.log_dict({"g": loss_g, "d": loss_d}, prog_bar=True)
            return None

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
                torch.optim.Adam(self.critic.parameters(), lr=1e-2, betas=(0.5, 0.999)),
            ]

    return Theirs()


class Adversarial(pl.LightningModule):
    """Two networks and two optimizers; the step is the test's."""

    def __init__(self, rule: Any = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = MLP(6)
        self.critic = MLP(1)

    def losses(self, batch: Any) -> tuple[Any, Any]:
        real, noise = batch
        fake = self.generator(noise)
        loss_g = self.critic(fake).mean()
        loss_d = (self.critic(real) ** 2).mean() - self.critic(jax.lax.stop_gradient(fake)).mean()
        return loss_g, loss_d

    def configure_optimizers(self) -> Any:
        sgd = pl.optim.SGD
        return [sgd(self.generator.parameters(), lr=0.1, momentum=0.9), sgd(self.critic.parameters(), lr=0.05)]


def torch_adversarial(step: Any, configure: Any = None) -> Any:
    import lightning.pytorch as lightning
    import torch

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = torch_mlp(3, 6)
            self.critic = torch_mlp(6, 1)

        def losses(self, batch: Any) -> tuple[Any, Any]:
            real, noise = batch
            fake = self.generator(noise)
            loss_g = self.critic(fake).mean()
            loss_d = (self.critic(real) ** 2).mean() - self.critic(fake.detach()).mean()
            return loss_g, loss_d

        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD
            return [sgd(self.generator.parameters(), lr=0.1, momentum=0.9), sgd(self.critic.parameters(), lr=0.05)]

    Theirs.training_step = step
    if configure is not None:
        Theirs.configure_optimizers = configure
    return Theirs()


def both_ways(step: Any, *, configure: Any = None, their_configure: Any = None, **options: Any) -> Any:
    """Checks one and the same `training_step` in our module and in PyTorch Lightning's."""
    ours = type("Ours", (Adversarial,), {"training_step": step})
    if configure is not None:
        ours.configure_optimizers = configure
    beside = Beside(lambda: torch_adversarial(step, their_configure), GAN_LAYERS)
    return check(ours, (REAL, NOISE), beside=beside, **options)


def different_frequencies(self: Any, batch: Any, batch_idx: Any) -> Any:
    opt_g, opt_d = self.optimizers()
    if batch_idx % 3 == 0:
        loss_g, _ = self.losses(batch)
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.log("g", loss_g)
    _, loss_d = self.losses(batch)
    opt_d.zero_grad()
    self.manual_backward(loss_d)
    opt_d.step()
    self.log("d", loss_d)
    return loss_d


def accumulation_by_hand(self: Any, batch: Any, batch_idx: Any) -> Any:
    opt_g, opt_d = self.optimizers()
    n = 3
    loss_g, loss_d = self.losses(batch)
    self.toggle_optimizer(opt_g)
    loss_g, _ = self.losses(batch)
    self.manual_backward(loss_g / n)
    self.untoggle_optimizer(opt_g)
    self.manual_backward(loss_d / n)
    if (batch_idx + 1) % n == 0:
        opt_g.step()
        opt_g.zero_grad()
        opt_d.step()
        opt_d.zero_grad()
    self.log_dict({"g": loss_g, "d": loss_d})


def several_backward_calls(self: Any, batch: Any, batch_idx: Any) -> Any:
    opt_g, opt_d = self.optimizers()
    loss_g, loss_d = self.losses(batch)
    opt_g.zero_grad()
    opt_d.zero_grad()
    self.manual_backward(loss_g, retain_graph=True)
    self.manual_backward(0.5 * loss_g + loss_d)
    opt_g.step()
    opt_d.step()
    return {"loss": loss_g, "other": 1}


def closures(self: Any, batch: Any, batch_idx: Any) -> Any:
    opt_g, opt_d = self.optimizers()

    def closure_g() -> Any:
        loss_g, _ = self.losses(batch)
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        self.log("g", loss_g)
        return loss_g

    def closure_d() -> Any:
        _, loss_d = self.losses(batch)
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        self.log("d", loss_d)
        return loss_d

    with opt_g.toggle_model():
        opt_g.step(closure=closure_g)
    with opt_d.toggle_model():
        opt_d.step(closure_d)


def toggled_and_clipped(self: Any, batch: Any, batch_idx: Any) -> Any:
    opt_g, opt_d = self.optimizers()
    with self.toggled_optimizer(opt_g):
        loss_g, _ = self.losses(batch)
        self.manual_backward(loss_g)
        self.clip_gradients(opt_g, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        opt_g.step()
        opt_g.zero_grad()
    with self.toggled_optimizer(opt_d):
        _, loss_d = self.losses(batch)
        self.manual_backward(loss_d)
        self.clip_gradients(opt_d, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        opt_d.step()
        opt_d.zero_grad()
    self.log_dict({"g": loss_g, "d": loss_d})


def manual_schedulers(self: Any, batch: Any, batch_idx: Any) -> Any:
    opt_g, opt_d = self.optimizers()
    sch_g, sch_d = self.lr_schedulers()
    loss_g, loss_d = self.losses(batch)
    opt_g.zero_grad()
    self.manual_backward(loss_g)
    opt_g.step()
    sch_g.step()
    opt_g.step()  # with the learning rate that the scheduler has just set
    opt_d.zero_grad()
    _, loss_d = self.losses(batch)
    self.manual_backward(loss_d)
    opt_d.step()
    if (batch_idx + 1) % 4 == 0:
        sch_d.step()
    self.log_dict({"g": loss_g, "d": loss_d})


def our_schedules(self: Any) -> Any:
    optimizers = Adversarial.configure_optimizers(self)
    lr_scheduler = pl.optim.lr_scheduler
    return optimizers, [
        lr_scheduler.StepLR(optimizers[0], step_size=2, gamma=0.9),
        lr_scheduler.ExponentialLR(optimizers[1], gamma=0.5),
    ]


def their_schedules(self: Any) -> Any:
    import torch

    sgd, lr_scheduler = torch.optim.SGD, torch.optim.lr_scheduler
    optimizers = [sgd(self.generator.parameters(), lr=0.1, momentum=0.9), sgd(self.critic.parameters(), lr=0.05)]
    return optimizers, [
        lr_scheduler.StepLR(optimizers[0], step_size=2, gamma=0.9),
        lr_scheduler.ExponentialLR(optimizers[1], gamma=0.5),
    ]


@pytest.mark.lightning
def test_a_gan() -> None:
    out = check(GAN, (REAL, NOISE), beside=Beside(torch_gan, GAN_LAYERS))
    assert out.trainer.global_step == 48  # 24 batches in three epochs, two optimizers
    assert out.module._engine.trace_counts["train"] == 1


@pytest.mark.lightning
def test_two_optimizers_with_different_frequencies() -> None:
    out = both_ways(different_frequencies)
    assert out.trainer.global_step == 24 + 9


@pytest.mark.lightning
def test_gradients_accumulated_by_hand() -> None:
    out = both_ways(accumulation_by_hand)
    assert out.trainer.global_step == 2 * 3 * 2  # two optimizers, three epochs of eight batches with two steps each


@pytest.mark.lightning
def test_several_backward_calls_before_one_step() -> None:
    both_ways(several_backward_calls)


@pytest.mark.lightning
def test_closures_and_toggle_model() -> None:
    both_ways(closures)


@pytest.mark.lightning
@pytest.mark.catalogue("OP16", adaptation="gradients of the other optimizers' parameters are not added")
def test_toggled_optimizers_and_clipped_gradients() -> None:
    both_ways(toggled_and_clipped)


@pytest.mark.lightning
def test_schedulers_stepped_by_hand() -> None:
    out = both_ways(manual_schedulers, configure=our_schedules, their_configure=their_schedules)
    assert [round(group["lr"], 9) for handle in out.trainer.optimizers for group in handle.param_groups] == [
        round(0.1 * 0.9**12, 9),
        round(0.05 * 0.5**6, 9),
    ]


# --- gradient penalty, actor and critic, a teacher --------------------------------------------------------------------


def wasserstein_step(self: Any, batch: Any, batch_idx: Any, slope: Any, detach: Any, norm: Any) -> Any:
    """A WGAN-GP step with two critic updates for each one of the generator."""
    real, noise = batch
    opt_g, opt_d = self.optimizers()
    fake = self.generator(noise)
    opt_d.zero_grad()
    between = 0.3 * real + 0.7 * detach(fake)
    loss_d = self.critic(detach(fake)).mean() - self.critic(real).mean()
    penalty = ((norm(slope(self.critic, between)) - 1) ** 2).mean()
    self.manual_backward(loss_d + 10 * penalty)
    opt_d.step()
    self.log_dict({"d": loss_d, "penalty": penalty})
    if batch_idx % 2 == 0:
        opt_g.zero_grad()
        loss_g = -self.critic(self.generator(noise)).mean()
        self.manual_backward(loss_g)
        opt_g.step()
        self.log("g", loss_g)


class Wasserstein(GAN):
    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        def slope(critic: Any, x: Any) -> Any:
            return jax.grad(lambda x: critic(x).sum())(x)

        def norm(x: Any) -> Any:
            return jnp.sqrt((x**2).sum(axis=1))

        wasserstein_step(self, batch, batch_idx, slope, jax.lax.stop_gradient, norm)


def torch_wasserstein() -> Any:
    import torch

    def training_step(self: Any, batch: Any, batch_idx: Any) -> Any:
        def slope(critic: Any, x: Any) -> Any:
            x = x.requires_grad_(True)
            return torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]

        wasserstein_step(self, batch, batch_idx, slope, lambda x: x.detach(), lambda x: x.norm(2, dim=1))

    theirs = torch_gan()
    type(theirs).training_step = training_step
    return theirs


class NormalisedCritic(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8, use_bias=False)(x))
        return nn.Dense(1)(jnp.tanh(x))


class NormalisedWasserstein(Wasserstein):
    def __init__(self) -> None:
        super().__init__()
        self.critic = NormalisedCritic()


class ActorCritic(pl.LightningModule):
    """Policy gradient with an advantage; states, actions and returns come in batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor = MLP(3)
        self.critic = MLP(1)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        states, actions, returns = batch
        opt_actor, opt_critic = self.optimizers()
        values = self.critic(states)[:, 0]
        advantage = returns - jax.lax.stop_gradient(values)
        logits = self.actor(states)
        log_probs = jax.nn.log_softmax(logits)
        chosen = (log_probs * jax.nn.one_hot(actions, 3)).sum(axis=1)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=1).mean()
        actor_loss = -(chosen * advantage).mean() - 0.01 * entropy
        critic_loss = ((returns - values) ** 2).mean()
        opt_actor.zero_grad()
        self.manual_backward(actor_loss)
        opt_actor.step()
        opt_critic.zero_grad()
        self.manual_backward(critic_loss)
        self.clip_gradients(opt_critic, gradient_clip_val=0.5)
        opt_critic.step()
        self.log_dict({"actor": actor_loss, "critic": critic_loss, "entropy": entropy})
        return {"loss": actor_loss + critic_loss}

    def configure_optimizers(self) -> Any:
        return [
            {"optimizer": optax.adam(3e-3), "params": self.actor},
            {"optimizer": optax.adam(1e-2), "params": self.critic},
        ]


def torch_actor_critic() -> Any:
    import lightning.pytorch as lightning
    import torch

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.actor = torch_mlp(6, 3)
            self.critic = torch_mlp(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            states, actions, returns = batch
            opt_actor, opt_critic = self.optimizers()
            values = self.critic(states)[:, 0]
            advantage = returns - values.detach()
            log_probs = torch.log_softmax(self.actor(states), dim=1)
            chosen = (log_probs * torch.nn.functional.one_hot(actions, 3)).sum(dim=1)
            entropy = -(log_probs.exp() * log_probs).sum(dim=1).mean()
            actor_loss = -(chosen * advantage).mean() - 0.01 * entropy
            critic_loss = ((returns - values) ** 2).mean()
            opt_actor.zero_grad()
            self.manual_backward(actor_loss)
            opt_actor.step()
            opt_critic.zero_grad()
            self.manual_backward(critic_loss)
            self.clip_gradients(opt_critic, gradient_clip_val=0.5)
            opt_critic.step()
            self.log_dict({"actor": actor_loss, "critic": critic_loss, "entropy": entropy})
            return {"loss": actor_loss + critic_loss}

        def configure_optimizers(self) -> Any:
            adam = torch.optim.Adam
            return [adam(self.actor.parameters(), lr=3e-3), adam(self.critic.parameters(), lr=1e-2)]

    return Theirs()


class Teacher(pl.LightningModule):
    """BYOL's idea with manual steps: a predictor on the student chases a teacher that follows the student slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.student = MLP(4)
        self.teacher = copy.deepcopy(self.student)
        self.predictor = nn.Dense(4)
        self.freeze(self.teacher)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        one, other = batch
        opt = self.optimizers()
        target = jax.lax.stop_gradient(self.teacher(other))
        loss = ((self.predictor(self.student(one)) - target) ** 2).mean()
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.teacher.params = jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, self.teacher.params, self.student.params)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return {"optimizer": optax.sgd(0.1), "params": [self.student, self.predictor]}


def torch_teacher() -> Any:
    import lightning.pytorch as lightning
    import torch

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.student = torch_mlp(6, 4)
            self.teacher = torch_mlp(6, 4)
            self.predictor = torch.nn.Linear(4, 4)
            for p in self.teacher.parameters():
                p.requires_grad = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            one, other = batch
            opt = self.optimizers()
            loss = ((self.predictor(self.student(one)) - self.teacher(other)) ** 2).mean()
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.mul_(0.9).add_(0.1 * s)
            self.log("loss", loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.student.parameters(), *self.predictor.parameters()], lr=0.1)

    return Theirs()


@pytest.mark.lightning
def test_a_wgan_with_gradient_penalty_and_several_critic_steps() -> None:
    out = check(Wasserstein, (REAL, NOISE), beside=Beside(torch_wasserstein, GAN_LAYERS))
    assert out.trainer.global_step == 24 + 12


def test_a_wgan_critic_with_batch_normalisation() -> None:
    out = check(NormalisedWasserstein, (REAL, NOISE))
    moved = out.state["critic.batch_stats.BatchNorm_0.mean"]
    assert np.abs(moved).max() > 0


@pytest.mark.lightning
def test_an_actor_and_a_critic() -> None:
    rng = np.random.RandomState(1)
    data = (rng.randn(32, 6), rng.randint(0, 3, 32), rng.randn(32))
    layers = {
        "actor.Dense_0": "actor.0",
        "actor.Dense_1": "actor.2",
        "critic.Dense_0": "critic.0",
        "critic.Dense_1": "critic.2",
    }
    check(ActorCritic, data, beside=Beside(torch_actor_critic, layers))


@pytest.mark.lightning
@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_a_teacher_that_follows_the_student() -> None:
    layers = {f"{net}.Dense_{i}": f"{net}.{2 * i}" for net in ("student", "teacher") for i in (0, 1)}
    data = (REAL, REAL + 0.1 * RNG.randn(32, 6))
    out = check(Teacher, data, beside=Beside(torch_teacher, {**layers, "predictor": "predictor"}))
    assert np.abs(out.state["teacher.Dense_0.kernel"] - out.state["student.Dense_0.kernel"]).max() > 0
