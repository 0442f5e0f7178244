"""The CNN of fashion_mnist_linen.py on a tf.data pipeline.

Example:
    python examples/tf_data.py --epochs 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

import _data
import jaxlightning as jl
from fashion_mnist_linen import LitCNN


def pipelines(args: argparse.Namespace) -> tuple[tf.data.Dataset, tf.data.Dataset, tf.data.Dataset]:
    """Return the training, validation and test pipelines, of NHWC images and int64 labels."""
    images = _data.load_images(args.data, args.limit)
    train_part, val_part = _data.split(len(images.train_x))

    def pipeline(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y))

    def prepare(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        scaled = (tf.cast(image, tf.float32) / 255.0 - _data.MEAN) / _data.STD
        return scaled[..., tf.newaxis], label

    train = pipeline(images.train_x[train_part], images.train_y[train_part])
    train = train.shuffle(len(train_part), seed=args.seed).batch(args.batch_size, drop_remainder=True)
    val = pipeline(images.train_x[val_part], images.train_y[val_part]).batch(_data.EVAL_BATCH)
    test = pipeline(images.test_x, images.test_y).batch(_data.EVAL_BATCH)
    return tuple(part.map(prepare).prefetch(2) for part in (train, val, test))


def main(argv: Sequence[str] | None = None) -> float:
    """Train, test, and return the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser)
    args = parser.parse_args(argv)
    train, val, test = pipelines(args)

    jl.seed_everything(args.seed)
    trainer = jl.Trainer(
        max_epochs=args.epochs,
        default_root_dir=args.output,
        enable_progress_bar=not args.quiet,
        enable_model_summary=not args.quiet,
    )
    model = LitCNN()
    trainer.fit(model, train, val)
    (results,) = trainer.test(model, test, verbose=False)
    print(f"test_acc={results['test_acc']:.4f}")
    return float(results["test_acc"])


if __name__ == "__main__":
    main()
