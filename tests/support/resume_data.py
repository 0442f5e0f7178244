"""Sixteen samples in four batches, from each kind of loader; importable, so that worker processes find it."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES, BATCH, FEATURES, CLASSES = 16, 4, 6, 3

X = np.random.RandomState(0).randn(SAMPLES, FEATURES).astype(np.float32)
Y = np.random.RandomState(1).randint(0, CLASSES, SAMPLES).astype(np.int32)


class Augmented:
    """A map-style dataset that draws from torch's stream for every sample, as torchvision's transforms do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(X[index]) + 0.1 * torch.randn(FEATURES), int(Y[index])


class Plain(Augmented):
    """The same without draws."""

    def __getitem__(self, index: int) -> Any:
        return X[index], int(Y[index])


def arrays() -> Any:
    import jaxlightning as pl

    return pl.ArrayLoader((X, Y), batch_size=BATCH, shuffle=True)


def torch_0() -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]


def torch_2() -> Any:
    from torch.utils.data import DataLoader

    # Without draws in the workers: their streams begin anew with each pass, so what they draw cannot continue.
    return DataLoader(Plain(), batch_size=BATCH, shuffle=True, num_workers=2)  # type: ignore[arg-type]


def tf_data() -> Any:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shuffle(SAMPLES, seed=3, reshuffle_each_iteration=True).batch(BATCH)


def grain() -> Any:
    import grain.python as gp

    data = gp.MapDataset.source([(X[i], Y[i]) for i in range(SAMPLES)]).seed(5).shuffle()
    return data.batch(BATCH)


SOURCES = {"arrays": arrays, "torch 0": torch_0, "torch 2": torch_2, "tf.data": tf_data, "grain": grain}
