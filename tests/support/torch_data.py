"""Datasets and batches of the tests of adapters; importable by worker processes."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Pair = collections.namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass(frozen=True)
class Record:
    image: Any
    extra: Any = None


class Samples(Dataset):
    """`n` samples of one container kind."""

    def __init__(self, n: int = 11, kind: str = "tuple", dtype: str = "float32") -> None:
        self.n, self.kind = n, kind
        self.values = make_tensor((n, 2, 3), dtype)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        x = self.values[index]
        if self.kind == "tensor":
            return x
        if self.kind == "tuple":
            return x, index
        if self.kind == "dict":
            return {"x": x, "y": float(index), "name": f"sample {index}", "nested": {"flag": index % 2 == 0}}
        if self.kind == "namedtuple":
            return Pair(x, index)
        if self.kind == "list":
            return [x, [x * 2 if x.dtype is not torch.bool else x, np.float32(index)]]
        if self.kind == "numpy":
            return np.full((3,), index, np.int16), np.float64(index)
        if self.kind == "mixed":
            return {"a": (x, {"b": [x]}), "c": np.uint8(index)}
        raise ValueError(self.kind)


class RandomlyNoisy(Samples):
    """Draws from torch's global generator in every sample."""

    def __getitem__(self, index: int) -> Any:
        return self.values[index] + torch.rand(()), index


class Stream(IterableDataset):
    """Numbers, split between workers."""

    def __init__(self, n: int = 10, sized: bool = False) -> None:
        self.n = n
        if sized:
            self.__class__ = SizedStream

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(start, self.n, step):
            yield torch.full((2,), float(i)), i


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class Failing(Samples):
    """Raises in sample 7."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise RuntimeError("sample 7 is broken")
        return super().__getitem__(index)


class SeesProcess(Samples):
    """Reports what a worker process sees."""

    def __getitem__(self, index: int) -> Any:
        return {
            "pid": str(os.getpid()),
            "platform": os.environ.get("JAX_PLATFORMS", "unset"),
            "has_jax": "jax" in sys.modules,
            "x": self.values[index],
        }


class UsesJax(Samples):
    """Computes with JAX inside a worker."""

    def __getitem__(self, index: int) -> Any:
        import jax
        import jax.numpy as jnp

        return np.asarray(jnp.arange(3) * index), jax.default_backend()


class Unpicklable(Samples):
    """Cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


class LocalBatch:
    """Collates into a class that cannot be pickled."""

    def __call__(self, samples: list[Any]) -> Any:
        @dataclasses.dataclass
        class Inside:
            x: Any

        return Inside(torch.stack([sample[0] for sample in samples]))


class KeepsItsBuffer:
    """Collates into one 64-byte aligned buffer, overwritten by every call."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        raw = np.zeros(int(np.prod(shape)) * 4 + 64, np.uint8)
        offset = -raw.ctypes.data % 64
        self.buffer = raw[offset : offset + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        for row, sample in zip(self.buffer, samples, strict=False):
            row[...] = sample.numpy()
        return torch.from_numpy(self.buffer[: len(samples)])


def make_tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Give varied values of a dtype, the same in every process."""
    size = int(np.prod(shape))
    base = torch.arange(size, dtype=torch.float64).reshape(shape)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return base % 3 == 0
    if dtype.startswith("complex"):
        return torch.complex(base.float(), -base.float() / 3).to(kind)
    if dtype.startswith(("float", "bfloat")):
        return ((base - size / 2) / 7).to(torch.float32).to(kind) if dtype != "float64" else (base - size / 2) / 7
    return (base % 100).to(kind)


def double_collate(samples: list[Any]) -> Any:
    """A collate function of the user's."""
    return {"x": torch.stack([sample[0] for sample in samples]) * 2, "ids": [f"{sample[1]}" for sample in samples]}


def record_collate(samples: list[Any]) -> Record:
    return Record(image=torch.stack([sample[0] for sample in samples]), extra={"n": len(samples), "none": None})


def identity_collate(samples: list[Any]) -> list[Any]:
    return samples


def seed_worker(worker_id: int) -> None:
    torch.manual_seed(worker_id)


class WritesShared(Samples):
    """Marks each sample that was read in a tensor shared between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(self.n, dtype=torch.int32).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.seen[index] = 1
        return self.values[index]
