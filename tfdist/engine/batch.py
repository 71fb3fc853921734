"""One global batch as one process sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from keras import tree
from tensorflow.python.distribute.values import PerReplica

from tfdist.engine.sparse_rows import join


@dataclasses.dataclass(frozen=True)
class Batch:
    """One global batch as one process sees it.

    Attributes:
        data: Structure of tensors, or of values for each local replica.
        share: Examples of a replica over those of the global batch: a scalar tensor, or one for
            each local replica.
        is_fixed: Whether batches have the same number of examples at every step.
        has_empty_parts: Whether a replica of this process may have no examples.
        packing: How to make a replica's batch of `data`, if that is not it already.
    """

    data: Any
    share: Any
    is_fixed: bool
    has_empty_parts: bool = False
    packing: Packing | None = None

    def unpacked(self, strategy: Any) -> Any:
        """Returns the data as the model takes it, with values for each local replica.

        Args:
            strategy: The strategy of the model.
        """
        if self.packing is None:
            return self.data
        local = [strategy.experimental_local_results(leaf) for leaf in self.data]
        parts = [self.packing.pack(list(flat)) for flat in zip(*local, strict=True)]
        if len(parts) == 1:
            return parts[0]
        return tree.map_structure(
            lambda *leaves: None if leaves[0] is None else PerReplica(leaves), *parts
        )


class Packing:
    """The structure of a batch with ragged or sparse tensors, which travel as their components.

    TensorFlow hands values to several local replicas only if they are dense tensors, and some
    tensors come from `tf.data` by rows (see `tfdist.engine.sparse_rows`).

    Args:
        batch: A batch.
    """

    def __init__(self, batch: Any):
        self._spec = tf.nest.map_structure(_open_spec, batch)
        self._text = repr(self._spec)

    def flatten(self, batch: Any) -> list[Any]:
        """Returns the dense tensors that `batch` is made of."""
        flat: list[Any] = tf.nest.flatten(batch, expand_composites=True)
        return flat

    def pack(self, flat: list[Any]) -> Any:
        """Returns the batch that is made of dense tensors."""
        return join(tf.nest.pack_sequence_as(self._spec, flat, expand_composites=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packing) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


def _open_spec(leaf: Any) -> Any:
    """Returns the spec of a tensor, with any number of examples."""
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = tf.TensorShape([None, *spec.shape[1:]])
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(tf.TensorShape([None, *spec.shape[1:]]), spec.dtype)
    return tf.TensorSpec(None, spec.dtype) if isinstance(spec, tf.TensorSpec) else spec
