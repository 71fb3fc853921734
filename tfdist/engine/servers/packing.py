"""Values that travel between a worker and a server in one message.

Every tensor that crosses devices is a message of its own, of about a tenth of a millisecond on
both sides. A model has dozens of small variables; packed one after the other they cross as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Packer:
    """Packs tensors of known shapes and dtypes into one for each kind of number, and back.

    Whole numbers of 4 and 8 bytes travel as the bits of float32, so that a counter beside the
    weights is no message of its own.

    Args:
        shapes: Shape of each tensor.
        dtypes: Dtype of each.
    """

    def __init__(self, shapes: Sequence[Any], dtypes: Sequence[tf.DType]):
        self._shapes = [tf.TensorShape(shape) for shape in shapes]
        self._dtypes = [tf.as_dtype(dtype) for dtype in dtypes]
        self._groups: dict[tf.DType, list[int]] = {}
        for index, dtype in enumerate(self._dtypes):
            self._groups.setdefault(_carrier(dtype), []).append(index)

    def pack(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns a vector for each kind of number."""
        return [
            _joined([_flat(tensors[index], carrier) for index in indices])
            for carrier, indices in self._groups.items()
        ]

    def unpack(self, vectors: Sequence[Any]) -> list[Any]:
        """Returns the tensors that `pack` was given."""
        tensors: dict[int, Any] = {}
        for vector, (carrier, indices) in zip(vectors, self._groups.items(), strict=True):
            parts = [vector]
            if len(indices) > 1:
                parts = tf.split(vector, [self._width(index, carrier) for index in indices])
            for index, part in zip(indices, parts, strict=True):
                tensors[index] = self._shaped(part, index, carrier)
        return [tensors[index] for index in range(len(self._shapes))]

    def _width(self, index: int, carrier: tf.DType) -> int:
        count = int(np.prod(self._shapes[index].as_list()))
        return count * max(1, self._dtypes[index].size // carrier.size)

    def _shaped(self, part: Any, index: int, carrier: tf.DType) -> Any:
        shape, dtype = self._shapes[index], self._dtypes[index]
        if dtype == carrier:
            return tf.reshape(part, shape)
        inner = [dtype.size // carrier.size] if dtype.size > carrier.size else []
        return tf.bitcast(tf.reshape(part, [*shape.as_list(), *inner]), dtype)


def _carrier(dtype: tf.DType) -> tf.DType:
    is_number = dtype.is_floating or dtype.is_integer
    return tf.float32 if is_number and dtype.size in (4, 8) else dtype


def _flat(tensor: Any, carrier: tf.DType) -> Any:
    if tensor.dtype != carrier:
        tensor = tf.bitcast(tensor, carrier)
    return tf.reshape(tensor, [-1])


def _joined(vectors: list[Any]) -> Any:
    return tf.concat(vectors, axis=0) if len(vectors) > 1 else tf.identity(vectors[0])
