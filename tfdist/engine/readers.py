"""Reads one worker's part of a distributed dataset, batch after batch.

TensorFlow's own iterator over a distributed dataset asks all workers with a collective, before
every batch, whether anybody has data left, and moves batches through one more iterator. On CPU
neither is needed: a plain `tf.data` iterator reads the part of this worker, and how many batches
there are is known to all, or asked over the group.
"""

from __future__ import annotations

from typing import Any
from typing import Protocol

import tensorflow as tf
from keras import tree
from tensorflow.python.distribute import input_lib
from tensorflow.python.ops import gen_dataset_ops

from tfdist.cluster import current
from tfdist.data.parts import without_tuning
from tfdist.data.shuffles import Shuffles
from tfdist.engine import iterators
from tfdist.engine.batch import Batch
from tfdist.engine.batch import Packing
from tfdist.engine.exchange import exchange
from tfdist.engine.input_wait import Waiting
from tfdist.engine.parcels import Packed
from tfdist.engine.parcels import Parcels
from tfdist.engine.replicas import is_composite
from tfdist.engine.replicas import is_on_cpu
from tfdist.engine.replicas import is_several_workers
from tfdist.engine.replicas import local_devices
from tfdist.engine.replicas import none_if_optional
from tfdist.engine.replicas import quiet
from tfdist.engine.sparse_rows import is_split
from tfdist.errors import ConfigError

#: What a worker says of its part of the data before a step.
_GOES_ON, _ENDED, _LACKS_FILES = range(3)


class Reader(Protocol):
    """What a feed needs of a reader.

    Attributes:
        waiting: Time waited for the data, without that for other workers; None if not known.
    """

    waiting: Waiting | None

    def start(self) -> None:
        """Begins at the start of the data."""

    def next(self) -> Any:
        """Returns the next batch, or None at the end."""

    def skip(self) -> None:
        """Reads a batch, or the end, and drops it."""

    def pass_over(self) -> None:
        """Reads the data from its start to its end, and drops it."""

    def saved(self) -> bytes | None:
        """Returns the state of what is read, or None if TensorFlow cannot save it."""

    def restore(self, batches: int, state: bytes) -> None:
        """Begins where `saved` has returned `state`, after so many batches."""


def reader_for(
    strategy: Any,
    distributed: Any,
    batches: int | None,
    ours: bool,
    shuffles: Shuffles | None = None,
) -> Reader:
    """Returns the reader that suits the devices.

    Args:
        strategy: The strategy of the model.
        distributed: A `tf.distribute.DistributedDataset` or the like.
        batches: Global batches in the data, the same number on every worker; -1 if it never ends,
            None if it is not known or not the same.
        ours: Whether `distributed` was made by us from a `tf.data.Dataset`.
        shuffles: Those of the data, where the reader is to save its state, also where that is
            slower.
    """
    if isinstance(distributed, tf.data.Dataset):  # The default strategy's way.
        return LocalReader(strategy, distributed, batches, shuffles)
    suits = is_on_cpu(strategy) or shuffles is not None
    if ours and suits and len(distributed._cloned_datasets) == 1:
        return LocalReader(strategy, distributed._cloned_datasets[0], batches, shuffles)
    return DistributedReader(strategy, distributed)


