"""Sparse and ragged tensors come through tf.data's splitting by example as they went in."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

from tensorflow.python.data.experimental.ops import distribute  # noqa: E402
from tensorflow.python.distribute import input_lib  # noqa: E402

from tfdist.engine import sparse_rows  # noqa: E402


def _sparse(indices, values, shape):
    return tf.SparseTensor(tf.constant(indices, tf.int64, (len(values), len(shape))), values, shape)


SPARSE = {
    "float": _sparse([[0, 1], [2, 0], [2, 5]], [1.0, 2.0, 3.0], [3, 6]),
    "unordered": _sparse([[2, 5], [0, 4], [2, 0], [0, 1]], [1, 2, 3, 4], [3, 6]),
    "strings": _sparse([[0, 0], [1, 1]], ["a", "bc"], [3, 2]),
    "bool": _sparse([[1, 1]], [True], [2, 2]),
    "rank 1": _sparse([[0], [2]], [1.0, 2.0], [4]),
    "rank 3": _sparse([[0, 1, 2], [2, 0, 1], [2, 1, 0]], [1.0, 2.0, 3.0], [3, 2, 4]),
    "no values": _sparse([], tf.zeros([0]), [3, 6]),
    "one row": _sparse([[0, 3]], [1.0], [1, 6]),
    "wide": _sparse([[1, 2**60]], [1.0], [2, 2**62]),
    "wide in two": _sparse([[1, 2**60, 2**61]], [1.0], [2, 2**62, 2**62]),
}
RAGGED = {
    "vectors": tf.ragged.constant([[[1, 2]], [], [[3, 4], [5, 6]]], inner_shape=(2,)),
    "lists of vectors": tf.ragged.constant(
        [[[[1.0, 2.0]], []], [], [[[3.0, 4.0], [5.0, 6.0]]]], inner_shape=(2,)
    ),
    "matrices": tf.RaggedTensor.from_row_lengths(
        tf.reshape(tf.range(18), [3, 2, 3]), tf.constant([1, 2], tf.int32)
    ),
}


def _entries(sparse):
    return sorted(zip(sparse.indices.numpy().tolist(), sparse.values.numpy().tolist(), strict=True))


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_tensor_is_split_and_joined(name):
    sparse = SPARSE[name]
    joined = sparse_rows.join(sparse_rows.split(sparse))
    assert _entries(joined) == _entries(sparse)
    assert joined.values.dtype == sparse.values.dtype
    assert joined.dense_shape.numpy().tolist() == sparse.dense_shape.numpy().tolist()
    rows = joined.indices.numpy()[:, 0].tolist()
    assert rows == sorted(rows)


@pytest.mark.parametrize("name", SPARSE)
def test_four_parts_of_a_sparse_batch_hold_all_its_rows(name):
    sparse = SPARSE[name]
    parts = _parts(sparse, 4)
    entries, first = [], 0
    for part in parts:
        # Whoever gets no row knows the shape of one all the same.
        assert part.dense_shape.numpy().tolist()[1:] == sparse.dense_shape.numpy().tolist()[1:]
        entries += [([row + first, *rest], value) for (row, *rest), value in _entries(part)]
        first += int(part.dense_shape[0])
    assert first == int(sparse.dense_shape[0])
    assert entries == _entries(sparse)


@pytest.mark.parametrize("name", RAGGED)
def test_four_parts_of_a_ragged_batch_hold_all_its_rows(name):
    ragged = RAGGED[name]
    assert sparse_rows.join(sparse_rows.split(ragged)).to_list() == ragged.to_list()
    parts = _parts(ragged, 4)
    assert tf.concat(parts, 0).to_list() == ragged.to_list()
    inner = ragged.flat_values.shape[1:]
    assert all(part.flat_values.shape[1:] == inner for part in parts)
    assert all(part.row_splits.dtype == ragged.row_splits.dtype for part in parts)


def test_specs_keep_what_is_known_before_the_data_is_read():
    specs = (
        {"a": tf.SparseTensorSpec([None, 6], tf.float32), "b": tf.TensorSpec([None, 2])},
        tf.SparseTensorSpec([4, None, 5], tf.string),
        tf.RaggedTensorSpec([None, None, None, 3], tf.int32, 2, tf.int32),
        tf.RaggedTensorSpec([None, None], tf.int32),
    )
    dataset = sparse_rows.split_dataset(_nothing_of(specs))
    assert sparse_rows.is_split(dataset.element_spec)
    assert repr(sparse_rows.join(dataset.element_spec)) == repr(specs)


def test_joined_in_a_graph_the_inner_dimensions_are_static():
    seen = []

    @tf.function
    def step(part):
        part = sparse_rows.join(part)
        seen.append(part.shape.as_list())
        return part

    spec = tf.SparseTensorSpec([None, 6], tf.float32)
    step.get_concrete_function(sparse_rows.split_dataset(_nothing_of(spec)).element_spec)
    assert seen == [[None, 6]]


def test_what_can_be_split_as_it_is_stays():
    batch = {"dense": tf.ones([2, 3]), "ragged": tf.ragged.constant([[1], [2, 3]]), "none": None}
    assert not sparse_rows.is_split(sparse_rows.split(batch))
    dataset = tf.data.Dataset.from_tensors((batch["dense"], batch["ragged"]))
    assert sparse_rows.split_dataset(dataset) is dataset


def _parts(batch, count):
    """Returns `batch` as TensorFlow hands it to `count` replicas."""
    dataset = sparse_rows.split_dataset(tf.data.Dataset.from_tensors({"x": batch}))
    parts = distribute._LegacyRebatchDataset(dataset, count)
    return [sparse_rows.join(part)["x"] for part in parts]


def _nothing_of(spec):
    return tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)


def test_a_replica_without_a_part_gets_a_batch_of_no_rows():
    specs = (
        tf.SparseTensorSpec([None, 6], tf.string),
        tf.RaggedTensorSpec([None, None, 3], tf.int32, 1),
    )
    dataset = sparse_rows.split_dataset(_nothing_of(specs))
    sparse, ragged = sparse_rows.join(input_lib._dummy_tensor_fn(dataset.element_spec))
    assert sparse.dense_shape.numpy().tolist() == [0, 6]
    assert ragged.flat_values.shape == [0, 3]
