"""Gradients of a few rows, with one more of zeros and no place, so that a sum is never empty."""

from __future__ import annotations

import tensorflow as tf


def with_nowhere(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns `slices` with one more row, of zeros and with the index -1."""
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
