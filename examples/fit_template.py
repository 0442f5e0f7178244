"""A hand-written Flax and optax step through `jaxlightning.fit`, on torchvision or on TensorFlow Datasets.

Example:
    python examples/fit_template.py --source torchvision --epochs 5
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import _data
from jaxlightning import TrainState, fit, lr_schedule


class Model(nn.Module):
    def setup(self) -> None:
        self.conv1 = nn.Conv(features=16, kernel_size=(3, 3))
        self.norm = nn.BatchNorm()
        self.drop = nn.Dropout(rate=0.5)
        self.dense1 = nn.Dense(features=10)

    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.relu(self.norm(self.conv1(x), use_running_average=not train))
        x = self.drop(x, deterministic=not train)
        return self.dense1(x.reshape((x.shape[0], -1)))


@jax.jit
def train_step(state: TrainState, batch: Any, opt_state: Any) -> Any:
    x, y = batch
    target = jax.nn.one_hot(y, 10)

    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": state.step_key()}
        logits, updates = state.apply_fn(variables, x, train=True, mutable=["batch_stats"], rngs=rngs)
        loss_1 = optax.softmax_cross_entropy(logits, target).mean()
        loss_2 = jnp.mean(jnp.square(logits - target))
        loss = loss_1 + loss_2
        return loss, ({"loss": loss, "loss_1": loss_1, "loss_2": loss_2}, updates)

    (_, (loss_dict, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, loss_dict, state.opt_state


@jax.jit
def eval_step(state: TrainState, batch: Any) -> jax.Array:
    x, y = batch
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, x, train=False)
    return jnp.equal(jnp.argmax(logits, -1), y).mean()


def torchvision_data(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the training and the test `DataLoader`."""
    import torch
    import torchvision

    home = _data.find_fashion_mnist(args.data)
    if home is None:
        train, _, test = _data.torch_loaders(args)
        return train, test
    sets = [
        torchvision.datasets.FashionMNIST(root=home, train=train, transform=torchvision.transforms.ToTensor())
        for train in (True, False)
    ]
    if args.limit is not None:
        sets = [torch.utils.data.Subset(part, range(args.limit)) for part in sets]
    loader = torch.utils.data.DataLoader
    torch.manual_seed(args.seed)
    return (
        loader(sets[0], batch_size=args.batch_size, shuffle=True),
        loader(sets[1], batch_size=_data.EVAL_BATCH),
    )


def build_tfds(folder: Path, args: argparse.Namespace) -> None:
    """Write the images as a TensorFlow data set named `fashion_local`, from files that are on this machine."""
    import tensorflow_datasets as tfds

    images = _data.load_images(args.data, args.limit)

    class FashionLocal(tfds.core.GeneratorBasedBuilder):
        """Fashion-MNIST from local files."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {
                "train": self._generate_examples(images.train_x, images.train_y),
                "test": self._generate_examples(images.test_x, images.test_y),
            }

        def _generate_examples(self, x: np.ndarray, y: np.ndarray) -> Iterator[Any]:
            for i in range(len(x)):
                yield i, {"image": x[i][..., None], "label": int(y[i])}

    config = tfds.download.DownloadConfig(try_download_gcs=False)
    FashionLocal(data_dir=folder).download_and_prepare(download_config=config)


def tfds_data(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the training and the test pipeline of a data set that is built locally the first time."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    folder = Path(args.output) / "tfds"
    if not (folder / "fashion_local").is_dir():
        build_tfds(folder, args)

    def load(split: str) -> Any:
        ds = tfds.load("fashion_local", split=split, as_supervised=True, data_dir=folder)
        return ds.map(lambda x, y: (tf.cast(x, tf.float32) / 255, y))

    train = load("train").shuffle(60_000, seed=args.seed).batch(args.batch_size, drop_remainder=True)
    return train.prefetch(2), load("test").batch(_data.EVAL_BATCH)


def new_state(steps_per_epoch: int, epochs: int, seed: int = 0) -> TrainState:
    """Return the state at the start."""
    lr_fn = lr_schedule(base_lr=1e-3, steps_per_epoch=steps_per_epoch, epochs=epochs, warmup_epochs=1)
    model = Model()
    key = jax.random.PRNGKey(seed)
    var = model.init(key, jnp.ones((1, 28, 28, 1)), train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=var["params"],
        batch_stats=var["batch_stats"],
        tx=optax.inject_hyperparams(optax.adam)(lr_fn),
        key=key,
    )


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the last test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser, batch_size=32)
    parser.add_argument("--source", choices=("torchvision", "tfds"), default="torchvision", help="the data's library")
    args = parser.parse_args(argv)
    train_ds, test_ds = torchvision_data(args) if args.source == "torchvision" else tfds_data(args)

    state = fit(
        new_state(len(train_ds), args.epochs, args.seed),
        train_ds,
        test_ds,
        train_step=train_step,
        eval_step=eval_step,
        eval_freq=1,
        num_epochs=args.epochs,
        log_name="fashion",
        hparams={"base_lr": 1e-3, "batch_size": args.batch_size},
        channels_last=args.source == "torchvision",  # torchvision's NCHW images become the NHWC of flax.linen.Conv
        log_every_n_steps=10,
        default_root_dir=args.output,
        enable_progress_bar=not args.quiet,
        enable_model_summary=not args.quiet,
    )
    hits = total = 0.0
    for x, y in test_ds:
        x, y = np.asarray(x), np.asarray(y)
        if args.source == "torchvision":
            x = x.transpose(0, 2, 3, 1)
        hits, total = hits + float(eval_step(state, (x, y))) * len(y), total + len(y)
    print(f"test_acc={hits / total:.4f}")
    return hits / total


if __name__ == "__main__":
    main()
