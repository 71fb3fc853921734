"""Batches of made-up data, on which functions of the user's own are tried out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras import tree
from keras.src import backend as keras_backend

_ROWS, _OPEN = 3, 4  # Examples, and the size of dimensions that are not known.


def batch_like(like: Any, seed: int) -> Any:
    """Returns a batch of random numbers; what is no batch of numbers stays as it is.

    Args:
        like: Structure of tensors, the first dimension of each the examples.
        seed: Another one gives other numbers.
    """

    def one(leaf: Any) -> Any:
        if not is_batch(leaf):
            return leaf
        dtype = tf.as_dtype(keras_backend.standardize_dtype(leaf.dtype))
        shape = [_ROWS, *(_OPEN if size is None else size for size in tuple(leaf.shape)[1:])]
        values = tf.random.stateless_uniform(shape, (seed, 0), 0.05, 0.95)
        return tf.cast(values if dtype.is_floating else values > 0.5, dtype)

    return tree.map_structure(one, like)


def twice(batch: Any) -> Any:
    """Returns `batch` with every example in it twice."""
    return tree.map_structure(lambda leaf: tf.concat([leaf, leaf], axis=0), batch)


def is_batch(value: Any) -> bool:
    """Whether `value` is a dense tensor with a dimension for examples."""
    return tf.is_tensor(value) and bool(value.shape.rank)
