"""Step bodies with the habits of real code: helpers, properties, nested containers, counters, early returns.

Each is run compiled and with `jit=False`; what it logged, its parameters and what it kept on the module are equal.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.verbatim import equal, run

import jaxlightning as pl

pytestmark = [pytest.mark.slow]

RNG = np.random.RandomState(0)
DATA = (RNG.randn(16, 3), RNG.randn(16, 2))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(nn.Dense(4)(x))
        return nn.Dense(2)(x)


class Base(pl.LightningModule):
    """Regression; `body` is the case's step, `prepare` what its `__init__` does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP()
        self.prepare()

    def prepare(self) -> None:
        pass

    def body(self, batch: Any, i: Any) -> Any:
        raise NotImplementedError

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return ((self.net(x) - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        return self.body(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


class Manual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return pl.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


CASES: dict[str, Any] = {}


def case(
    base: type = Base, shown: tuple[str, ...] = (), prepare: Callable[[Any], Any] | None = None, **members: Any
) -> Callable[[Any], Any]:
    """Adds a step body; `shown` are attributes to compare at the end."""

    def add(body: Any) -> Any:
        members["body"] = body
        if prepare is not None:
            members["prepare"] = prepare
        CASES[body.__name__] = (type("Case", (base,), members), shown)
        return body

    return add


@dataclasses.dataclass
class Stats:
    total: Any = 0.0
    n: int = 0
    hist: dict[str, Any] = dataclasses.field(default_factory=dict)


class Mode(enum.Enum):
    WARM = 1
    HOT = 2


class Helper:
    """Works for a module that it holds."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.calls = 0

    def work(self, loss: Any, i: Any) -> Any:
        self.owner.log("helped", loss * 2)
        self.calls += 1
        if i % 2 == 0:
            self.owner.outs.append(loss)
        return loss * 1.5


@case(shown=("st",), prepare=lambda s: setattr(s, "st", Stats(jnp.zeros(()), 0, {"a": jnp.ones(2)})))
def dataclass_nested(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.st.total = self.st.total + loss
    self.st.n += 1
    self.st.hist["a"] = self.st.hist["a"] * 0.9 + loss
    self.log("t", self.st.total / self.st.n)
    return loss


@case(shown=("st",), prepare=lambda s: setattr(s, "st", Stats(0.0, 0, {})))
def dataclass_from_number(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.st.total += loss
    self.st.n += 1
    self.log("t", self.st.total)
    return loss


@case(shown=("outs",), prepare=lambda s: (setattr(s, "outs", []), setattr(s, "helper", Helper(s))))
def helper_object(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    return self.helper.work(loss, i)


@case(
    shown=("_ema",),
    prepare=lambda s: setattr(s, "_ema", jnp.zeros(())),
    ema_prop=property(lambda s: s._ema, lambda s, v: setattr(s, "_ema", 0.9 * s._ema + 0.1 * v)),
)
def prop(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.ema_prop = loss
    self.log("e", self.ema_prop)
    return loss


@case(shown=("a0", "a1", "a2"), prepare=lambda s: [setattr(s, f"a{k}", jnp.zeros(())) for k in range(3)])
def setattr_loop(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    for k in range(3):
        setattr(self, f"a{k}", getattr(self, f"a{k}") + loss * k)
    self.log_dict({f"a{k}": getattr(self, f"a{k}") for k in range(3)})
    return loss


@case(shown=("d",), prepare=lambda s: setattr(s, "d", {"n": 0, "ema": jnp.zeros(())}))
def counters_in_dict(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.d["n"] += 1
    self.d["ema"] = 0.9 * self.d["ema"] + 0.1 * loss
    return loss / self.d["n"]


@case(prepare=lambda s: setattr(s, "mode", Mode.WARM))
def enum_attr(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    return loss * 2 if self.mode is Mode.WARM else loss


@case()
def early_none(self: Any, batch: Any, i: Any) -> Any:
    if i % 3 == 1:
        return None
    return self.loss(batch)


@case()
def try_except(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    try:
        self.missing_thing
    except AttributeError:
        loss = loss * 1.1
    try:
        self.trainer.callback_metrics["no"]
    except KeyError:
        loss = loss + 0.5
    return loss


@case(prepare=lambda s: setattr(s, "f", functools.partial(lambda a, b: a * b, 2.0)))
def partial_attr(self: Any, batch: Any, i: Any) -> Any:
    return self.f(self.loss(batch))


@case()
def fstring_key(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.log(f"loss_{i % 2}", loss)
    self.log_dict({f"l{k}": loss * k for k in range(2)})
    return loss


@case()
def metrics_same_step(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.log("x", loss)
    v = self.trainer.callback_metrics["x"]
    self.log("y", v * 2, on_step=True, on_epoch=True)
    self.log("z", self.trainer.callback_metrics["y_step"])
    return loss + v


@case(shown=("best",), prepare=lambda s: setattr(s, "best", jnp.inf))
def best_so_far(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.best = jnp.minimum(self.best, loss)
    self.log("b", self.best)
    return loss


@case(shown=("best",), prepare=lambda s: setattr(s, "best", float("inf")))
def best_float_inf(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.best = jnp.minimum(self.best, jax.lax.stop_gradient(loss))
    return loss


@case(shown=("hist",), prepare=lambda s: setattr(s, "hist", collections.defaultdict(list)))
def history_dict(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.hist["train"].append(loss)
    self.hist[f"e{self.current_epoch}"].append({"i": i, "l": loss})
    return loss


@case(shown=("rows",), prepare=lambda s: setattr(s, "rows", []))
def rows_of_dicts(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.rows.append({"step": self.global_step, "epoch": self.current_epoch, "l": loss, "name": f"b{i}"})
    self.rows += [(i, loss)]
    return loss


@case(shown=("buf",), prepare=lambda s: s.register_buffer("buf", jnp.zeros((4,))))
def ring_buffer(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    p = i % 4
    self.buf = self.buf.at[p].set(jax.lax.stop_gradient(loss))
    return loss + 0.1 * self.buf.mean()


@case(shown=("lst",), prepare=lambda s: setattr(s, "lst", [jnp.zeros(()), jnp.zeros(2)]))
def list_item_assign(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.lst[0] = self.lst[0] + loss
    self.lst[1] = self.lst[1] * 0.5 + 1
    return loss


@case(shown=("m",), prepare=lambda s: setattr(s, "m", {"a": {"b": [jnp.zeros(()), {"c": jnp.ones(2)}]}}))
def deep_nest(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    self.m["a"]["b"][1]["c"] = self.m["a"]["b"][1]["c"] + loss
    self.m["a"]["b"][0] = loss
    return loss


@case(shown=("queue",), prepare=lambda s: setattr(s, "queue", []))
def queue_pop(self: Any, batch: Any, i: Any) -> Any:
    loss = jax.lax.stop_gradient(self.loss(batch))
    self.queue.append(loss)
    if len(self.queue) > 3:
        self.queue.pop(0)
    return self.loss(batch) + 0.1 * sum(self.queue) / len(self.queue)


@case()
def while_and_chain(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    k = 0
    while k < i and k < 2:
        k += 1
    if 0 < i <= 2 and not self.trainer.is_last_batch:
        loss = loss * 1.5
    return loss * (k + 1)


@case(shown=("t",), prepare=lambda s: setattr(s, "t", (jnp.zeros(()), 0)))
def tuple_state(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    a, n = self.t
    self.t = (a + loss, n + 1)
    return loss


@case(shown=("seen",), prepare=lambda s: setattr(s, "seen", set()))
def set_add(self: Any, batch: Any, i: Any) -> Any:
    self.seen.add(int(i) % 2)
    return self.loss(batch)


@case(shown=("last_loss",))
def new_attr(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    if hasattr(self, "last_loss"):
        self.log("delta", loss - self.last_loss)
    else:
        self.log("delta", 0.0)
    self.last_loss = loss
    return loss


@case(shown=("k",), prepare=lambda s: setattr(s, "k", 0))
def counter_try(self: Any, batch: Any, i: Any) -> Any:
    try:
        self.k += 1
    finally:
        loss = self.loss(batch)
    match self.k % 3:
        case 0:
            return loss * 2
        case 1:
            return loss
        case _:
            return loss * 3


@case(shown=("lr_mult",), prepare=lambda s: setattr(s, "lr_mult", 1.0))
def decay(self: Any, batch: Any, i: Any) -> Any:
    self.lr_mult *= 0.9
    self.lr_mult = max(self.lr_mult, 0.7)
    return self.loss(batch) * self.lr_mult


def logging_its_loss(fn: Any) -> Any:
    @functools.wraps(fn)
    def inner(self: Any, *a: Any, **k: Any) -> Any:
        out = fn(self, *a, **k)
        self.log("wrapped", out)
        return out

    return inner


@case()
@logging_its_loss
def decorated(self: Any, batch: Any, i: Any) -> Any:
    return self.loss(batch)


@case(shown=("outs",), prepare=lambda s: setattr(s, "outs", []))
def comp_append(self: Any, batch: Any, i: Any) -> Any:
    ls = [self.loss(batch) * k for k in (1, 2)]
    [self.outs.append(v) for v in ls]
    self.outs.extend(v for v in ls)
    return ls[0]


@case(shown=("params_ema",), prepare=lambda s: setattr(s, "params_ema", None))
def ema_of_params(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    p = self.net.params
    self.params_ema = (
        jax.tree.map(lambda a: a, p)
        if self.params_ema is None
        else jax.tree.map(lambda e, a: 0.9 * e + 0.1 * a, self.params_ema, p)
    )
    return loss


@case(shown=("s",), prepare=lambda s: s.register_parameter("s", jnp.ones(())))
def raw_param(self: Any, batch: Any, i: Any) -> Any:
    return self.loss(batch) * self.s


@case(shown=("flag",), prepare=lambda s: setattr(s, "flag", 0))
def flag_number(self: Any, batch: Any, i: Any) -> Any:
    loss = self.loss(batch)
    if not self.flag:
        self.flag = 1
        loss = loss * 2
    return loss


# manual
@case(Manual, ("s",), prepare=lambda s: s.register_parameter("s", jnp.ones(())))
def man_raw_param_twice(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    for k in range(2):
        loss = 0.1 * self.loss(batch) * self.s**2
        o.zero_grad()
        self.manual_backward(loss)
        o.step()
        self.log(f"l{k}", loss)
        self.log(f"s{k}", self.s)


@case(Manual, ("e", "n"), prepare=lambda s: (setattr(s, "e", jnp.zeros(())), setattr(s, "n", 0)))
def man_writes_before_backward(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    self.n += 1
    loss = self.loss(batch)
    self.e = self.e * 0.9 + jax.lax.stop_gradient(loss)
    o.zero_grad()
    self.manual_backward(loss * (1 + self.n) + 0 * self.e)
    o.step()
    self.log("e", self.e)
    self.outs.append(loss) if hasattr(self, "outs") else None


@case(Manual, ("outs",), prepare=lambda s: setattr(s, "outs", []))
def man_appends(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    for _ in range(2):
        loss = self.loss(batch)
        self.outs.append(loss)
        o.zero_grad()
        self.manual_backward(loss)
        o.step()


@case(Manual)
def man_accum(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    self.manual_backward(self.loss(batch) / 2)
    if (i + 1) % 2 == 0:
        self.clip_gradients(o, gradient_clip_val=0.1)
        o.step()
        o.zero_grad()


@case(Manual)
def man_warm(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    if self.global_step < 4:
        for pg in o.param_groups:
            pg["lr"] = (self.global_step + 1) / 4 * 0.1
    loss = self.loss(batch)
    o.zero_grad()
    self.manual_backward(loss)
    o.step()
    self.log("lr", o.param_groups[0]["lr"])
    self.log("l", loss)


@case(Manual)
def man_lr_times(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    loss = self.loss(batch)
    o.zero_grad()
    self.manual_backward(loss)
    o.step()
    o.param_groups[0]["lr"] *= 0.9
    o.param_groups[0]["lr"] = max(o.param_groups[0]["lr"], 0.05)
    self.log("lr", o.param_groups[0]["lr"])
    self.log("l", loss)


@case(Manual)
def man_nan_guard(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    loss = self.loss(batch)
    loss = jnp.where(jnp.isfinite(loss), loss, 0.0)
    o.zero_grad()
    self.manual_backward(loss)
    o.step()
    return loss


@case(Manual)
def man_try(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    try:
        loss = self.loss(batch)
        o.zero_grad()
        self.manual_backward(loss)
        o.step()
    except Exception:
        raise
    return {"loss": loss, "extra": i}


@case(Manual)
def man_none_first(self: Any, batch: Any, i: Any) -> Any:
    if i == 0:
        return
    o = self.optimizers()
    loss = self.loss(batch)
    o.zero_grad()
    self.manual_backward(loss)
    o.step()


@case(Manual)
def man_wrapped_optimizer(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers(use_pl_optimizer=False)
    loss = self.loss(batch)
    o.zero_grad()
    self.manual_backward(loss)
    o.step()
    self.log("l", loss)


@case(Manual)
def man_metrics(self: Any, batch: Any, i: Any) -> Any:
    o = self.optimizers()
    loss = self.loss(batch)
    self.log("x", loss)
    o.zero_grad()
    self.manual_backward(loss + self.trainer.callback_metrics["x"])
    o.step()


class Counting(pl.LightningModule):
    """A mixin that counts and logs around the step."""

    seen = 0

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        out = super().training_step(batch, batch_idx)
        self.seen += 1
        self.log("seen", float(self.seen % 2))
        return out


class Mixed(Counting, Base):
    def body(self, batch: Any, i: Any) -> Any:
        return self.loss(batch)


CASES["mixin_and_super"] = (Mixed, ("seen",))


def same(a: Any, b: Any, path: str) -> None:
    """Equal in type and structure, and in numbers up to rounding."""
    if dataclasses.is_dataclass(a):
        a, b = vars(a), vars(b)
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert type(a) is type(b), path
        assert len(a) == len(b), path
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            same(left, right, f"{path}[{number}]")
    elif isinstance(a, str | set) or a is None:
        assert a == b, path
    else:
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8, err_msg=path)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_as_people_write_it(name: str) -> None:
    make, shown = CASES[name]
    compiled, eager = (run(make, DATA, steps=8, jit=jit) for jit in (True, False))
    equal(compiled, eager, 1e-8)
    for attribute in shown:
        same(getattr(compiled.module, attribute), getattr(eager.module, attribute), attribute)
