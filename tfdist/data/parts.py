"""One worker's part of the data, pass after pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.data.indexed import Indexed
from tfdist.data.order import Order
from tfdist.data.order import part
from tfdist.data.order import shares

#: Batches whose examples are chosen in one call of Python.
_CHUNK = 64


class Place(NamedTuple):
    """Which part of the data is meant.

    Attributes:
        workers: Number of workers.
        worker: Number of this one.
        replicas: Replicas of each worker.
    """

    workers: int = 1
    worker: int = 0
    replicas: int = 1


class Maps(NamedTuple):
    """What is done to the examples of a worker's part.

    Attributes:
        examples: Functions of one example, applied one after the other.
        batch: Functions of the batch that a worker has of a global batch.
    """

    examples: tuple[Callable[..., Any], ...] = ()
    batch: tuple[Callable[..., Any], ...] = ()

    def applied(
        self, batches: tf.data.Dataset, rows: int, *, tagged: bool = False
    ) -> tf.data.Dataset:
        """Returns the batches with the functions applied, in parallel and in order.

        Args:
            batches: Batches of at most `rows` examples, all but the last of that many.
            rows: How many.
            tagged: Whether an element is a batch and something that the functions do not see.
        """
        if self.examples:
            batches = batches.unbatch()
            for function in self.examples:
                batches = _mapped(batches, function, tagged)
            batches = batches.batch(rows)
        for function in self.batch:
            batches = _mapped(batches, function, tagged)
        return batches


class IndexedPart:
    """The part of a source whose examples can be read in any order.

    Args:
        source: The source.
        order: Its order.
        place: Which part.
        maps: What is done to it.

    Attributes:
        batches: Global batches of a pass.
        spec: Structure of `tf.TypeSpec` of a worker's batch.
        is_tagged: Whether an element is a batch and its tag; see `StreamPart`.
        seeks: Whether `iterator` begins at any batch.
    """

    is_tagged = False
    seeks = True

    def __init__(self, source: Indexed, order: Order, place: Place, maps: Maps):
        self._order = order
        self._place = place
        self.batches = order.batches
        self._epoch, self._batch = 0, 0
        indices = tf.data.Dataset.from_generator(
            self._indices, output_signature=tf.TensorSpec([None, None], tf.int64)
        ).unbatch()
        full = sum(part(order.batch_size, *place)[1])
        dataset = maps.applied(source.batches(indices), max(1, full))
        self._dataset = as_read(dataset)
        self.spec = open_rows(dataset.element_spec)

    def rows(self, batch: int) -> list[list[int]]:
        """Returns the examples that each replica of each worker has of a batch."""
        return spread(self._order.rows(batch), self._place)

    def iterator(self, epoch: int, batch: int = 0) -> Any:
        """Returns an iterator over the batches of which this worker has any example.

        Args:
            epoch: Number of the pass.
            batch: Number of the batch to begin with.
        """
        self._epoch, self._batch = epoch, batch
        return iter(self._dataset)

    def _indices(self) -> Iterator[np.ndarray]:
        """Yields the examples of this worker: [batches, examples], batches of the same size."""
        order, first, epoch = self._order, self._batch, self._epoch
        whole = min(self.batches, order.length // order.batch_size)
        while first < self.batches:
            # A last batch that is not full comes alone.
            last = min(first + _CHUNK, whole) if first < whole else first + 1
            begin, counts = part(order.rows(first), *self._place)
            batches = np.arange(first, last)[:, np.newaxis]
            places = batches * order.batch_size + begin + np.arange(sum(counts))
            if places.size:
                yield order.at(epoch, places)
            first = last


def spread(rows: int, place: Place) -> list[list[int]]:
    """Returns the examples that each replica of each worker has of a batch of `rows`."""
    counts = shares(rows, place.workers * place.replicas)
    return [counts[i : i + place.replicas] for i in range(0, len(counts), place.replicas)]


def as_read(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` that makes the next batches while one is used, in order."""
    options = tf.data.Options()
    options.deterministic = True
    return without_tuning(dataset.prefetch(tf.data.AUTOTUNE).with_options(options))


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` without tf.data's tuning thread, unless the user has asked for it.

    An iterator that is deleted waits until that thread wakes from its nap, and its naps double
    from 10 ms on: waits of 2.5, 5 and 10 s were measured at the end of an epoch, in which no other
    iterator can be made. Without it, AUTOTUNE in the pipeline means one call for each core.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def open_rows(spec: Any) -> Any:
    """Returns the spec of batches of any number of examples."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        if isinstance(leaf, tf.RaggedTensorSpec) and leaf.shape.rank:
            shape = tf.TensorShape([None, *leaf.shape[1:]])
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
        if isinstance(leaf, tf.SparseTensorSpec) and leaf.shape.rank:
            return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        return leaf

    return tf.nest.map_structure(one, spec)


def pad(batch: Any, rows: int) -> tuple[Any, tf.Tensor]:
    """Returns a batch of `rows` examples, the last repeated to fill it, and which are real.

    Args:
        batch: Structure of tensors of at least one and at most `rows` examples.
        rows: How many.
    """
    have = _count(tf.nest.flatten(batch)[0])
    index = np.minimum(np.arange(rows), have - 1)

    def one(leaf: Any) -> Any:
        if leaf is None or have == rows:
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            more = [cut(leaf, have - 1, have)] * (rows - have)
            return tf.sparse.concat(0, [leaf, *more])
        return tf.gather(leaf, index)

    return tf.nest.map_structure(one, batch), tf.constant(np.arange(rows) < have)


def _count(leaf: Any) -> int:
    if isinstance(leaf, tf.SparseTensor):
        return int(leaf.dense_shape[0])
    return int(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else leaf.shape[0])


def cut(batch: Any, begin: int, end: int) -> Any:
    """Returns some rows of a batch."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            start = tf.concat([[begin], tf.zeros_like(rest)], 0)
            return tf.sparse.slice(leaf, start, tf.concat([[end - begin], rest], 0))
        return None if leaf is None else leaf[begin:end]

    return tf.nest.map_structure(one, batch)


def join(batches: list[Any]) -> Any:
    """Returns the rows of several batches of the same structure as one batch."""

    def one(*leaves: Any) -> Any:
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(leaves), expand_nonconcat_dims=True)
        return None if leaves[0] is None else tf.concat(leaves, 0)

    return tf.nest.map_structure(one, *batches) if len(batches) > 1 else batches[0]


def seed_of(seed: int, epoch: int) -> int:
    """Returns the seed of one pass: of 63 bits, and another one in every pass."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "big") >> 1


def describe(spec: Any) -> list[str]:
    """Returns the dtype and the shape of an example of each component, fit for JSON."""
    return [
        f"{getattr(getattr(leaf, 'dtype', None), 'name', None)}"
        f"{list(leaf.shape[1:]) if getattr(leaf, 'shape', None) and leaf.shape.rank else '?'}"
        for leaf in tf.nest.flatten(spec)
        if leaf is not None
    ]


def _mapped(
    dataset: tf.data.Dataset, function: Callable[..., Any], tagged: bool
) -> tf.data.Dataset:
    def inner(data: Any, tag: Any) -> Any:
        return (function(*data) if type(data) is tuple else function(data)), tag

    return dataset.map(
        inner if tagged else function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
