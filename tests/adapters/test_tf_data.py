"""tf.data pipelines."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxlightning.adapters import as_source

pytestmark = [pytest.mark.tf, pytest.mark.slow]  # importing TensorFlow alone takes seconds
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


def test_structures_and_dtypes(tf: Any) -> None:
    def make() -> Any:
        return tf.data.Dataset.from_tensor_slices(
            {
                "image": np.arange(24, dtype=np.uint8).reshape(4, 6),
                "label": np.arange(4),
                "nested": (np.arange(4.0), {"half": np.arange(4, dtype=np.float16)}),
                "bf": tf.cast(np.arange(4), tf.bfloat16),
                "name": ["a", "b", "c", "d"],
                "flag": [True, False, True, False],
            }
        ).batch(3)

    source = as_source(make())
    assert source.length == 2
    for _ in range(2):
        first, last = list(source)
    assert first["image"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]
    assert first["label"].dtype == np.int32
    assert first["nested"][0].dtype == np.float32
    assert first["nested"][1]["half"].dtype == np.float16
    assert first["bf"].dtype == ml_dtypes.bfloat16
    assert first["name"].tolist() == [b"a", b"b", b"c"]
    assert first["flag"].dtype == np.bool_
    assert last["label"].tolist() == [3]
    assert all(leaf.flags.writeable for leaf in jax.tree_util.tree_leaves(first))


def test_tuples_and_namedtuples(tf: Any) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(Pair(np.zeros((4, 2)), np.ones(4))).batch(2)
    assert type(next(iter(as_source(dataset)))) is Pair
    assert type(next(iter(as_source(tf.data.Dataset.from_tensor_slices((np.zeros(4), np.ones(4))).batch(2))))) is tuple


def test_batches_are_copies(tf: Any) -> None:
    dataset = tf.data.Dataset.from_tensors(np.zeros((64, 64), np.float32)).cache().repeat(3)
    source = as_source(dataset)
    for batch in source:
        assert batch.max() == 0
        batch += 1


@pytest.mark.parametrize(("kind", "length"), [("known", 3), ("infinite", None), ("unknown", None)])
def test_length(tf: Any, kind: str, length: int | None) -> None:
    dataset = tf.data.Dataset.range(6).batch(2)
    if kind == "infinite":
        dataset = dataset.repeat()
    if kind == "unknown":
        dataset = dataset.filter(lambda x: True)
    assert as_source(dataset).length == length


def test_batch_size_is_known_where_the_pipeline_fixes_it(tf: Any) -> None:
    assert as_source(tf.data.Dataset.range(6).batch(2, drop_remainder=True)).batch_size == 2
    assert as_source(tf.data.Dataset.range(6).batch(2)).batch_size is None


def test_ragged_tensors_raise_up_front_or_are_padded(tf: Any) -> None:
    ragged = tf.ragged.constant([[1, 2, 3], [4], [5, 6]])
    dataset = tf.data.Dataset.from_tensor_slices({"ids": ragged}).batch(2)
    with pytest.raises(TypeError, match=r"batch\['ids'\] of the tf.data pipeline is a ragged tensor"):
        as_source(dataset)
    first, second = as_source(dataset, ragged="pad")
    assert first["ids"]["values"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert first["ids"]["lengths"].tolist() == [3, 1]
    assert second["ids"]["values"].tolist() == [[5, 6]]
    deep = tf.data.Dataset.from_tensors(tf.ragged.constant([[[1], [2, 3]], [[4]]]))
    with pytest.raises(TypeError, match="more than one ragged dimension"):
        as_source(deep, ragged="pad")


def test_sparse_tensors_and_other_objects_raise_up_front(tf: Any) -> None:
    sparse = tf.sparse.from_dense([[1, 0], [0, 2]])
    with pytest.raises(TypeError, match=r"batch\[0\] of the tf.data pipeline is a sparse tensor"):
        as_source(tf.data.Dataset.from_tensors((sparse, 1)))
    with pytest.raises(TypeError, match="DatasetSpec"):
        as_source(tf.data.Dataset.range(4).window(2))


def test_an_unbatched_pipeline_gets_a_hint(tf: Any) -> None:
    with pytest.warns(UserWarning, match=r"looks unbatched: batch\[1\] has no axis.*Add .batch"):
        as_source(tf.data.Dataset.from_tensor_slices((np.zeros((4, 28, 28, 1)), np.arange(4))))
    as_source(tf.data.Dataset.from_tensor_slices((np.zeros((4, 28, 28, 1)), np.arange(4))).batch(2))
    as_source(tf.data.Dataset.from_tensor_slices((np.zeros((4, 28)), np.arange(4))).batch(2, drop_remainder=True))


def test_position_is_found_by_skipping(tf: Any) -> None:
    source = as_source(tf.data.Dataset.range(10).batch(2))
    iterator = iter(source)
    next(iterator)
    next(iterator)
    state = source.state_dict()
    fresh = as_source(tf.data.Dataset.range(10).batch(2))
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == [[4, 5], [6, 7], [8, 9]]


def test_a_resume_in_a_later_pass_finds_its_shuffled_order(tf: Any) -> None:
    def make() -> Any:
        return as_source(tf.data.Dataset.range(8).shuffle(8, seed=3).batch(2))

    source = make()
    orders = [[batch.tolist() for batch in source] for _ in range(2)]
    iterator = iter(source)
    started = [next(iterator).tolist()]
    state = source.state_dict()
    rest = [batch.tolist() for batch in iterator]
    between = source.state_dict()
    following = [batch.tolist() for batch in source]
    assert len({str(order) for order in [*orders, started + rest, following]}) == 4
    for saved, want in ((state, rest), (between, following)):
        fresh = make()
        fresh.load_state_dict(saved)
        assert [batch.tolist() for batch in fresh] == want


def test_out_of_range_integers_raise(tf: Any) -> None:
    with pytest.raises(OverflowError, match="batch holds int64"):
        list(as_source(tf.data.Dataset.from_tensors(np.array([2**40]))))


def test_an_error_in_the_pipeline_is_raised(tf: Any) -> None:
    def broken() -> Iterator[Any]:
        yield np.zeros(2)
        raise RuntimeError("element 1 is broken")

    dataset = tf.data.Dataset.from_generator(broken, output_signature=tf.TensorSpec([2], tf.float64))
    source = as_source(dataset)
    with pytest.raises(Exception, match="element 1 is broken"):
        list(source)


def test_tensors_from_any_iterable_are_converted(tf: Any) -> None:
    batch = next(iter(as_source(lambda: iter([{"x": tf.ones([2]), "s": tf.constant("a"), "v": tf.Variable([1.0])}]))))
    assert batch["x"].tolist() == [1, 1]
    assert batch["s"] == b"a"
    assert batch["v"].tolist() == [1]
    for value, message in (
        (tf.ragged.constant([[1], [2, 3]]), r"batch\[0\] is a tf.RaggedTensor"),
        (tf.sparse.from_dense([[1, 0]]), r"batch\[0\] is a tf.SparseTensor"),
    ):
        with pytest.raises(TypeError, match=message):
            list(as_source(lambda value=value: iter([[value]])))


def test_a_tfds_builder(tf: Any, tmp_path: Any) -> None:
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("importlib_resources")  # which tfds imports without declaring it
    info = {
        "image": tfds.features.Image(shape=(4, 4, 1)),
        "label": tfds.features.ClassLabel(num_classes=3),
    }
    examples = {i: {"image": np.full((4, 4, 1), i, np.uint8), "label": i % 3} for i in range(6)}.items()
    builder = tfds.dataset_builders.store_as_tfds_dataset(
        name="tiny",
        version="1.0.0",
        data_dir=tmp_path,
        split_datasets={"train": examples},
        features=tfds.features.FeaturesDict(info),
        disable_shuffling=True,
    )
    source = as_source(builder.as_dataset(split="train", as_supervised=False).batch(4))
    assert source.length == 2
    first, last = source
    assert first["image"].shape == (4, 4, 4, 1)
    assert last["label"].tolist() == [1, 2]
    images = as_source(tfds.as_numpy(builder.as_dataset(split="train").batch(4)))
    assert len(list(images)) == 2


def test_accelerators_are_hidden_or_a_warning_is_given() -> None:
    """The accelerator is simulated: two logical views of what TensorFlow reports."""
    program = """
        import warnings, numpy as np, tensorflow as tf
        from jaxlightning.adapters import as_source, hide_tensorflow_accelerators
        hidden = []
        tf.config.list_physical_devices = lambda kind: [kind] if kind == "GPU" else []
        tf.config.get_visible_devices = lambda kind: [] if kind in hidden else [kind]
        tf.config.set_visible_devices = lambda devices, kind: hidden.append(kind)
        assert hide_tensorflow_accelerators() == ()
        assert hidden == ["GPU"]
        def late(devices, kind):
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        hidden.clear()
        tf.config.set_visible_devices = late
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            as_source(tf.data.Dataset.range(4).batch(2))
        assert any("TensorFlow had already taken the GPU" in str(w.message) for w in caught), caught
        print("ok")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr
