"""What `make demo` runs: train the CNN, test it, and leave TensorBoard events, a checkpoint and a picture behind.

Example:
    python examples/demo.py --epochs 3
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import _data
import jaxlightning as jl
from fashion_mnist_linen import LitCNN
from jaxlightning.callbacks import LearningRateMonitor, ModelCheckpoint
from jaxlightning.loggers import CSVLogger, TensorBoardLogger

PICTURES = 12


def curve(metrics_file: Path, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one column of a CSVLogger's file."""
    with metrics_file.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]


def draw(path: Path, metrics_file: Path, images: _data.Images, predictions: np.ndarray, title: str) -> None:
    """Save the loss curve and the first predictions of the test set as a PNG.

    Args:
        path: Where to.
        metrics_file: The CSVLogger's file.
        images: The data set.
        predictions: Predicted labels of the test images, of shape (n,).
        title: Heading of the picture.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5, 6))
    axes = left.subplots()
    for name in ("train_loss", "val_loss"):
        axes.plot(*curve(metrics_file, name), label=name, marker="." if name == "val_loss" else None)
    axes.set(xlabel="step", ylabel="cross-entropy (nats)")
    axes.legend()
    for axis, image, label, predicted in zip(
        right.subplots(3, 4).flat, images.test_x, images.test_y, predictions, strict=False
    ):
        axis.imshow(image, cmap="gray_r")
        right_or_wrong = "tab:green" if predicted == label else "tab:red"
        axis.set_title(images.classes[predicted], color=right_or_wrong, fontsize=10)
        axis.axis("off")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, test, draw, say what to type next; return the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _data.add_arguments(parser, epochs=3)
    parser.set_defaults(output=Path("demo_output"))
    args = parser.parse_args(argv)

    start = time.perf_counter()
    images = _data.load_images(args.data, args.limit)
    loaders: tuple[Any, Any, Any]
    if _data.have_torch():
        loaders, source = _data.torch_loaders(args), "a torchvision DataLoader"
    else:
        loaders, source = _data.array_loaders(args), "arrays, since torch is not installed here"
    print(f"Training a CNN on {images.name} from {source}.", flush=True)

    jl.seed_everything(args.seed)
    board = TensorBoardLogger(args.output, name="tensorboard")
    table = CSVLogger(args.output, name="csv")
    checkpoint = ModelCheckpoint(filename="{epoch}-{val_acc:.3f}", monitor="val_acc", mode="max")
    trainer = jl.Trainer(
        max_epochs=args.epochs,
        channels_last=True,
        logger=[board, table],
        callbacks=[checkpoint, LearningRateMonitor()],
        log_every_n_steps=10,
        default_root_dir=args.output,
        enable_progress_bar=not args.quiet,
        enable_model_summary=not args.quiet,
    )
    model = LitCNN()
    trainer.fit(model, loaders[0], loaders[1])
    (results,) = trainer.test(model, loaders[2], verbose=False)
    accuracy = float(results["test_acc"])
    restored = LitCNN.load_from_checkpoint(checkpoint.best_model_path)
    predictions = np.concatenate([np.asarray(part) for part in trainer.predict(restored, loaders[2])])

    # Where the person's shell stands, so that what is printed can be typed.
    commands = os.path.relpath(Path(sys.executable).parent)
    picture = args.output / "demo.png"
    title = f"{images.name}: test accuracy {accuracy:.1%} after {args.epochs} epochs"
    draw(picture, Path(table.log_dir) / "metrics.csv", images, predictions[:PICTURES], title)

    print(f"\n{title}, {time.perf_counter() - start:.0f} s")
    print(f"  picture      {picture}")
    print(f"  checkpoint   {os.path.relpath(checkpoint.best_model_path)}")
    print(f"  events       {board.log_dir}")
    print("\nWhat to type next:")
    print(f"  {commands}/tensorboard --logdir {board.save_dir}    the curves in a browser")
    print(f"  {commands}/python examples/fashion_mnist_nnx.py --epochs 5    the same with flax.nnx")
    print(f"  {commands}/python examples/vae.py --epochs 5    a generative model")
    print("  make test    the tests; MIGRATION.md says how a Lightning module becomes one of ours")
    return accuracy


if __name__ == "__main__":
    main()
