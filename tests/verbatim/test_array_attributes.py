"""Arrays on the module, as people keep them: queues, teachers, centers, prototypes, statistics, memories."""

from __future__ import annotations

import collections
import copy
import dataclasses
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
X, X2 = RNG.randn(32, 6), RNG.randn(32, 6)
Y = RNG.randint(0, 3, 32).astype(np.int32)
INDEX = np.arange(32, dtype=np.int32)
DATA = (X, Y)
QUEUE = RNG.randn(3, 12)


class MLP(nn.Module):
    """Two layers, as torch.nn.Sequential(Linear, Tanh, Linear)."""

    features: int = 3
    hidden: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(nn.Dense(self.hidden)(x))
        return nn.Dense(self.features)(x)


def torch_mlp(inputs: int = 6, features: int = 3, hidden: int = 8) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, features))


class Body(pl.LightningModule):
    """A classifier whose `extra` is what a test is about."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP()

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch[:2]
        logits = self.net(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        loss = losses.mean() + self.extra(logits, losses, batch)
        self.log("loss", loss)
        return loss

    def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
        return 0.0

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


detach = jax.lax.stop_gradient


class BYOL(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student = MLP()
        self.teacher = copy.deepcopy(self.student)
        self.predictor = nn.Dense(3)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        one, two = batch
        m = 0.9
        self.teacher.params = jax.tree.map(lambda t, s: m * t + (1 - m) * s, self.teacher.params, self.student.params)
        p = self.predictor(self.student(one))
        z = detach(self.teacher(two))
        cosine = (p * z).sum(-1) / (jnp.linalg.norm(p, axis=-1) * jnp.linalg.norm(z, axis=-1))
        loss = (2 - 2 * cosine).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return {"optimizer": optax.sgd(0.1), "params": [self.student, self.predictor]}


def torch_byol() -> Any:
    import lightning.pytorch as lightning
    import torch

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student = torch_mlp()
            self.teacher = copy.deepcopy(self.student)
            self.predictor = torch.nn.Linear(3, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            one, two = batch
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.mul_(0.9).add_(s, alpha=0.1)
            p = self.predictor(self.student(one))
            z = self.teacher(two).detach()
            loss = (2 - 2 * torch.nn.functional.cosine_similarity(p, z)).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.student.parameters(), *self.predictor.parameters()], lr=0.1)

    return Theirs()


@pytest.mark.lightning
def test_byol_with_an_ema_teacher() -> None:
    layers = {f"{net}.Dense_{i}": f"{net}.{2 * i}" for net in ("student", "teacher") for i in (0, 1)}
    check(BYOL, (X, X2), beside=Beside(torch_byol, {**layers, "predictor": "predictor"}))


class MoCo(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.query = MLP()
        self.key = copy.deepcopy(self.query)
        self.register_buffer("queue", jnp.asarray(QUEUE))
        self.register_buffer("queue_ptr", jnp.zeros(1, jnp.int32))

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        one, two = batch
        self.key.params = jax.tree.map(lambda k, q: 0.99 * k + 0.01 * q, self.key.params, self.query.params)
        q, k = self.query(one), detach(self.key(two))
        q, k = q / jnp.linalg.norm(q, axis=1, keepdims=True), k / jnp.linalg.norm(k, axis=1, keepdims=True)
        logits = jnp.concatenate([(q * k).sum(1, keepdims=True), q @ self.queue], axis=1) / 0.2
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros(len(q), jnp.int32)).mean()
        ptr = self.queue_ptr[0]
        self.queue = jax.lax.dynamic_update_slice(self.queue, k.T.astype(self.queue.dtype), (jnp.zeros_like(ptr), ptr))
        self.queue_ptr = self.queue_ptr.at[0].set((ptr + len(k)) % self.queue.shape[1])
        self.log_dict({"loss": loss, "queue": self.queue.sum(), "ptr": 1.0 * self.queue_ptr[0]})
        return loss

    def configure_optimizers(self) -> Any:
        return {"optimizer": optax.sgd(0.1), "params": self.query}


def torch_moco() -> Any:
    import lightning.pytorch as lightning
    import torch

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.query = torch_mlp()
            self.key = copy.deepcopy(self.query)
            self.register_buffer("queue", torch.from_numpy(QUEUE.copy()))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            one, two = batch
            with torch.no_grad():
                for k, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    k.mul_(0.99).add_(q, alpha=0.01)
                k = torch.nn.functional.normalize(self.key(two))
            q = torch.nn.functional.normalize(self.query(one))
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], dim=1) / 0.2
            loss = torch.nn.functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + len(k)] = k.T
            self.queue_ptr[0] = (ptr + len(k)) % self.queue.shape[1]
            self.log_dict({"loss": loss, "queue": self.queue.sum(), "ptr": self.queue_ptr[0].double()})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.query.parameters(), lr=0.1)

    return Theirs()


@pytest.mark.lightning
def test_moco_with_a_queue_buffer() -> None:
    layers = {f"{net}.Dense_{i}": f"{net}.{2 * i}" for net in ("query", "key") for i in (0, 1)}
    out = check(MoCo, (X, X2), beside=Beside(torch_moco, layers))
    assert out.trainer._engine.trace_counts == {"train": 1}
    assert set(out.state) >= {"queue", "queue_ptr"}


class Clip(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = MLP(), MLP()
        self.register_parameter("logit_scale", jnp.asarray(np.log(1 / 0.07)))

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        logits = jnp.exp(self.logit_scale) * self.image(batch[0]) @ self.text(batch[1]).T
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()
        self.log_dict({"loss": loss, "scale": self.logit_scale})
        return loss

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.01)


def torch_clip() -> Any:
    import lightning.pytorch as lightning
    import torch

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = torch_mlp(), torch_mlp()
            self.logit_scale = torch.nn.Parameter(torch.tensor(np.log(1 / 0.07)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.logit_scale.exp() * self.image(batch[0]) @ self.text(batch[1]).T
            loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
            self.log_dict({"loss": loss, "scale": self.logit_scale})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Theirs()


@pytest.mark.lightning
def test_a_learnable_temperature_on_the_module() -> None:
    layers = {f"{net}.Dense_{i}": f"{net}.{2 * i}" for net in ("image", "text") for i in (0, 1)}
    out = check(Clip, (X, X2), beside=Beside(torch_clip, layers))
    assert "logit_scale" in out.state


def test_an_nnx_param_on_the_module() -> None:
    from flax import nnx

    class Scaled(Body):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nnx.Param(jnp.ones(3))

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            return ((logits * self.scale) ** 2).mean()

    out = check(Scaled, DATA)
    assert not np.allclose(out.state["scale"], 1)


def test_a_center_that_follows_the_teacher() -> None:
    class Dino(Body):
        def __init__(self) -> None:
            super().__init__()
            self.center = jnp.zeros(3)

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            target = jax.nn.softmax(detach(logits) - self.center)
            self.center = 0.9 * self.center + 0.1 * detach(logits).mean(0)
            return -(target * jax.nn.log_softmax(logits)).sum(-1).mean()

    out = check(Dino, DATA)
    assert out.trainer._engine.trace_counts == {"train": 1}


def test_a_number_that_becomes_an_average() -> None:
    class Smoothed(Body):
        def __init__(self) -> None:
            super().__init__()
            self.baseline = 0.0

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            advantage = detach(losses.mean()) - self.baseline
            self.baseline = 0.9 * self.baseline + 0.1 * detach(losses.mean())
            self.log("baseline", self.baseline)
            return advantage * jax.nn.logsumexp(logits, -1).mean()

    assert check(Smoothed, DATA).trainer._engine.trace_counts == {"train": 1}


def test_prototypes_in_a_dict_and_in_a_list() -> None:
    class Prototypes(Body):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes = {f"class {i}": jnp.zeros(3) for i in range(3)}
            self.counts = [0.0, 0.0, 0.0]

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            distance = 0.0
            for i in range(3):
                mask = (batch[1] == i)[:, None]
                mean = (mask * detach(logits)).sum(0) / jnp.maximum(mask.sum(), 1)
                distance = distance + (mask * (logits - self.prototypes[f"class {i}"]) ** 2).mean()
                self.prototypes[f"class {i}"] = 0.5 * self.prototypes[f"class {i}"] + 0.5 * mean
                self.counts[i] += mask.sum()
            self.log_dict({f"count {i}": self.counts[i] for i in range(3)})
            return 0.1 * distance

    out = check(Prototypes, DATA)
    assert sum(float(count) for count in out.module.counts) == 96
    assert list(out.module.prototypes) == ["class 0", "class 1", "class 2"]


@dataclasses.dataclass
class Running:
    """Mean and variance over everything seen, as reinforcement learning normalises rewards."""

    mean: Any
    var: Any
    count: Any

    def update(self, x: Any) -> None:
        delta, total = x.mean() - self.mean, self.count + x.size
        self.mean = self.mean + delta * x.size / total
        m2 = self.var * self.count + x.var() * x.size + delta**2 * self.count * x.size / total
        self.var, self.count = m2 / total, total


def test_running_statistics_in_a_dataclass() -> None:
    class Normalised(Body):
        def __init__(self) -> None:
            super().__init__()
            self.running = Running(jnp.zeros(()), jnp.ones(()), jnp.asarray(1e-4))

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            self.running.update(detach(losses))
            normal = (detach(losses) - self.running.mean) / jnp.sqrt(self.running.var + 1e-8)
            self.log_dict({"mean": self.running.mean, "var": self.running.var})
            return (normal * losses).mean()

    out = check(Normalised, DATA)
    assert isinstance(out.module.running, Running)
    assert float(out.module.running.count) == pytest.approx(96, abs=1e-3)


class Averages:
    """The helper that everybody writes."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.shadow: Any = None

    def update(self, params: Any) -> None:
        if self.shadow is None:
            self.shadow = params
        else:
            self.shadow = jax.tree.map(lambda a, b: self.decay * a + (1 - self.decay) * b, self.shadow, params)


