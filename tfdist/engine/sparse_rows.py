"""Sparse and ragged tensors in a form that can be split by example, down to no example at all.

TensorFlow splits a global batch by rows, and a replica may get none. A `tf.SparseTensor` without
rows cannot pass through `tf.data` (`DeserializeSparse` refuses it), nor can a `tf.RaggedTensor`
whose rows hold vectors. Lists of numbers can: so a tensor travels as one list for every example,
and is put together again on the replica.
"""

from __future__ import annotations

from typing import Any
from typing import NamedTuple

import tensorflow as tf
from keras import tree


class SparseRows(NamedTuple):
    """A `tf.SparseTensor` of shape [rows, *inner], or its spec, by rows.

    Attributes:
        indices: Ragged [rows, None]: for each value of a row its indices but the first, joined.
        values: Ragged [rows, None].
        inner: Tensor [rows, 0, *inner] of no elements: knows the shape even where rows is 0.
    """

    indices: Any
    values: Any
    inner: Any


class RaggedRows(NamedTuple):
    """A `tf.RaggedTensor` whose flat values have the shape [None, *inner], or its spec, by rows.

    Attributes:
        values: The ragged tensor with flat values of rank 1.
        inner: Tensor [rows, 0, *inner] of no elements: knows the shape even where rows is 0.
    """

    values: Any
    inner: Any


def split(batch: Any) -> Any:
    """Returns `batch` with the sparse and ragged tensors that cannot be without rows by rows.

    Args:
        batch: Structure of tensors.
    """

    def one(leaf: Any) -> Any:
        if not _must_split(leaf):
            return leaf
        return _split_sparse(leaf) if isinstance(leaf, tf.SparseTensor) else _split_ragged(leaf)

    return tree.map_structure(one, batch)


def split_dataset(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` with `split` done to its batches, or as it is if that changes nothing."""
    spec = dataset.element_spec
    if not any(map(_must_split, tree.flatten(spec))):
        return dataset
    # The function of `map` gets the parts of a tuple, but no other element, one by one.
    unpacks = type(spec) is tuple

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def by_rows(*batch: Any) -> Any:
        return split(batch if unpacks else batch[0])

    return dataset.map(by_rows)


def join(batch: Any) -> Any:
    """Returns the batch, or the structure of specs, that `split` was given, or a part of its rows.

    The values of a sparse tensor come ordered by row, and else in the order that they had.
    """

    def one(part: Any) -> Any:
        if isinstance(part, SparseRows):
            is_spec = isinstance(part.values, tf.TypeSpec)
            return _sparse_spec(part) if is_spec else _join_sparse(part)
        if isinstance(part, RaggedRows):
            is_spec = isinstance(part.values, tf.TypeSpec)
            return _ragged_spec(part) if is_spec else _join_ragged(part)
        return None  # What else there is stays.

    return tree.traverse(one, batch)


def is_split(batch: Any) -> bool:
    """Whether `split` has changed `batch`: there is something to `join`."""
    if isinstance(batch, (SparseRows, RaggedRows)):
        return True
    if isinstance(batch, dict):
        return any(map(is_split, batch.values()))
    return isinstance(batch, (list, tuple)) and any(map(is_split, batch))


def _must_split(leaf: Any) -> bool:
    """Whether a tensor, or the tensors of a spec, cannot be without rows in `tf.data`."""
    if isinstance(leaf, (tf.SparseTensor, tf.SparseTensorSpec)):
        return bool(leaf.shape.rank)
    if isinstance(leaf, tf.RaggedTensor):
        return bool(leaf.flat_values.shape.rank and leaf.flat_values.shape.rank > 1)
    if isinstance(leaf, tf.RaggedTensorSpec) and leaf.shape.rank:
        return bool(leaf.ragged_rank and leaf.shape.rank > leaf.ragged_rank + 1)
    return False


def _split_sparse(sparse: tf.SparseTensor) -> SparseRows:
    order = tf.argsort(sparse.indices[:, 0], stable=True)
    indices = tf.gather(sparse.indices, order)
    count = sparse.shape[0]
    rows = tf.experimental.RowPartition.from_value_rowids(
        indices[:, 0], nrows=sparse.dense_shape[0] if count is None else count
    )
    values = tf.RaggedTensor.from_row_splits(
        tf.gather(sparse.values, order), rows.row_splits(), validate=False
    )
    joined = tf.RaggedTensor.from_row_splits(
        tf.reshape(indices[:, 1:], [-1]),
        rows.row_splits() * (sparse.shape.rank - 1),
        validate=False,
    )
    return SparseRows(joined, values, _nothing(sparse.dense_shape, sparse.shape))


def _join_sparse(rows: SparseRows) -> tf.SparseTensor:
    row = tf.cast(rows.values.value_rowids(), tf.int64)
    rest = tf.reshape(rows.indices.flat_values, [tf.size(row), rows.inner.shape.rank - 2])
    shape = [tf.cast(rows.values.nrows(), tf.int64), *_dims(rows.inner)]
    return tf.SparseTensor(
        tf.concat([row[:, tf.newaxis], rest], 1), rows.values.flat_values, tf.stack(shape)
    )


def _sparse_spec(rows: SparseRows) -> tf.SparseTensorSpec:
    shape = [rows.inner.shape[0], *rows.inner.shape[2:]]
    return tf.SparseTensorSpec(shape, rows.values.dtype)


def _split_ragged(ragged: tf.RaggedTensor) -> RaggedRows:
    flat = ragged.flat_values
    shape = tf.shape(flat, tf.int64)
    count = ragged.shape[0]
    rows = tf.cast(ragged.nrows() if count is None else count, tf.int64)
    *outer, last = ragged.nested_row_splits
    last *= tf.cast(tf.reduce_prod(shape[1:]), last.dtype)
    values = tf.RaggedTensor.from_nested_row_splits(
        tf.reshape(flat, [-1]), [*outer, last], validate=False
    )
    return RaggedRows(
        values,
        _nothing(tf.concat([[rows], shape[1:]], 0), tf.TensorShape([count, *flat.shape[1:]])),
    )


def _join_ragged(rows: RaggedRows) -> tf.RaggedTensor:
    *outer, last = rows.values.nested_row_splits
    dims = _dims(rows.inner)
    size = tf.maximum(tf.reduce_prod(tf.stack(dims)), 1)
    last //= tf.cast(size, last.dtype)
    flat = tf.reshape(rows.values.flat_values, tf.stack([tf.cast(last[-1], tf.int64), *dims]))
    return tf.RaggedTensor.from_nested_row_splits(flat, [*outer, last], validate=False)


def _ragged_spec(rows: RaggedRows) -> tf.RaggedTensorSpec:
    spec = rows.values
    shape = spec.shape.concatenate(rows.inner.shape[2:])
    return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)


def _nothing(shape: Any, static: tf.TensorShape) -> tf.Tensor:
    """Returns a tensor of no elements that knows the inner dimensions of `shape`."""
    # The 0 comes second so that the product of dimensions does not overflow.
    nothing = tf.zeros(tf.concat([shape[:1], [0], shape[1:]], 0), tf.int8)
    return tf.ensure_shape(nothing, [static[0], 0, *static[1:]])


def _dims(nothing: tf.Tensor) -> list[tf.Tensor]:
    """Returns the inner dimensions; those that are known before the step runs as constants."""
    shape = tf.shape(nothing, tf.int64)
    return [
        shape[i] if dim is None else tf.constant(dim, tf.int64)
        for i, dim in enumerate(nothing.shape)
    ][2:]
