"""Dense, ragged and sparse ids: their values in a row, and the vectors put back in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError

COMBINERS = ("sum", "mean", "sqrtn")


def values_of(ids: Any) -> tf.Tensor:
    """Returns the values of a dense, ragged or sparse tensor as a dense one."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values
    return ids.values if isinstance(ids, tf.SparseTensor) else ids


def map_values(function: Callable[[Any], Any], ids: Any) -> Any:
    """Returns `ids` with other values: `function` of those that it has."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(function(ids.flat_values))
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensor(ids.indices, function(ids.values), ids.dense_shape)
    return function(ids)


def combine(ids: Any, vectors: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> Any:
    """Returns one vector for all ids along the last axis.

    Args:
        ids: Dense, ragged or sparse tensor of shape [..., ids].
        vectors: Of shape [*values_of(ids).shape, columns].
        weights: Of shape `values_of(ids).shape` and the dtype of `vectors`, or None for 1.
        combiner: "sum"; "mean", divided by the sum of weights; or "sqrtn", by the root of the sum
            of their squares. Where there is nothing to divide by, the result is 0.

    Returns:
        Tensor of shape [..., columns]; ragged only where `ids` has two ragged dimensions or more,
        or dense dimensions inside of ragged ones.

    Raises:
        ConfigError: `ids` has no axis to combine along.
    """
    if ids.shape.rank is not None and ids.shape.rank < 2:
        raise ConfigError(
            "ids of shape [batch, ..., ids] for a combiner",
            f"shape {tuple(ids.shape)}",
            "add an axis, or leave the combiner out",
        )
    if weights is not None:
        vectors = vectors * weights[..., tf.newaxis]
    total, put_back = _summation(ids)
    result = total(vectors)
    if combiner != "sum":
        ones = tf.ones(tf.shape(values_of(ids)), vectors.dtype)
        weights = ones if weights is None else weights
        divisor = total((weights if combiner == "mean" else tf.square(weights))[..., tf.newaxis])
        divisor = divisor if combiner == "mean" else tf.sqrt(divisor)
        result = tf.math.divide_no_nan(result, divisor)
    return put_back(result)


def _summation(ids: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns the sum along the last axis of ids, and what gives the result its shape."""
    if isinstance(ids, tf.SparseTensor):
        return _sparse_summation(ids)
    if not isinstance(ids, tf.RaggedTensor) or ids.flat_values.shape.rank > 1:
        # The last axis is dense, maybe inside of ragged ones.
        def along_axis(values: Any) -> Any:
            return tf.reduce_sum(values, axis=-2)

        if isinstance(ids, tf.RaggedTensor):
            return along_axis, ids.with_flat_values
        return along_axis, lambda result: result
    *outer, last = ids.nested_row_splits
    rows = tf.size(last) - 1
    row = tf.ragged.row_splits_to_segment_ids(last)

    def by_row(values: Any) -> Any:
        return tf.math.unsorted_segment_sum(values, row, rows)

    def with_outer(result: Any) -> Any:
        if not outer:
            return tf.ensure_shape(result, [ids.shape[0], *result.shape[1:]])
        return tf.RaggedTensor.from_nested_row_splits(result, outer, validate=False)

    return by_row, with_outer


def _sparse_summation(ids: tf.SparseTensor) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    outer = ids.dense_shape[:-1]
    strides = tf.math.cumprod(outer, exclusive=True, reverse=True)
    row = tf.reduce_sum(ids.indices[:, :-1] * strides, axis=1)

    def by_row(values: Any) -> Any:
        return tf.math.unsorted_segment_sum(values, row, tf.reduce_prod(outer))

    def with_outer(result: Any) -> Any:
        columns = [int(result.shape[-1])]
        result = tf.reshape(result, tf.concat([outer, tf.constant(columns, tf.int64)], 0))
        return tf.ensure_shape(result, ids.shape[:-1].concatenate(columns))

    return by_row, with_outer
