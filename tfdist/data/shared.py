"""Arrays in memory that other processes of this host read without a copy of their own.

A large array inside a pipeline that is sent costs the receiver ten times its size while it takes
the pipeline in. So it is put once into memory without a name, which is there as long as this
process is, and TensorFlow there maps it and reads the rows that it needs.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

#: Smaller arrays are faster to send.
_LEAST_BYTES = 16 << 20


class SharedArray:
    """An array that processes of the same user on this host can map.

    Args:
        array: A dense tensor of numbers.
    """

    def __init__(self, array: tf.Tensor):
        value = np.ascontiguousarray(array.numpy())
        self._dtype, self._shape = array.dtype, array.shape
        self._descriptor = os.memfd_create("tfdist")
        rest = memoryview(value.view(np.uint8).reshape(-1).data)
        while rest:
            rest = rest[os.write(self._descriptor, rest[: 1 << 30]) :]
        self._path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def rows(self, indices: Any) -> Any:
        """Returns some rows, in a graph for another process."""
        whole = tf.raw_ops.ImmutableConst(
            dtype=self._dtype, shape=self._shape, memory_region_name=self._path
        )
        return tf.gather(whole, indices)


def is_worth_sharing(leaf: Any) -> bool:
    """Whether a component of a source is an array that had better be shared than sent."""
    if not isinstance(leaf, tf.Tensor) or not hasattr(os, "memfd_create"):
        return False
    is_plain = leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool
    return bool(is_plain) and leaf.dtype.size * int(leaf.shape.num_elements() or 0) >= _LEAST_BYTES
