"""`detect_anomaly` and `checkify`: who is to blame, at which step, and the batch that shows it again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from support.models import Loader

import jaxlightning
from jaxlightning import LightningModule, Trainer, TrainState
from jaxlightning.utilities import load_batch
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(4)(x)
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(x))


class Module(LightningModule):
    def __init__(self, bad_loss_at: int = -1) -> None:
        super().__init__()
        self.net = Net()
        self.bad_loss_at = bad_loss_at

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = jnp.square(self.net(batch["x"])).mean()
        return loss + jnp.where(batch_idx == self.bad_loss_at, jnp.nan, 0.0)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def batches(bad: int = -1) -> list[Any]:
    rng = np.random.default_rng(0)
    made = [{"x": rng.normal(size=(8, 3)).astype(np.float32), "name": "a batch"} for _ in range(5)]
    if bad >= 0:
        made[bad]["x"][2, 1] = np.nan
    return made


class PlantInParameter(jaxlightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == 2:
            params = trainer.state.params
            params["net"]["Dense_1"]["kernel"] = params["net"]["Dense_1"]["kernel"].at[1, 0].set(jnp.inf)
            trainer.state.params = params


@pytest.mark.parametrize(
    ("place", "leaf"),
    [
        ("parameter", "the parameter net/Dense_1/kernel is not finite in training batch 2"),
        ("input", "the batch leaf x is not finite in training batch 3"),
        ("loss", "the loss is not finite in training batch 1"),
    ],
)
def test_the_report_names_what_went_wrong_first_and_keeps_the_batch(place: str, leaf: str, tmp_path: Path) -> None:
    module = Module(bad_loss_at=1 if place == "loss" else -1)
    data = batches(bad=3 if place == "input" else -1)
    callbacks = [PlantInParameter()] if place == "parameter" else []
    trainer = Trainer(
        max_epochs=1,
        detect_anomaly=True,
        default_root_dir=tmp_path,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        **QUIET,
    )
    with pytest.raises(RuntimeError, match=leaf) as caught:
        trainer.fit(module, Loader(data))
    path = Path(re.search(r"The batch is in (\S+):", str(caught.value)).group(1))
    batch = load_batch(path)
    step = int(re.search(r"training batch (\d+)", leaf).group(1))
    assert batch["name"] == "a batch"
    np.testing.assert_array_equal(batch["x"], data[step]["x"])
    # The saved batch shows it again: with the parameters that the trainer kept, and at the same step for the loss.
    state = trainer.state
    variables = {"params": state.params["net"], **state.variables["net"]}
    out, _ = Net().apply(variables, batch["x"], train=True, mutable=["batch_stats"])
    assert np.isfinite(np.asarray(out)).all() == (place == "loss")
    if place != "parameter":  # what was kept is from before: parameters and statistics alike
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(variables))


def test_a_gradient_alone_is_named(tmp_path: Path) -> None:
    class Root(Module):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return jnp.sqrt(jnp.square(self.net(batch["x"])).sum() * 0.0)

    trainer = Trainer(max_epochs=1, detect_anomaly=True, default_root_dir=tmp_path, num_sanity_val_steps=0, **QUIET)
    with pytest.raises(RuntimeError, match=r"the gradient of net/\S+ is not finite in training batch 0"):
        trainer.fit(Root(), Loader(batches()))


def test_a_hand_written_step_is_watched_too(tmp_path: Path) -> None:
    net = nn.Dense(1)
    params = net.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(net.apply({"params": p}, batch)).mean())(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    data = [batch["x"] for batch in batches(bad=3)]
    with pytest.raises(RuntimeError, match=r"the batch leaf \(the batch itself\) is not finite in training batch 3"):
        jaxlightning.fit(
            state, data, train_step=step, num_epochs=1, detect_anomaly=True, default_root_dir=tmp_path, **QUIET
        )
    assert step(state, data[0])[1]["loss"] > 0
    bad = state.replace(params={**params, "bias": jnp.array([jnp.nan])})
    with pytest.raises(RuntimeError, match="the parameter bias is not finite"):
        jaxlightning.fit(
            bad, [np.ones((8, 3), np.float32)], train_step=step, num_epochs=1, detect_anomaly=True,
            default_root_dir=tmp_path, **QUIET,
        )  # fmt: skip


def test_batches_of_any_nesting_are_saved_as_they_are(tmp_path: Path) -> None:
    from jaxlightning.compile.anomaly import save_batch

    batch = ({"a": np.arange(3), "b": [jnp.ones(2, jnp.bfloat16), None, "text", 3]}, np.float32(2.5), (True,))
    save_batch(tmp_path / "b.npz", batch)
    got = load_batch(tmp_path / "b.npz")
    assert isinstance(got, tuple)
    np.testing.assert_array_equal(got[0]["a"], batch[0]["a"])
    np.testing.assert_array_equal(got[0]["b"][0], np.ones(2))
    assert got[0]["b"][1:] == [None, "text", 3]
    assert got[1] == np.float32(2.5)
    assert got[2] == (True,)


# --- checkify ---


class Checked(Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.what == "user":
            checkify.check(batch_idx < 2, "batch {i} is one too many", i=jnp.asarray(batch_idx))
        elif self.what == "nan":
            loss = loss + jnp.log(1.0 - jnp.asarray(batch_idx, jnp.float32))
        elif self.what == "div":
            loss = loss + 1.0 / (2.0 - jnp.asarray(batch_idx, jnp.float32))
        elif self.what == "oob":
            loss = loss + batch["x"][:, 0][jnp.asarray(batch_idx) + 6]
        return loss


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("user", "batch 2 is one too many"),
        ("nan", "nan generated"),
        ("div", "division by zero"),
        ("oob", "out-of-bounds"),
    ],
)
def test_checks_raise_on_the_host_with_their_message(what: str, message: str, tmp_path: Path) -> None:
    data = [{"x": batch["x"]} for batch in batches()]
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": tmp_path, "num_sanity_val_steps": 0, **QUIET}
    trainer = Trainer(checkify=what, **options)
    with pytest.raises(Exception, match=message) as caught:
        trainer.fit(Checked(what), Loader(data))
    assert any("Checked train step" in note for note in caught.value.__notes__)
    assert trainer.global_step == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.state.params))


def test_checks_change_nothing_where_there_is_nothing_to_find(tmp_path: Path) -> None:
    data = [{"x": batch["x"]} for batch in batches()]
    found = []
    for flag in (None, "nan,div,oob,user"):
        trainer = Trainer(max_epochs=2, checkify=flag, default_root_dir=tmp_path, num_sanity_val_steps=0, **QUIET)
        trainer.fit(Module(), Loader(data))
        found.append(trainer.state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7), *found)


def test_checks_of_a_hand_written_step(tmp_path: Path) -> None:
    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        checkify.check(batch.sum() < 10, "the sum is {s}", s=batch.sum())
        return params, batch.sum()

    data = [np.ones(3, np.float32), np.full(3, 5, np.float32)]
    with pytest.raises(Exception, match=r"the sum is 15"):
        jaxlightning.fit(
            {"w": jnp.ones(2)}, data, train_step=step, num_epochs=1, checkify="user", default_root_dir=tmp_path, **QUIET
        )


def test_a_check_without_the_flag_says_which_flag(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, num_sanity_val_steps=0, **QUIET)
    with pytest.raises(Exception, match="not functionalized") as caught:
        trainer.fit(Checked("user"), Loader([{"x": batch["x"]} for batch in batches()]))
    assert any('Trainer(checkify="user")' in note for note in caught.value.__notes__)


def test_unknown_checks_and_checks_of_uncompiled_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="'zero'"):
        Trainer(checkify="nan,zero")
    with pytest.raises(MisconfigurationException, match="jit=False"):
        Trainer(checkify=True, jit=False)
