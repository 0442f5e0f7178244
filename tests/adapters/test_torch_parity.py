"""Every loader gives the batches of plain iteration, bit for bit and in order, for two epochs."""

from __future__ import annotations

import collections
import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxlightning.adapters import as_source

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from support import torch_data as td  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

NARROWED = {
    "torch.int64": "int32",
    "torch.uint64": "uint32",
    "torch.float64": "float32",
    "torch.complex128": "complex64",
}
CASES: dict[str, Callable[[], Any]] = {}


def bits(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Name, shape and bytes of a tensor, by torch alone."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    narrowed = NARROWED.get(str(tensor.dtype))
    if narrowed:
        tensor = tensor.to(getattr(torch, narrowed))
    name = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.contiguous().reshape(-1)
    if tensor.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    data = flat.view(torch.uint8) if flat.numel() else torch.zeros(0, dtype=torch.uint8)
    return name, tuple(tensor.shape), data.numpy().tobytes()


def assert_same(plain: Any, ours: Any, where: str = "batch") -> None:
    if isinstance(plain, torch.Tensor):
        assert isinstance(ours, np.ndarray), where
        assert bits(plain) == (ours.dtype.name, ours.shape, ours.tobytes()), where
        assert ours.flags.c_contiguous, where
    elif isinstance(plain, (bool, int, float, complex, np.number)) and not isinstance(plain, str):
        assert ours.shape == ()
        assert ours == np.asarray(plain).astype(ours.dtype), where
    elif isinstance(plain, np.ndarray):
        assert_same(torch.from_numpy(plain), ours, where)
    elif isinstance(plain, collections.abc.Mapping):
        assert type(plain) is type(ours), where
        assert list(plain) == list(ours), where
        for key in plain:
            assert_same(plain[key], ours[key], f"{where}[{key!r}]")
    elif isinstance(plain, (list, tuple)):
        assert type(plain) is type(ours), where
        assert len(plain) == len(ours), where
        for index, (left, right) in enumerate(zip(plain, ours, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif dataclasses.is_dataclass(plain):
        assert type(plain) is type(ours), where
        for field in dataclasses.fields(plain):
            assert_same(getattr(plain, field.name), getattr(ours, field.name), f"{where}.{field.name}")
    else:
        assert plain is ours or plain == ours, where


def seed() -> None:
    torch.manual_seed(123)
    np.random.seed(5)
    random.seed(6)


def two_epochs_plain(make: Callable[[], Any]) -> tuple[list[list[Any]], Any]:
    seed()
    loader = make()
    epochs = []
    for epoch in range(2):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        # copies: a loader may overwrite the batch that it gave
        epochs.append([copied(batch) for batch in loader])
    return epochs, torch.get_rng_state()


def copied(batch: Any) -> Any:
    return batch.clone() if isinstance(batch, torch.Tensor) and not batch.is_sparse else batch


def two_epochs_ours(make: Callable[[], Any], **options: Any) -> tuple[list[list[Any]], Any]:
    seed()
    source = as_source(make(), **options)
    epochs = []
    for epoch in range(2):
        source.set_epoch(epoch)
        epochs.append(list(source))
    state = torch.get_rng_state()
    source.close()
    return epochs, state


def compare(make: Callable[[], Any], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*suggested max number of worker.*")
        plain, plain_state = two_epochs_plain(make)
        ours, our_state = two_epochs_ours(make, **options)
    for left, right in zip(plain, ours, strict=True):
        assert len(left) == len(right)
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"batch {index}")
    assert torch.equal(plain_state, our_state), "the global random stream went another way"


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = make
        return make

    return add


def tensors(n: int = 13) -> TensorDataset:
    return TensorDataset(torch.arange(n * 6, dtype=torch.float32).reshape(n, 2, 3), torch.arange(n))


for _kind in ("tensor", "tuple", "dict", "namedtuple", "list", "numpy", "mixed"):
    for _shuffle in (False, True):
        CASES[f"container {_kind} shuffle={_shuffle}"] = lambda kind=_kind, shuffle=_shuffle: DataLoader(
            td.Samples(kind=kind), batch_size=4, shuffle=shuffle
        )
DTYPES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
DTYPES += " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
for _dtype in DTYPES.split():
    CASES[f"dtype {_dtype} unbatched"] = lambda dtype=_dtype: DataLoader(
        td.Samples(kind="tensor", dtype=dtype), batch_size=None
    )
    if not _dtype.startswith(("float8", "uint64", "uint32", "uint16")):
        CASES[f"dtype {_dtype} TensorDataset"] = lambda dtype=_dtype: DataLoader(
            TensorDataset(td.make_tensor((9, 3), dtype)), batch_size=4, shuffle=True
        )
for _drop in (False, True):
    CASES[f"TensorDataset drop_last={_drop}"] = lambda drop=_drop: DataLoader(
        tensors(), batch_size=4, shuffle=True, drop_last=drop
    )


@case("sequential sampler given")
def _() -> Any:
    data = tensors()
    return DataLoader(data, batch_size=5, sampler=SequentialSampler(data))


@case("random sampler with replacement")
def _() -> Any:
    data = tensors()
    return DataLoader(data, batch_size=5, sampler=RandomSampler(data, replacement=True, num_samples=70))


@case("random sampler with more samples than data")
def _() -> Any:
    data = tensors()
    return DataLoader(data, batch_size=5, sampler=RandomSampler(data, num_samples=40))


@case("subset random sampler")
def _() -> Any:
    return DataLoader(tensors(), batch_size=3, sampler=SubsetRandomSampler([3, 1, 12, 7]))


@case("weighted random sampler")
def _() -> Any:
    return DataLoader(tensors(), batch_size=3, sampler=WeightedRandomSampler([1.0, 2.0] * 6 + [0.5], 17))


@case("distributed sampler")
def _() -> Any:
    data = tensors()
    return DataLoader(data, batch_size=3, sampler=DistributedSampler(data, num_replicas=2, rank=1))


@case("batch sampler")
def _() -> Any:
    data = tensors()
    return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True))


class Buckets:
    """A batch sampler of the user's with batches of different sizes, drawing eagerly from the global stream."""

    def __iter__(self) -> Any:
        order = torch.randperm(13).tolist()
        return iter([order[:2], order[2:7], [-1, -2], order[7:8]])

    def __len__(self) -> int:
        return 4


@case("own batch sampler, eager, negative indices")
def _() -> Any:
    return DataLoader(tensors(), batch_sampler=Buckets())


@case("batch sampler that gives tensors")
def _() -> Any:
    return DataLoader(tensors(), batch_sampler=[torch.tensor([1, 2]), torch.tensor([0])])


@case("own generator")
def _() -> Any:
    return DataLoader(tensors(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))


@case("Subset")
def _() -> Any:
    return DataLoader(Subset(tensors(), [3, 3, 0, -1, 12, 5]), batch_size=4, shuffle=True)


@case("Subset of a Subset with tensor indices")
def _() -> Any:
    inner = Subset(tensors(), torch.tensor([8, 3, 5, 1, 0]))
    return DataLoader(Subset(inner, np.array([4, 0, 2])), batch_size=2, shuffle=True)


@case("random_split")
def _() -> Any:
    return DataLoader(random_split(tensors(), [9, 4])[0], batch_size=4, shuffle=True)


@case("ConcatDataset")
def _() -> Any:
    return DataLoader(ConcatDataset([tensors(5), tensors(7)]), batch_size=4, shuffle=True)


@case("ConcatDataset of Subset and itself")
def _() -> Any:
    data = tensors()
    return DataLoader(ConcatDataset([Subset(data, [5, 6]), data, Subset(data, [])]), batch_size=4, shuffle=True)


@case("Subset of ConcatDataset")
def _() -> Any:
    return DataLoader(Subset(ConcatDataset([tensors(4), tensors(4)]), [7, 0, 3, 4, -1]), batch_size=2)


@case("ConcatDataset of different forms")
def _() -> Any:
    return DataLoader(ConcatDataset([td.Samples(4), td.Samples(3)]), batch_size=1, shuffle=True)


@case("StackDataset")
def _() -> Any:
    return DataLoader(StackDataset(a=td.Samples(6, "tensor"), b=range(6)), batch_size=4)


@case("iterable style")
def _() -> Any:
    return DataLoader(td.Stream(), batch_size=4)


@case("iterable style, sized, drop_last")
def _() -> Any:
    return DataLoader(td.Stream(sized=True), batch_size=4, drop_last=True)


@case("iterable style, batch_size=None")
def _() -> Any:
    return DataLoader(td.Stream(), batch_size=None)


@case("ChainDataset")
def _() -> Any:
    return DataLoader(ChainDataset([td.Stream(3), td.Stream(4)]), batch_size=2)


@case("batch_size=None with index batches")
def _() -> Any:
    data = tensors()
    return DataLoader(data, sampler=BatchSampler(RandomSampler(data), 4, False), batch_size=None)


@case("custom collate to dict with strings")
def _() -> Any:
    return DataLoader(td.Samples(), batch_size=4, collate_fn=td.double_collate, shuffle=True)


@case("custom collate to dataclass with None")
def _() -> Any:
    return DataLoader(td.Samples(), batch_size=4, collate_fn=td.record_collate)


@case("custom collate that keeps lists of samples")
def _() -> Any:
    return DataLoader(td.Samples(), batch_size=4, collate_fn=td.identity_collate)


@case("custom collate with one buffer")
def _() -> Any:
    return DataLoader(td.Samples(kind="tensor"), batch_size=4, collate_fn=td.KeepsItsBuffer((4, 2, 3)))


@case("random draws inside samples")
def _() -> Any:
    return DataLoader(td.RandomlyNoisy(), batch_size=4, shuffle=True)


@case("strides, zero size and 0-d")
def _() -> Any:
    def collate(samples: list[Any]) -> Any:
        x = torch.stack([sample[0] for sample in samples])
        return {
            "transposed": x.transpose(0, 2),
            "every second": x[:, :, ::2],
            "flipped": x.flip(0),
            "expanded": x[:1].expand(5, -1, -1),
            "empty": x[:0],
            "scalar": x.sum(),
            "grad": x.clone().requires_grad_(),
            "conj": torch.complex(x, -x).conj(),
            "neg": torch.complex(x, -x).conj().imag,
        }

    return DataLoader(td.Samples(), batch_size=4, collate_fn=collate)


@case("non-contiguous TensorDataset that requires grad")
def _() -> Any:
    x = torch.arange(60, dtype=torch.float32).reshape(3, 20).t().requires_grad_()
    return DataLoader(TensorDataset(x, x[:, 0] > 7), batch_size=6, shuffle=True)


@case("TensorDataset of zero-size samples")
def _() -> Any:
    return DataLoader(TensorDataset(torch.zeros(5, 0)), batch_size=2)


@case("TensorDataset of shape [n]")
def _() -> Any:
    return DataLoader(TensorDataset(torch.arange(5.0), torch.arange(5) > 2), batch_size=2)


@case("a subclass of TensorDataset that overrides __getitem__")
def _() -> Any:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(tensor * 2 for tensor in super().__getitem__(index))

    return DataLoader(Doubled(torch.arange(7.0)), batch_size=3, shuffle=True)


@case("a subclass of DataLoader whose __iter__ is a generator")
def _() -> Any:
    class Scaled(DataLoader):
        def __iter__(self) -> Any:
            for x, y in super().__iter__():
                yield x / 2, y

    return Scaled(tensors(), batch_size=4, shuffle=True)


@case("a function as collate that calls default_collate")
def _() -> Any:
    return DataLoader(tensors(), batch_size=4, collate_fn=lambda samples: default_collate(samples))


@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize("name", CASES)
def test_batches_equal_plain_iteration(name: str, vectorize: Any) -> None:
    compare(CASES[name], vectorize=vectorize)


def test_the_table_has_at_least_sixty_loaders() -> None:
    assert len(CASES) >= 60


WORKER_CASES: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(td.Samples(), batch_size=4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(td.Samples(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True),
    "random draws inside samples": lambda: DataLoader(td.RandomlyNoisy(), batch_size=4, shuffle=True, num_workers=2),
    "strings": lambda: DataLoader(td.Samples(kind="dict"), batch_size=4, num_workers=1, prefetch_factor=1),
    "iterable": lambda: DataLoader(td.Stream(), batch_size=2, num_workers=2),
    "bfloat16": lambda: DataLoader(td.Samples(kind="tensor", dtype="bfloat16"), batch_size=4, num_workers=1),
    "own batch sampler": lambda: DataLoader(tensors(), batch_sampler=Buckets(), num_workers=1),
    "own generator": lambda: DataLoader(
        td.Samples(), batch_size=4, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(9)
    ),
    "worker_init_fn": lambda: DataLoader(
        td.RandomlyNoisy(), batch_size=4, num_workers=2, worker_init_fn=td.seed_worker
    ),
    "custom collate": lambda: DataLoader(td.Samples(), batch_size=4, num_workers=1, collate_fn=td.record_collate),
    "fork chosen": lambda: DataLoader(td.Samples(), batch_size=4, num_workers=1, multiprocessing_context="fork"),
}


@pytest.mark.parametrize("name", WORKER_CASES)
def test_batches_from_workers_equal_plain_iteration(name: str) -> None:
    compare(WORKER_CASES[name], vectorize=False)


@pytest.mark.parametrize("persistent", [False, True])
def test_fast_path_replaces_workers_without_changing_random_streams(persistent: bool) -> None:
    def make() -> Any:
        return DataLoader(tensors(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent)

    compare(make, vectorize=True)


def test_fast_path_and_eager_batch_sampler_with_workers() -> None:
    compare(lambda: DataLoader(tensors(), batch_sampler=Buckets(), num_workers=1), vectorize=True)


def test_64_bit_mode_keeps_64_bits() -> None:
    import jax

    data = TensorDataset(torch.arange(5, dtype=torch.float64) / 3, torch.tensor([2**40 + i for i in range(5)]))
    with jax.enable_x64(True):
        for vectorize in (True, False):
            x, y = next(iter(as_source(DataLoader(data, batch_size=5), vectorize=vectorize)))
            assert x.dtype == np.float64
            assert y.tolist() == [2**40 + i for i in range(5)]
            assert x.tobytes() == data.tensors[0].numpy().tobytes()
