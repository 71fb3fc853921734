"""Sources whose examples can be read in any order: arrays and sequences."""

from __future__ import annotations

import zlib
from typing import Any
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdist.data.policy import Facts
from tfdist.data.shared import SharedArray
from tfdist.data.shared import is_worth_sharing
from tfdist.errors import ConfigError


class Indexed(Protocol):
    """A source that gives any example for its number."""

    facts: Facts
    length: int

    def batches(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of the examples at each vector of indices."""

    def in_graph(self, indices: tf.data.Dataset, rows: int, near: bool) -> tf.data.Dataset:
        """Returns the same without any Python, for another process.

        Args:
            indices: Vectors of indices.
            rows: Length of each of them.
            near: Whether the process is on this host, and sees the memory of this one.

        Raises:
            NotImplementedError: There is no such.
        """

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data, fit for JSON."""


class ArraySource:
    """Arrays with the same number of rows.

    Args:
        arrays: Structure of NumPy arrays, pandas frames or series, or tensors, ragged ones too;
            None where there is nothing.
    """

    kind = "arrays"

    def __init__(self, arrays: Any):
        self._arrays = tf.nest.map_structure(_tensor, arrays)
        lengths = {_rows(leaf) for leaf in tf.nest.flatten(self._arrays) if leaf is not None}
        if len(lengths) != 1:
            raise ConfigError(
                "arrays with the same number of rows", f"{sorted(lengths) or 'no array'}"
            )
        [self.length] = lengths
        self.facts = Facts(self.kind, self.length, is_indexed=True)
        self._shared: list[SharedArray | None] | None = None

    def batches(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of the examples at each vector of indices."""
        arrays = self._arrays

        def gather(rows: Any) -> Any:
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.gather(leaf, rows), arrays
            )

        return indices.map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def in_graph(self, indices: tf.data.Dataset, rows: int, near: bool) -> tf.data.Dataset:
        """Returns the same; arrays that are not shared go with the graph."""
        if not near:
            return self.batches(indices)
        if self._shared is None:
            self._shared = [
                SharedArray(leaf) if is_worth_sharing(leaf) else None
                for leaf in tf.nest.flatten(self._arrays)
            ]
        shared, arrays = self._shared, self._arrays

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def gather(rows: Any) -> Any:
            leaves = [
                memory.rows(rows) if memory else None if leaf is None else tf.gather(leaf, rows)
                for memory, leaf in zip(shared, tf.nest.flatten(arrays), strict=True)
            ]
            return tf.nest.pack_sequence_as(arrays, leaves)

        return indices.map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data; it looks into three examples."""
        rows = sorted({0, self.length // 2, self.length - 1}) if self.length else []
        digest = 0
        for leaf in tf.nest.flatten(self._arrays):
            for row in rows if isinstance(leaf, tf.Tensor) else []:
                digest = zlib.crc32(tf.io.serialize_tensor(leaf[row]).numpy(), digest)
        return {"examples": self.length, "sampled": digest}


class SequenceSource:
    """Whatever has a length and gives an example for a number.

    Args:
        sequence: Has `__len__` and `__getitem__`. An example is a structure of tuples and dicts
            of arrays, numbers or text, all examples with the same shapes.
    """

    kind = "sequence"

    def __init__(self, sequence: Any):
        self._sequence = sequence
        self.length = len(sequence)
        if not self.length:
            raise ConfigError("at least one example", f"a {type(sequence).__name__} of length 0")
        self._first = example(sequence[0])
        self.facts = Facts(self.kind, self.length, is_indexed=True)

    def batches(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of the examples at each vector of indices."""
        first = tf.nest.flatten(self._first)
        dtypes = [tf.as_dtype(leaf.dtype) for leaf in first]

        def read(rows: np.ndarray) -> list[np.ndarray]:
            found = [tf.nest.flatten(example(self._sequence[int(row)])) for row in rows]
            return [
                np.stack(leaves).astype(like.dtype, copy=False)
                for leaves, like in zip(zip(*found, strict=True), first, strict=True)
            ]

        def batch(rows: Any) -> Any:
            leaves = tf.numpy_function(read, [rows], dtypes)
            for leaf, like in zip(leaves, first, strict=True):
                leaf.set_shape([None, *like.shape])
            return tf.nest.pack_sequence_as(self._first, leaves)

        return indices.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def in_graph(self, indices: tf.data.Dataset, rows: int, near: bool) -> tf.data.Dataset:
        """There is no such: the sequence is Python."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data; it reads the first and last example."""
        digest = 0
        for each in (self._first, example(self._sequence[self.length - 1])):
            for leaf in tf.nest.flatten(each):
                raw = repr(leaf.tolist()).encode() if leaf.dtype == object else leaf.tobytes()
                digest = zlib.crc32(raw, digest)
        return {"examples": self.length, "sampled": digest}


def example(value: Any) -> Any:
    """Returns an example of Python's and NumPy's values as a structure of arrays."""
    if isinstance(value, dict):
        return {key: example(each) for key, each in value.items()}
    if isinstance(value, tuple):
        parts = [example(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, float):
        return np.asarray(value, np.float32)
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "US" else array


def _tensor(array: Any) -> Any:
    if array is None or tf.is_tensor(array) or isinstance(array, tf.RaggedTensor):
        return array
    if hasattr(array, "to_numpy"):
        array = array.to_numpy()
    array = np.asarray(array)
    if array.dtype == object:
        return tf.convert_to_tensor(array.tolist())
    return tf.convert_to_tensor(array)


def _rows(leaf: Any) -> int:
    return int(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else leaf.shape[0])
