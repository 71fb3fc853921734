"""Orders of arrays and of `PyDataset`s that all workers share, new in every epoch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.trainers.data_adapters import array_data_adapter
from keras.src.trainers.data_adapters import array_slicing

from tfdist.data.indexed import ArraySource
from tfdist.data.order import permutation
from tfdist.data.parts import Maps
from tfdist.data.sharded import Sharded
from tfdist.engine import seeds


def is_shuffled_array(adapter: Any) -> bool:
    """Whether Keras would shuffle the arrays of `adapter`."""
    return isinstance(adapter, array_data_adapter.ArrayDataAdapter) and bool(adapter._shuffle)


def sharded_arrays(adapter: Any) -> Sharded | None:
    """Returns the arrays given to `fit` as data with a position; None if they are no dense arrays.

    Args:
        adapter: A data adapter of Keras.
    """
    if not isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return None
    inputs = tree.lists_to_tuples(
        array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    )
    wrapper = array_slicing.TensorflowSparseWrapper
    if any(isinstance(leaf, wrapper) for leaf in _leaves(inputs, wrapper)):
        return None
    return Sharded(
        ArraySource(inputs),
        Maps(),
        batch_size=adapter._batch_size,
        shuffle=adapter._shuffle,
        remainder="partial",
    )


def shuffled_arrays(adapter: Any) -> tf.data.Dataset:
    """Returns batches of arrays in an order that all workers share and that changes every epoch.

    Keras shuffles with an operation whose seed is the worker's own, so that workers read different
    orders; with a program-wide seed it reads the same order in every epoch.
    """
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    inputs = tree.lists_to_tuples(inputs)
    rows = tf.data.Dataset.range(adapter._num_samples)
    if adapter._shuffle == "batch":
        order = rows.batch(adapter._batch_size)
        order = order.shuffle(int(order.cardinality()), seed=seeds.next_seed())
    else:
        order = rows.shuffle(adapter._num_samples, seed=seeds.next_seed())
        order = order.batch(adapter._batch_size)

    def gather(indices: Any, data: Any) -> Any:
        def one(value: Any) -> Any:
            if isinstance(value, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(value, indices)
            if isinstance(value, (list, tuple, dict)):
                return None
            return tf.gather(value, indices, axis=0) if tf.is_tensor(value) else value

        return tree.traverse(one, data)

    whole = tf.data.Dataset.from_tensors(inputs).repeat()
    return tf.data.Dataset.zip((order, whole)).map(gather, num_parallel_calls=tf.data.AUTOTUNE)


class OrderedPyDataset(keras.utils.PyDataset):
    """A PyDataset in an order that follows from a seed, and that may begin anywhere in it.

    Args:
        inner: The PyDataset.
        seed: What the order of each pass is drawn from; None: in the order of the numbers.

    Attributes:
        seed: As given.
    """

    def __init__(self, inner: Any, seed: int | None):
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner = inner
        self.seed = seed
        self._order: Any = None
        self._begin = 0
        self.turn_to(0)

    def turn_to(self, epoch: int, begin: int = 0) -> None:
        """Makes the next reading that of a pass, from a batch of it on."""
        self._begin = begin
        count = self._inner.num_batches
        if self.seed is not None and count:
            self._order = permutation(count, self.seed, epoch)

    @property
    def whole(self) -> int | None:
        """Batches of a pass from its beginning."""
        count: int | None = self._inner.num_batches
        return count

    @property
    def num_batches(self) -> int | None:
        return None if self.whole is None else self.whole - self._begin

    def __getitem__(self, index: int) -> Any:
        index += self._begin
        return self._inner[index if self._order is None else int(self._order[index])]

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()


def _leaves(structure: Any, kind: type) -> list[Any]:
    if isinstance(structure, kind) or not isinstance(structure, (tuple, list, dict)):
        return [structure]
    each = structure.values() if isinstance(structure, dict) else structure
    return [leaf for part in each for leaf in _leaves(part, kind)]
