"""Batches as bytes: all components of an execution's batches travel to a worker as one tensor.

Every tensor that is sent is a message of its own, and costs the coordinator a tenth of a
millisecond or more, however small it is. A batch has a tensor for each feature, and an execution
has several batches.

    parcels = Parcels(dataset.element_spec)
    dataset.map(parcels.pack)                       # in tf.data's own threads
    data, texts = parcels.join(number, batches)     # as many batches as an execution has steps
    number, batches = parcels.open(data, texts, steps)      # in the graph, on the worker
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.engine.replicas import none_if_optional

_INT = 8  # Bytes of one.


class Packed(NamedTuple):
    """One batch.

    Attributes:
        sizes: int64 vector: number of examples, number of elements of each component, and the
            shapes of those whose specs leave more open than the first dimension.
        data: uint8 vector: the numbers of all components.
        texts: Vector of strings; None where the spec has none.
    """

    sizes: np.ndarray
    data: np.ndarray
    texts: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """Number of examples; of ragged tensors this is the number of their values."""
        return int(self.sizes[0])


class Parcels:
    """Packs batches of one spec.

    Args:
        spec: Structure of `tf.TypeSpec` of one batch.
    """

    def __init__(self, spec: Any):
        self._spec = spec
        leaves = _leaves(spec)
        self._leaves = [leaf for leaf in leaves if leaf is not None]
        self._is_there = [leaf is not None for leaf in leaves]
        self._texts = [i for i, leaf in enumerate(self._leaves) if _is_text(leaf)]
        self._numbers = [i for i, leaf in enumerate(self._leaves) if not _is_text(leaf)]
        self._open = [i for i, leaf in enumerate(self._leaves) if _has_open_shape(leaf)]
        self._pack: Any = None
        self._size = 1 + len(self._leaves)
        self._size += sum(self._leaves[i].shape.rank for i in self._open)

    def pack(self, *batch: Any) -> tuple[Any, ...]:
        """Returns the tensors of which `Packed` has the values; for `tf.data.Dataset.map`."""
        # The function of `map` gets the parts of a tuple, but no other element, one by one.
        structure = batch if type(self._spec) is tuple else batch[0]
        leaves = [leaf for leaf in _leaves(structure) if leaf is not None]
        first = leaves[0]
        rows = tf.shape(first, tf.int64)[0] if first.shape.rank else tf.constant(1, tf.int64)
        leaves = [_known_rank(leaf) for leaf in leaves]
        counts = [tf.size(leaf, tf.int64) for leaf in leaves]
        shapes = [tf.shape(leaves[index], tf.int64) for index in self._open]
        sizes = tf.concat([tf.stack([rows, *counts]), *shapes], axis=0)
        data = _joined([_bytes(leaves[index]) for index in self._numbers], tf.uint8)
        if not self._texts:
            return sizes, data
        return sizes, data, _joined([tf.reshape(leaves[i], [-1]) for i in self._texts], tf.string)

    def packed(self, batch: Any) -> Packed:
        """Returns a batch of tensors, packed at once."""
        if self._pack is None:
            self._pack = tf.function(self.pack, autograph=False, reduce_retracing=True)
        tensors = self._pack(*batch) if type(self._spec) is tuple else self._pack(batch)
        return Packed(*(tensor.numpy() for tensor in tensors))

    def join(self, number: int, batches: Sequence[Packed]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the bytes of several batches, and their strings.

        Args:
            number: Number of the first step.
            batches: Batches in their order.
        """
        lengths = np.array([number, *(batch.data.size for batch in batches)], np.int64)
        head = np.concatenate([lengths, *(batch.sizes for batch in batches)])
        texts = [batch.texts for batch in batches if batch.texts is not None]
        return (
            np.concatenate([head.view(np.uint8), *(batch.data for batch in batches)]),
            np.concatenate(texts) if texts else None,
        )

    def signature(self) -> list[tf.TensorSpec]:
        """Returns the specs of what `join` returns."""
        texts = [tf.TensorSpec([None], tf.string)] if self._texts else []
        return [tf.TensorSpec([None], tf.uint8), *texts]

    def open(self, data: Any, texts: Any, steps: int) -> tuple[Any, list[list[Any]]]:
        """Returns the number of the first step, and the components of each batch.

        Args:
            data: uint8 vector, as of `join`.
            texts: Vector of strings, or None.
            steps: Number of batches.
        """
        width = _INT * (1 + steps + steps * self._size)
        head = tf.bitcast(tf.reshape(data[:width], [-1, _INT]), tf.int64)
        sizes = tf.reshape(head[1 + steps :], [steps, self._size])
        datas = _split(data[width:], head[1 : 1 + steps], steps)
        many = [None] * steps
        if self._texts:
            counts = [sizes[:, 1 + index] for index in self._texts]
            many = _split(texts, tf.add_n(counts), steps)
        return head[0], [self._unpack(sizes[i], datas[i], many[i]) for i in range(steps)]

    def _unpack(self, sizes: Any, data: Any, texts: Any) -> list[Any]:
        parts: dict[int, Any] = {}
        counts = [sizes[1 + index] for index in self._numbers]
        widths = [max(1, _dtype(self._leaves[index]).size) for index in self._numbers]
        if counts:
            lengths = tf.stack(counts) * tf.constant(widths, tf.int64)
            parts |= zip(self._numbers, _split(data, lengths, len(counts)), strict=True)
        if self._texts:
            counts = [sizes[1 + index] for index in self._texts]
            parts |= zip(self._texts, _split(texts, tf.stack(counts), len(counts)), strict=True)
        at = 1 + len(self._leaves)
        found = []
        for index, leaf in enumerate(self._leaves):
            shape = None
            if index in self._open:
                shape = sizes[at : at + leaf.shape.rank]
                at += leaf.shape.rank
            found.append(_shaped(parts[index], leaf, shape))
        there = iter(found)
        return [next(there) if is_there else None for is_there in self._is_there]