def test_a_helper_object_that_keeps_averages_of_parameters() -> None:
    class Averaged(Body):
        def __init__(self) -> None:
            super().__init__()
            self.averages = Averages(0.9)

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            self.averages.update(detach(self.net.params))
            self.log("shadow", self.averages.shadow["Dense_0"]["kernel"].sum())
            return 0.0

    check(Averaged, DATA)


def test_the_batch_before_starting_from_none() -> None:
    class Previous(Body):
        def __init__(self) -> None:
            super().__init__()
            self.previous: Any = None

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            gap = 0.0 if self.previous is None else ((logits - self.previous) ** 2).mean()
            self.previous = detach(logits)
            return gap

    assert check(Previous, DATA).trainer._engine.trace_counts == {"train": 2}


def test_an_attribute_made_by_the_first_step() -> None:
    class Lazy(Body):
        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            if not hasattr(self, "loc"):  # data-dependent initialisation
                self.loc, self.scale = detach(logits.mean(0)), detach(logits.std(0))
            self.steps = getattr(self, "steps", 0) + 1
            return (((logits - self.loc) / (self.scale + 1e-3)) ** 2).mean()

    out = check(Lazy, DATA)
    assert out.module.steps == 24


def test_a_window_of_recent_values_in_a_deque() -> None:
    class Window(Body):
        def __init__(self) -> None:
            super().__init__()
            self.recent: Any = collections.deque(maxlen=3)

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            self.recent.append(detach(losses.mean()))
            return jnp.stack(list(self.recent)).mean() * losses.mean()

    out = check(Window, DATA)
    assert len(out.module.recent) == 3
    assert out.trainer._engine.trace_counts == {"train": 4}


def test_a_memory_of_losses_by_sample() -> None:
    class Hard(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", jnp.zeros(32))

        def extra(self, logits: Any, losses: Any, batch: Any) -> Any:
            index = batch[2]
            weights = jax.nn.softmax(self.memory[index])
            self.memory = self.memory.at[index].set(0.5 * self.memory[index] + 0.5 * detach(losses))
            return (weights * losses).sum()

    out = check(Hard, (X, Y, INDEX))
    assert (out.state["memory"] > 0).all()


@pytest.mark.lightning
def test_weights_clipped_in_the_step_have_the_gradient_of_torch() -> None:
    class Clipped(Body):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.net.params = jax.tree.map(lambda p: jnp.clip(p, -0.2, 0.2), self.net.params)
            return super().training_step(batch, batch_idx)

    import lightning.pytorch as lightning
    import torch

    class Theirs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch_mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for p in self.net.parameters():
                p.data.clamp_(-0.2, 0.2)
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1].long())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    check(Clipped, DATA, beside=Beside(Theirs, {"net.Dense_0": "net.0", "net.Dense_1": "net.2"}))
