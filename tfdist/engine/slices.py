"""Gradients of a few rows of a table."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def rows_of(tensor: Any) -> tf.IndexedSlices:
    """Returns the rows of a tensor that are not zero."""
    parts = tf.reshape(tensor, [tf.shape(tensor)[0], -1])
    rows = tf.where(tf.reduce_any(tf.not_equal(parts, 0), axis=1))[:, 0]
    return tf.IndexedSlices(tf.gather(tensor, rows), rows, tf.shape(tensor, tf.int64))


def dense(slices: tf.IndexedSlices, shape: Any) -> Any:
    """Returns the tensor of a static shape with the sum of `slices` in their rows."""
    tensor = tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0])
    return tf.ensure_shape(tensor, shape)


def with_nowhere(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns `slices` with one more row, of zeros and with the index -1, so as not to be empty."""
    paddings = [[0, 1], *[[0, 0]] * (slices.values.shape.rank - 1)]
    nowhere = tf.constant([-1], slices.indices.dtype)
    return tf.IndexedSlices(
        tf.pad(slices.values, paddings),
        tf.concat([slices.indices, nowhere], axis=0),
        slices.dense_shape,
    )


def without_nowhere(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns `slices` without the rows of `with_nowhere`."""
    there = tf.where(slices.indices >= 0)[:, 0]
    return tf.IndexedSlices(
        tf.gather(slices.values, there), tf.gather(slices.indices, there), slices.dense_shape
    )