def _leaves(structure: Any) -> list[Any]:
    """Returns the components of a batch, or their specs."""
    present = tree.map_structure(none_if_optional, structure)
    leaves: list[Any] = tf.nest.flatten(present, expand_composites=True)
    return leaves


def _is_text(leaf: tf.TensorSpec) -> bool:
    return leaf.dtype == tf.string or leaf.shape.rank is None


def _has_open_shape(leaf: tf.TensorSpec) -> bool:
    """Whether the number of elements does not tell the shape."""
    return bool(leaf.shape.rank) and not all(leaf.shape.as_list()[1:])


def _known_rank(tensor: Any) -> Any:
    """Returns a tensor as it is; one of no known rank as a string that holds it."""
    return tf.io.serialize_tensor(tensor) if tensor.shape.rank is None else tensor


def _dtype(leaf: tf.TensorSpec) -> tf.DType:
    return tf.uint8 if leaf.dtype == tf.bool else leaf.dtype


def _bytes(tensor: Any) -> Any:
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _shaped(part: Any, leaf: tf.TensorSpec, shape: Any) -> Any:
    """Returns the tensor of spec `leaf` that `part` is made of; `shape` if the spec leaves it open.

    Args:
        part: uint8 vector or vector of strings.
        leaf: Spec of the tensor.
        shape: int64 vector, or None.
    """
    if leaf.shape.rank is None:
        return tf.io.parse_tensor(tf.reshape(part, []), leaf.dtype)
    if shape is None:
        inner = leaf.shape.as_list()[1:]
        shape = tf.constant([-1, *inner] if leaf.shape.rank else [], tf.int64)
    if leaf.dtype != tf.string:
        dtype = _dtype(leaf)
        width = [dtype.size] if dtype.size > 1 else []
        part = tf.bitcast(tf.reshape(part, tf.concat([shape, width], axis=0)), dtype)
        part = tf.cast(part, leaf.dtype)
    else:
        part = tf.reshape(part, shape)
    part.set_shape(leaf.shape)
    return part


def _joined(vectors: list[Any], dtype: tf.DType) -> Any:
    return tf.concat(vectors, axis=0) if vectors else tf.zeros([0], dtype)


def _split(vector: Any, sizes: Any, count: int) -> list[Any]:
    return [vector] if count == 1 else tf.split(vector, sizes, num=count)
