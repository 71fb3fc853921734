"""Batches come out of their bytes as they went in."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.engine.parcels import Packed
from tfdist.engine.parcels import Parcels

ROWS = (3, 2, 4, 1, 0)


def _numbers():
    return tf.data.Dataset.from_tensor_slices({"a": np.arange(10.0).reshape(5, 2), "b": range(5)})


def _of_any_size():
    """Batches of different sizes, one of them without examples."""

    def generate():
        for n in ROWS:
            a = np.arange(n * 2, dtype="float32").reshape(n, 2)
            yield a, np.array([f"text {i}" for i in range(n)]), np.ones((n, 2, n), bool)

    signature = (
        tf.TensorSpec([None, 2], tf.float32),
        tf.TensorSpec([None], tf.string),
        tf.TensorSpec([None, 2, None], tf.bool),
    )
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def _of_any_kind():
    def more(a, b, c):
        rows = tf.shape(a, tf.int64)[0]
        lengths = tf.fill([rows], tf.constant(2, tf.int64))
        features = {
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(rows * 2), lengths),
            "sparse": tf.sparse.from_dense(a),
            "unknown rank": tf.py_function(lambda value: value * 2, [a], tf.float32),
            "half": tf.cast(a, tf.bfloat16),
            "complex": tf.cast(a, tf.complex64),
            "nothing in a row": tf.zeros([rows, 0, 3], tf.int32),
            "scalar": tf.constant(3, tf.uint16),
            "texts": tf.stack([b, b], axis=1),
            "open": c,
        }
        return features, a, tf.experimental.Optional.empty(None)

    return _of_any_size().map(more)


@pytest.mark.parametrize(
    "dataset", [_numbers().batch(2), _numbers().batch(1), _of_any_size(), _of_any_kind()]
)
def test_batches_come_out_of_their_bytes_as_they_went_in(dataset):
    parcels = Parcels(dataset.element_spec)
    batches = [Packed(*(t.numpy() for t in each)) for each in dataset.map(parcels.pack)]
    steps = len(batches)
    data, texts = parcels.join(2**40 + 7, batches)
    arguments = [tf.constant(each) for each in (data, texts) if each is not None]
    assert [spec.dtype for spec in parcels.signature()] == [each.dtype for each in arguments]

    opened = tf.function(lambda data, texts=None: parcels.open(data, texts, steps))
    number, found = opened(*arguments)
    assert int(number) == 2**40 + 7
    assert len(found) == steps
    for batch, leaves in zip(dataset, found, strict=True):
        wanted = tf.nest.flatten(batch, expand_composites=True)
        for want, got in zip(wanted, leaves, strict=True):
            if want.dtype == tf.variant:  # The optional that stands for no weights.
                assert got is None
                continue
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_a_batch_knows_its_number_of_examples():
    parcels = Parcels(_of_any_size().element_spec)
    packed = _of_any_size().map(parcels.pack)
    assert [Packed(*(t.numpy() for t in each)).rows for each in packed] == list(ROWS)