class LocalReader:
    """Reads with a plain iterator; replicas without examples get a batch of none.

    Args:
        strategy: The strategy of the model.
        dataset: This worker's part, in batches of one replica.
        batches, shuffles: As for `reader_for`.
    """

    def __init__(
        self,
        strategy: Any,
        dataset: tf.data.Dataset,
        batches: int | None,
        shuffles: Shuffles | None = None,
    ):
        self.waiting: Waiting | None = Waiting()
        self._waiting = self.waiting
        self._shuffles = shuffles
        self._shares = Shares(strategy)
        self._replicas = self._shares.local_replicas
        # While a step runs the next batch is made.
        self._dataset = without_tuning(dataset.prefetch(tf.data.AUTOTUNE))
        self._batches = batches
        # Batches of one fixed size, of which every replica has one until the end: nothing to ask.
        self._is_fixed = _has_fixed_size(dataset.element_spec)
        self._even = batches is not None and self._is_fixed
        self._left: int | None = None
        self._iterator: Any = None

    def start(self) -> None:
        self._iterator = iter(self._dataset)
        self._left = self._batches

    def skip(self) -> None:
        self._read()
        self._count()

    def pass_over(self) -> None:
        _read_through(self._dataset)

    def saved(self) -> bytes | None:
        return _saved_with(self._shuffles, self._iterator)

    def restore(self, batches: int, state: bytes) -> None:
        self.start()
        iterators.restore(self._iterator, state)
        for _ in range(batches):
            self._count()

    def _count(self) -> None:
        if self._left is not None and self._left > 0:
            self._left -= 1

    def next(self) -> Batch | None:
        if self._left == 0:
            return None
        state, parts = self._read()
        rows = [0 if part is None else _rows(part) for part in parts]
        if self._even and all(part is not None for part in parts):
            share = self._shares.even
        else:
            everyone = self._shares.gather(state, rows)
            # Who knows how many batches there are reads as many, empty ones too.
            unknown = self._left is None or self._left < 0
            if unknown and all(state == _ENDED for state, _ in everyone):
                return None
            share = self._shares.of(rows, [rows for _, rows in everyone])
        self._count()
        parts = [self._no_examples() if part is None else part for part in parts]
        is_fixed = self._is_fixed and all(rows)
        composite = any(map(is_composite, tree.flatten(parts[0])))
        if is_split(parts[0]) or self._replicas > 1 and composite:
            return self._shares.packed(parts, share, is_fixed, not all(rows))
        return Batch(self._shares.per_replica(parts), share, is_fixed, not all(rows))

    def _read(self) -> tuple[int, list[Any]]:
        """Returns the state of this worker's part, and the next batch of each local replica."""
        try:
            with self._waiting:
                parts = [next(self._iterator, None) for _ in range(self._replicas)]
        except tf.errors.InvalidArgumentError as error:
            if "FILE based sharding" not in str(error):
                raise
            # A worker past the last file sees no error, only no data: all must be told.
            return _LACKS_FILES, [None] * self._replicas
        if all(part is None for part in parts):
            return _ENDED, parts
        return _GOES_ON, [
            None if part is None else tree.map_structure(none_if_optional, part) for part in parts
        ]

    def _no_examples(self) -> Any:
        return input_lib._dummy_tensor_fn(self._dataset.element_spec)


class WholeReader:
    """Reads all of a dataset here, as one device does; its batches are packed.

    Args:
        dataset: A `tf.data.Dataset`.
        shuffles: Those of the data, where its state is to be saved.
    """

    def __init__(self, dataset: tf.data.Dataset, shuffles: Shuffles | None = None):
        self.waiting: Waiting | None = Waiting()
        self._waiting = self.waiting
        self._shuffles = shuffles
        packed = dataset.map(Parcels(dataset.element_spec).pack)
        self._dataset = without_tuning(packed.prefetch(tf.data.AUTOTUNE))
        self._iterator: Any = None

    def start(self) -> None:
        self._iterator = iter(self._dataset)

    def skip(self) -> None:
        next(self._iterator, None)

    def pass_over(self) -> None:
        _read_through(self._dataset)

    def saved(self) -> bytes | None:
        return _saved_with(self._shuffles, self._iterator)

    def restore(self, batches: int, state: bytes) -> None:
        del batches
        self.start()
        iterators.restore(self._iterator, state)

    def next(self) -> Packed | None:
        # The one operation behind `next(iterator)`, which takes ten times as long in Python.
        iterator = self._iterator
        try:
            with self._waiting:
                tensors = gen_dataset_ops.iterator_get_next(
                    iterator._iterator_resource,
                    output_types=iterator._flat_output_types,
                    output_shapes=iterator._flat_output_shapes,
                )
        except tf.errors.OutOfRangeError:
            return None
        return Packed(*(tensor.numpy() for tensor in tensors))


def _read_through(dataset: tf.data.Dataset) -> None:
    for _ in dataset:
        pass


def _saved_with(shuffles: Shuffles | None, iterator: Any) -> bytes | None:
    """Returns the state of an iterator, or None where not all of its shuffles are in it."""
    state = iterators.saved(iterator) if shuffles is not None and shuffles.is_known else None
    return state if state is None or shuffles is None or shuffles.are_in(state) else None


