"""Sequences of different lengths in a few shapes."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlightning as pl
from jaxlightning.adapters import BucketLoader, SourceOptions, as_source, bucketed, mapped

BATCHES = [np.arange(1, 1 + 2 * n).reshape(2, n) for n in (3, 8, 5)]


class Loader:
    """A sized loader of dicts that is resumed by reading on."""

    def __init__(self, make: Any = lambda x: {"ids": x, "y": x[:, 0]}) -> None:
        self.make = make

    def __len__(self) -> int:
        return len(BATCHES)

    def __iter__(self) -> Any:
        return (self.make(batch) for batch in BATCHES)


def test_batches_are_padded_to_the_next_boundary() -> None:
    source = bucketed(Loader(), [4, 8], pad_value=-1, mask="mask")
    assert source.length == 3
    for found, plain in zip(source, BATCHES, strict=True):
        size = 4 if plain.shape[1] <= 4 else 8
        assert found["ids"].shape == found["mask"].shape == (2, size)
        np.testing.assert_array_equal(found["ids"][:, : plain.shape[1]], plain)
        assert (found["ids"][:, plain.shape[1] :] == -1).all()
        np.testing.assert_array_equal(found["mask"], np.arange(size)[None] < np.full((2, 1), plain.shape[1]))
        np.testing.assert_array_equal(found["y"], plain[:, 0])
        assert found["ids"].dtype == np.int32


def test_several_leaves_have_values_of_their_own() -> None:
    loader = Loader(lambda x: ({"ids": x, "type": x * 0.5}, x))
    source = bucketed(loader, [8], leaves=[(0, "ids"), (0, "type"), 1], pad_value={(0, "ids"): 7, 1: -100})
    (inputs, labels), *_ = source
    assert inputs["ids"][0].tolist() == [1, 2, 3, 7, 7, 7, 7, 7]
    assert inputs["type"][0].tolist() == [0.5, 1, 1.5, 0, 0, 0, 0, 0]
    assert labels[0].tolist() == [1, 2, 3, -100, -100, -100, -100, -100]


def test_the_length_may_be_another_axis() -> None:
    source = bucketed(Loader(lambda x: x.T), [8], axis=0)
    assert [batch.shape for batch in source] == [(8, 2)] * 3


def test_leaves_that_differ_have_to_be_named() -> None:
    loader = Loader(lambda x: {"ids": x, "features": np.zeros((2, 12))})
    with pytest.raises(ValueError, match=r"batch\['features'\]: 12, batch\['ids'\]: 3.*Name those"):
        list(bucketed(loader, [8]))
    assert next(iter(bucketed(loader, [8], leaves=["ids"])))["features"].shape == (2, 12)


def test_what_is_too_long_raises_or_is_cut_off() -> None:
    with pytest.raises(ValueError, match=r"batch\['ids'\] has length 8, beyond the last boundary 6"):
        list(bucketed(Loader(), [6]))
    found = list(bucketed(Loader(), [6], too_long="truncate", mask="m"))
    assert [batch["ids"].shape[1] for batch in found] == [6, 6, 6]
    assert found[1]["m"].all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundaries": []}, "positive and ascending"),
        ({"boundaries": [8, 4]}, "positive and ascending"),
        ({"boundaries": [0, 4]}, "positive and ascending"),
        ({"boundaries": [8], "too_long": "drop"}, "too_long must be"),
        ({"boundaries": [8], "leaves": ["x"]}, r"finds no leaf.*batch\['ids'\]: \(2, 3\)"),
        ({"boundaries": [8], "mask": "y"}, "already"),
    ],
)
def test_bad_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(bucketed(Loader(), **options))


def test_a_mask_needs_a_dict() -> None:
    with pytest.raises(TypeError, match="has to be a dict"):
        list(bucketed(Loader(lambda x: x), [8], mask="m"))


# the wrapper


def test_a_mapped_loader_keeps_position_order_and_options() -> None:
    images = np.arange(10 * 3 * 4 * 4, dtype=np.float32).reshape(10, 3, 4, 4)
    loader = pl.ArrayLoader(images, batch_size=3, shuffle=True, seed=5)
    source = mapped(loader, lambda batch: {"x": batch + 1})
    assert (source.length, source.is_shuffled, source.num_workers) == (4, True, 0)
    plain = [batch + 1 for batch in pl.ArrayLoader(images, batch_size=3, shuffle=True, seed=5)]
    iterator = iter(source)
    for batch in plain[:2]:
        np.testing.assert_array_equal(next(iterator)["x"], batch)
    state = json.loads(json.dumps(source.state_dict()))
    again = mapped(pl.ArrayLoader(images, batch_size=3, shuffle=True), lambda batch: {"x": batch + 1})
    again.load_state_dict(state)
    for found, batch in zip(again, plain[2:], strict=True):
        np.testing.assert_array_equal(found["x"], batch)
    np.testing.assert_array_equal(next(iter(source.sequential()))["x"], images[:3] + 1)
    recording = source.with_options(SourceOptions(record_indices=True))
    assert recording is not source
    recording.set_epoch(0)
    next(iter(recording))
    assert recording.last_batch_indices == pl.ArrayLoader(images, shuffle=True, seed=5).order(0)[:3].tolist()
    assert as_source(source) is source
    source.close()


def test_an_error_of_the_function_closes_the_loader() -> None:
    closed = []

    def batches() -> Any:
        try:
            yield np.zeros(2)
        finally:
            closed.append(True)

    with pytest.raises(ZeroDivisionError):
        next(iter(mapped(batches, lambda batch: 1 / 0)))
    assert closed == [True]


# batches of samples of similar length

LENGTHS = [3, 9, 4, 10, 1, 7, 8, 2, 5]
SAMPLES = [{"ids": np.full(n, i), "label": i} for i, n in enumerate(LENGTHS)]


def test_batches_are_of_one_boundary() -> None:
    loader = BucketLoader(SAMPLES, [4, 8, 10], batch_size=2, mask="mask")
    batches = list(loader)
    assert len(loader) == len(batches) == 5
    # in the order in which buckets become full: (0, 2), (1, 3), (4, 7), (5, 6), and the rest
    assert [batch["label"].tolist() for batch in batches] == [[0, 2], [1, 3], [5, 6], [4, 7], [8]]
    assert [batch["ids"].shape for batch in batches] == [(2, 4), (2, 10), (2, 8), (2, 4), (1, 8)]
    for batch in batches:
        assert batch["ids"].dtype == np.int32
        for ids, mask, label in zip(batch["ids"], batch["mask"], batch["label"], strict=True):
            assert mask.sum() == LENGTHS[label]
            assert (ids[mask] == label).all()
            assert (ids[~mask] == 0).all()


def test_every_sample_comes_once_and_orders_differ_between_epochs() -> None:
    loader = BucketLoader(SAMPLES, [5, 10], batch_size=[3, 2], shuffle=True, seed=1)
    epochs = [np.concatenate([batch["label"] for batch in loader]).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(9))
    loader.set_epoch(0)
    assert np.concatenate([batch["label"] for batch in loader]).tolist() == epochs[0]
    assert loader.batch_size is None
    assert len(BucketLoader(SAMPLES, [5, 10], batch_size=[3, 2], drop_last=True)) == 3
    assert len(list(BucketLoader(SAMPLES, [5, 10], batch_size=[3, 2], drop_last=True))) == 3


def test_lengths_that_are_given_are_not_measured() -> None:
    class Counted(list):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    samples = Counted(SAMPLES)
    loader = BucketLoader(samples, [10], batch_size=4, lengths=LENGTHS, leaves=["ids"])
    assert samples.reads == 0
    assert next(iter(loader))["ids"].shape == (4, 10)
    assert samples.reads == 4


def test_a_position_is_found_without_reading() -> None:
    def make() -> BucketLoader:
        return BucketLoader(SAMPLES, [4, 8, 10], batch_size=2, shuffle=True, seed=3)

    loader = make()
    list(loader)
    iterator = iter(loader)
    next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch["label"].tolist() for batch in iterator]
    again = make()
    again.load_state_dict(state)
    assert [batch["label"].tolist() for batch in again] == rest


def test_plain_arrays_and_torch_tensors_are_samples() -> None:
    assert [b.shape for b in BucketLoader([np.zeros(3), np.zeros(2)], [4], batch_size=2)] == [(2, 4)]
    torch = pytest.importorskip("torch")
    samples = [(torch.full((n, 2), n), torch.tensor(n)) for n in (1, 3, 2)]
    ((values, lengths),) = BucketLoader(samples, [3], batch_size=3, pad_value=-1)
    assert values.shape == (3, 3, 2)
    assert lengths.tolist() == [1, 3, 2]
    assert values[0].tolist() == [[1, 1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BucketLoader(iter(SAMPLES), [4]), TypeError, "needs samples with len"),
        (lambda: BucketLoader(SAMPLES, [4]), ValueError, "sample 1 has length 9, beyond the last boundary 4"),
        (lambda: BucketLoader(SAMPLES, [4, 10], batch_size=[1]), ValueError, "batch_size must be"),
        (lambda: BucketLoader(SAMPLES, [10], batch_size=0), ValueError, "batch_size must be"),
        (lambda: BucketLoader(SAMPLES, [10], lengths=[1, 2]), ValueError, "one entry per sample"),
        (lambda: BucketLoader([3, 4], [10]), ValueError, "finds no leaf with a length"),
        (
            lambda: BucketLoader([(np.zeros(2), np.zeros(3)), (np.zeros(4), np.zeros(4))], [10]),
            ValueError,
            "leaves of sample 0 that vary in length differ",
        ),
    ],
)
def test_samples_that_do_not_fit_raise(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_leaves_that_are_not_named_have_to_have_one_shape() -> None:
    loader = BucketLoader([(np.zeros(2), np.zeros(3)), (np.zeros(4), np.zeros(4))], [10], batch_size=2, leaves=[0])
    with pytest.raises(ValueError, match=r"batch\[1\] has different shapes in one batch"):
        list(loader)


def test_a_step_is_compiled_once_per_boundary() -> None:
    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            import flax.linen as nn

            self.embed = nn.Embed(10, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return jnp.mean(self.embed(batch["ids"]) ** 2, where=batch["mask"][..., None])

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    loader = BucketLoader(SAMPLES * 2, [4, 10], batch_size=3, shuffle=True, drop_last=True, mask="mask")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=3, enable_checkpointing=False, **quiet)
    trainer.fit(Net(), loader)
    assert trainer._engine.trace_counts == {"train": 2}
