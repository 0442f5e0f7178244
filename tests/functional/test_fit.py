"""What `fit` does around the step: logs, evaluation, checkpoints, resuming, hyper-parameters, callbacks, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning
from jaxlightning import TrainState
from jaxlightning.functional import load_state
from jaxlightning.loggers import CSVLogger
from jaxlightning.utilities.exceptions import MisconfigurationException

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
N = 6


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(nn.relu(x)))


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 20, 5)).astype(np.float32)
    return [(each, (each @ rng.normal(size=(5, 3)).astype(np.float32)).argmax(-1)) for each in x]


NET = Net()
# One object for all: another one would compile every step again.
TX = optax.inject_hyperparams(optax.adam)(jaxlightning.lr_schedule(1e-2, N, 4, 1))


def new_state() -> Any:
    variables = NET.init(jax.random.key(0), jnp.ones((1, 5)))
    return TrainState.create(apply_fn=NET.apply, tx=TX, key=jax.random.key(3), **variables)


@jax.jit
def train_step(state: Any, batch: Any, opt_state: Any) -> Any:
    x, y = batch

    def loss_fn(params: Any) -> Any:
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            x,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": state.step_key()},
        )
        loss_1 = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        loss_2 = jnp.square(logits).mean()
        return loss_1 + loss_2, ({"loss": loss_1 + loss_2, "loss_1": loss_1, "loss_2": loss_2}, updates)

    (_, (losses, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, losses, state.opt_state


def logits_of(state: Any, x: Any) -> jax.Array:
    return state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, x)


@jax.jit
def eval_step(state: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean(logits_of(state, x).argmax(-1) == y)


def run(batches: Any, root: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "train_step": train_step,
        "eval_step": eval_step,
        "num_epochs": 3,
        "log_name": "run",
        "log_every_n_steps": 2,
        **QUIET,
    }
    return jaxlightning.fit(
        new_state(), batches, batches, default_root_dir=root, **(defaults | options),
    )  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    same = jax.tree.map(lambda x, y: np.array_equal(_data(x), _data(y)), a, b)
    return all(jax.tree.leaves(same))


def _data(leaf: Any) -> Any:
    typed = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if typed else leaf


@pytest.fixture(scope="module")
def by_hand(batches: list[Any]) -> Any:
    state = new_state()
    opt_state = state.opt_state
    losses = []
    for _ in range(3):
        for batch in batches:
            state, logs, opt_state = train_step(state, batch, opt_state)
            losses.append(float(logs["loss"]))
    return state, losses


def read_board(folder: Path) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_it_is_the_hand_written_loop_bit_by_bit(batches: list[Any], by_hand: Any, tmp_path: Path) -> None:
    assert equal(run(batches, tmp_path), by_hand[0])


def test_tensorboard_gets_every_loss_the_learning_rate_and_the_accuracy(
    batches: list[Any], by_hand: Any, tmp_path: Path
) -> None:
    run(batches, tmp_path, hparams={"lr": 1e-2, "width": 8})
    board = read_board(tmp_path / "run" / "version_0")
    tags = set(board.Tags()["scalars"])
    assert {"loss", "loss_1", "loss_2", "learning_rate", "accuracy", "best_accuracy"} <= tags
    losses = {event.step: event.value for event in board.Scalars("loss")}
    assert sorted(losses) == list(range(1, 3 * N, 2))
    np.testing.assert_allclose([losses[s] for s in sorted(losses)], by_hand[1][1::2], rtol=1e-6)
    schedule = jaxlightning.lr_schedule(1e-2, N, 4, 1)
    rates = {event.step: event.value for event in board.Scalars("learning_rate")}
    np.testing.assert_allclose([rates[s] for s in sorted(rates)], [schedule(s) for s in sorted(rates)], rtol=1e-5)
    assert len(board.Scalars("accuracy")) == 3
    (best,) = [event.value for event in board.Scalars("best_accuracy")]
    assert best == max(event.value for event in board.Scalars("accuracy"))
    assert "lr: 0.01" in (tmp_path / "run" / "version_0" / "hparams.yaml").read_text()


def test_the_accuracy_is_the_mean_over_all_samples(batches: list[Any], tmp_path: Path) -> None:
    uneven = [*batches[:-1], tuple(part[:7] for part in batches[-1])]
    seen: dict[str, float] = {}

    class Watch(jaxlightning.Callback):
        def on_train_end(self, trainer, module) -> None:
            seen.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    state = jaxlightning.fit(
        new_state(), batches, uneven, train_step=train_step, eval_step=eval_step, num_epochs=1, callbacks=Watch(),
        logger=False, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET,
    )  # fmt: skip
    hits = [np.asarray(logits_of(state, x).argmax(-1)) == y for x, y in uneven]
    assert seen["accuracy"] == pytest.approx(np.concatenate(hits).mean(), rel=1e-6)


def test_the_best_and_the_last_checkpoint_restore_the_state(batches: list[Any], by_hand: Any, tmp_path: Path) -> None:
    state = run(batches, tmp_path)
    folder = tmp_path / "run" / "version_0" / "checkpoints"
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    assert names[1] == "last.ckpt"
    assert names[0].startswith("best-epoch=")
    last = load_state(folder / "last.ckpt", new_state())
    assert equal(last, state)
    best = load_state(folder / names[0], new_state())
    scores = [float(event.value) for event in read_board(folder.parent).Scalars("accuracy")]
    got = np.mean([float(eval_step(best, batch)) for batch in batches])
    assert got == pytest.approx(max(scores), abs=1e-6)


def test_a_checkpoint_opens_with_orbax_alone(batches: list[Any], tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    state = run(batches, tmp_path, num_epochs=1)
    folder = tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt" / "params"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(folder)
    assert equal(restored["model"], jax.tree.map(np.asarray, state.params))


def test_a_resumed_run_ends_bit_by_bit_like_one_that_never_stopped(
    batches: list[Any], by_hand: Any, tmp_path: Path
) -> None:
    run(batches, tmp_path, num_epochs=2)
    resumed = run(batches, tmp_path, num_epochs=3, ckpt_path="last")
    assert equal(resumed, by_hand[0])
    assert not (tmp_path / "run" / "version_1").exists()  # the curves go on where they were
    board = read_board(tmp_path / "run" / "version_0")
    assert [event.step for event in board.Scalars("loss")] == list(range(1, 3 * N, 2))


def test_a_resume_in_the_middle_of_an_epoch_continues_keys_and_optimizer(batches: list[Any], tmp_path: Path) -> None:
    tx = optax.adam(1e-2)
    params = NET.init(jax.random.key(0), jnp.ones((1, 5)))["params"]["Dense_0"]

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            noise = jax.random.normal(key, batch[0].shape)
            return jnp.square((batch[0] + noise) @ params["kernel"] + params["bias"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    class Stop(jaxlightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            if trainer.global_step == N + 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")
                trainer.should_stop = True

    options = {"train_step": step, "optimizer": tx, "logger": False, "enable_checkpointing": False, **QUIET}
    key = jax.random.key(5)
    whole = jaxlightning.fit(params, batches, num_epochs=2, key=key, **options)
    jaxlightning.fit(params, batches, num_epochs=2, key=key, callbacks=Stop(), **options)
    # Neither the parameters nor the key nor the optimizer that are given now may matter.
    other = jax.tree.map(jnp.zeros_like, params)
    resumed = jaxlightning.fit(
        other, batches, num_epochs=2, key=jax.random.key(0), ckpt_path=tmp_path / "middle.ckpt", **options
    )
    assert equal(resumed, whole)


def test_last_without_a_checkpoint_says_so_and_starts_anew(batches: list[Any], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no last checkpoint"):
        run(batches, tmp_path, num_epochs=1, ckpt_path="last")


def test_evaluation_every_second_epoch(batches: list[Any], tmp_path: Path) -> None:
    run(batches, tmp_path, num_epochs=4, eval_freq=2)
    board = read_board(tmp_path / "run" / "version_0")
    assert [event.step for event in board.Scalars("accuracy")] == [2 * N - 1, 4 * N - 1]


def test_a_dictionary_of_metrics_and_a_monitor(batches: list[Any], tmp_path: Path) -> None:
    @jax.jit
    def metrics(state: Any, batch: Any) -> Any:
        logits = logits_of(state, batch[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
        return {"loss": loss, "top": jnp.mean(logits.argmax(-1) == batch[1])}

    run(batches, tmp_path, eval_step=metrics, monitor="val_loss")
    board = read_board(tmp_path / "run" / "version_0")
    # `loss` is the training loss already, so the other one got a prefix.
    assert {"loss", "val_loss", "top", "best_val_loss"} <= set(board.Tags()["scalars"])
    (best,) = [event.value for event in board.Scalars("best_val_loss")]
    assert best == min(event.value for event in board.Scalars("val_loss"))
    with pytest.raises(MisconfigurationException, match=r"gives \['top', 'val_loss'\]"):
        run(batches, tmp_path, eval_step=metrics, monitor="accuracy")


def test_callbacks_and_loggers_are_those_of_the_trainer(batches: list[Any], tmp_path: Path) -> None:
    stop = jaxlightning.callbacks.EarlyStopping("accuracy", mode="max", patience=1, min_delta=2.0)
    monitor = jaxlightning.callbacks.LearningRateMonitor(logging_interval="epoch")
    seen = []

    class Watch(jaxlightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            seen.append(sorted(outputs))

    logger = CSVLogger(tmp_path, name="csv")
    state = run(batches, tmp_path, num_epochs=9, callbacks=[stop, monitor, Watch()], logger=logger)
    assert int(state.step) == 2 * N  # no accuracy can rise by 2
    assert seen == [["loss", "loss_1", "loss_2"]] * (2 * N)
    assert "loss_2" in (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    (rates,) = monitor.lrs.values()
    schedule = jaxlightning.lr_schedule(1e-2, N, 4, 1)
    np.testing.assert_allclose(rates, [schedule(0), schedule(N - 1)], rtol=1e-5)


def test_a_trainer_of_ones_own(batches: list[Any], by_hand: Any, tmp_path: Path) -> None:
    trainer = jaxlightning.Trainer(
        max_epochs=3,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=2,
        **QUIET,
    )
    state = jaxlightning.fit(new_state(), batches, batches, train_step=train_step, eval_step=eval_step, trainer=trainer)
    assert equal(state, by_hand[0])
    assert float(trainer.callback_metrics["accuracy"]) > 0
    with pytest.raises(MisconfigurationException, match="max_steps"):
        jaxlightning.fit(new_state(), batches, train_step=train_step, trainer=trainer, max_steps=3)


def test_eight_devices_give_the_parameters_of_one_device(batches: list[Any], tmp_path: Path) -> None:
    def plain(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.square(logits_of(state.replace(params=params), batch[0])).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    # The batch of a loader is for one device: eight devices see eight of them at once.
    whole = [tuple(np.concatenate(parts) for parts in zip(*[batches[i % N] for i in range(8)], strict=True))] * 2
    pieces = [batches[i % N] for i in range(8)] * 2
    options = {"train_step": plain, "num_epochs": 1, "logger": False, "enable_checkpointing": False, **QUIET}
    one = jaxlightning.fit(new_state(), whole, default_root_dir=tmp_path, **options)
    eight = jaxlightning.fit(new_state(), pieces, default_root_dir=tmp_path, devices=8, **options)
    assert len(jax.tree.leaves(eight.params)[0].sharding.device_set) == 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), one.params, eight.params)


def test_data_without_a_step_for_it_is_refused(batches: list[Any]) -> None:
    with pytest.raises(MisconfigurationException, match="eval_step"):
        jaxlightning.fit(new_state(), batches, batches, train_step=train_step)


def test_nothing_is_read_from_the_device_between_log_points(
    batches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    plain = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: (reads.append(1), plain(tree))[1])
    jaxlightning.fit(
        new_state(), batches * 10, train_step=train_step, num_epochs=1, log_every_n_steps=20, default_root_dir=tmp_path,
        enable_checkpointing=False, **QUIET,
    )  # fmt: skip
    assert 0 < len(reads) <= 2 * 3 + 1  # three log points, and what is public at the end


def test_a_wrong_checkpoint_is_refused_by_path(batches: list[Any], tmp_path: Path) -> None:
    run(batches, tmp_path, num_epochs=1)
    wrong = new_state()
    wrong = wrong.replace(params={**wrong.params, "Dense_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(8)}})
    path = tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt"
    with pytest.raises(RuntimeError, match=r"Dense_0/kernel is \(5, 8\) in the checkpoint, \(2, 2\) here"):
        load_state(path, wrong)


def test_the_flax_state_has_a_key_for_every_step() -> None:
    state = new_state()
    assert state.batch_stats is not None
    keys = {tuple(np.asarray(jax.random.key_data(state.replace(step=i).step_key(s)))) for i in range(3) for s in (0, 1)}
    assert len(keys) == 6