class DistributedReader:
    """Reads with TensorFlow's distributed iterator, which prefetches to the devices.

    Args:
        strategy: The strategy of the model.
        distributed: A `tf.distribute.DistributedDataset` or the like.
    """

    def __init__(self, strategy: Any, distributed: Any):
        self.waiting: Waiting | None = None  # Reading includes a collective.
        self._strategy = strategy
        self._shares = Shares(strategy)
        self._distributed = distributed
        self._is_fixed = _has_fixed_size(tree.map_structure(_of_one, distributed.element_spec))
        self._iterator: Any = None
        # Compiled: between workers, reading includes a collective.
        self._pull = quiet(
            tf.function(lambda iterator: iterator.get_next_as_optional(), reduce_retracing=True)
        )

    def start(self) -> None:
        self._iterator = iter(self._distributed)

    def skip(self) -> None:
        self._pull(self._iterator)

    def pass_over(self) -> None:
        iterator = iter(self._distributed)
        while self._pull(iterator).has_value():
            pass

    def saved(self) -> bytes | None:
        return None

    def restore(self, batches: int, state: bytes) -> None:
        raise NotImplementedError  # `saved` gives no state.

    def next(self) -> Batch | None:
        optional = self._pull(self._iterator)
        if not optional.has_value():
            return None
        data = tree.map_structure(none_if_optional, optional.get_value())
        parts = [
            tree.map_structure(lambda leaf, i=i: self._local(leaf)[i], data)
            for i in range(self._shares.local_replicas)
        ]
        rows = [_rows(part) for part in parts]
        everyone = self._shares.gather(_GOES_ON, rows)
        share = self._shares.of(rows, [rows for _, rows in everyone])
        is_fixed = self._is_fixed and all(rows)
        if is_split(data):
            return self._shares.packed(parts, share, is_fixed, not all(rows))
        return Batch(data, share, is_fixed, not all(rows))

    def _local(self, leaf: Any) -> tuple[Any, ...]:
        values: tuple[Any, ...] = self._strategy.experimental_local_results(leaf)
        return values


def even_share(strategy: Any) -> Any:
    """Returns the share of each local replica where all have as many examples."""
    return Shares(strategy).even


class Shares:
    """Shares of this process's replicas, in the form that a step takes them."""

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._replicas = strategy.num_replicas_in_sync
        self._group = current.group() if is_several_workers(strategy) else None
        self.local_replicas = len(local_devices(strategy))
        self.even = self._tensors([1.0 / self._replicas] * self.local_replicas)

    def gather(self, state: int, rows: list[int]) -> list[tuple[int, list[int]]]:
        """Returns the state and the rows of each local replica of every worker.

        Raises:
            ConfigError: There are fewer files than workers; raised on all of them.
        """
        everyone = [[state, *rows]]
        if self._group is not None:
            everyone = exchange("reading the next batch", 1 + len(rows)).gather(everyone[0])
        if any(state == _LACKS_FILES for state, *_ in everyone):
            raise ConfigError(
                "at least one file for every worker under AutoShardPolicy.FILE",
                f"fewer files than the {len(everyone)} workers",
                "leave the policy at AUTO, or set it to DATA, to split by example",
            )
        return [(state, rows) for state, *rows in everyone]

    def of(self, rows: list[int], everyone: list[list[int]]) -> Any:
        """Returns the shares, given the rows of each local replica here and on every worker."""
        flat = [count for worker in everyone for count in worker]
        if len(set(flat)) == 1:
            return self.even
        return self._tensors([count / max(1, sum(flat)) for count in rows])

    def per_replica(self, parts: list[Any]) -> Any:
        """Returns one value a replica as a strategy takes it."""
        if self.local_replicas == 1:
            return parts[0]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group % self.local_replicas]
        )

    def packed(self, parts: list[Any], share: Any, is_fixed: bool, has_empty_parts: bool) -> Batch:
        """Returns the batch of `parts`, one a replica, as their components."""
        packing = Packing(parts[0])
        flat = [packing.flatten(part) for part in parts]
        return Batch(self.per_replica(flat), share, is_fixed, has_empty_parts, packing)

    def _tensors(self, shares: list[float]) -> Any:
        return self.per_replica([tf.constant(share, tf.float32) for share in shares])


def _rows(part: Any) -> int:
    """Returns the number of examples in a batch of tensors."""
    for leaf in tree.flatten(part):
        if isinstance(leaf, tf.RaggedTensor):
            return int(leaf.nrows())
        if isinstance(leaf, tf.SparseTensor):
            return int(leaf.dense_shape[0])
        if tf.is_tensor(leaf):
            return int(leaf.shape[0]) if leaf.shape.rank else 1
    return 1


def _of_one(spec: Any) -> Any:
    """Returns the spec of one replica, of one that may be of several."""
    values = getattr(spec, "_value_specs", None)
    return values[0] if values else spec


def _has_fixed_size(spec: Any) -> bool:
    shapes = [getattr(leaf, "shape", None) for leaf in tree.flatten(spec)]
    return all(shape is not None and shape.rank and shape[0] is not None for shape in shapes)
