"""Pipelines as graphs that another process can run, every n-th batch of them.

What `parts` and `streams` do with the help of Python (the order of the examples, the reading of
records) is done here by TensorFlow's operations, with the same result. `why_not` finds what no
other process can run.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Protocol

import tensorflow as tf

from tfdist.data.order import MOST_AT_ONCE
from tfdist.data.order import Order
from tfdist.data.order import part
from tfdist.data.parts import Maps
from tfdist.data.parts import Place
from tfdist.data.parts import as_read
from tfdist.data.parts import cut
from tfdist.data.streams import StreamPart

_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
#: Bytes of constants in a graph; TensorFlow cannot serialize more than twice as many.
_MOST_BYTES = 1 << 30

as_graph = tf.autograph.experimental.do_not_convert


class Shipment(Protocol):
    """One worker's part of the data, for other processes to make.

    Attributes:
        batches: Batches of this worker in a pass, or None where that is not known.
        passes: How many passes a dataset holds.
        is_whole: Whether only one process may make it, because others might read another order.
    """

    @property
    def batches(self) -> int | None: ...

    @property
    def passes(self) -> int: ...

    @property
    def is_whole(self) -> bool: ...

    def dataset(self, epoch: int, batch: int, first: int, step: int, near: bool) -> tf.data.Dataset:
        """Returns batches from one of a pass on.

        Args:
            epoch: Number of the pass.
            batch: Number of the batch of this worker in it.
            first: How many to leave out before the first.
            step: From one to the next.
            near: Whether the process is on this host, and sees the memory of this one.
        """


class IndexedShipment:
    """Of a source whose examples can be read in any order.

    Args:
        source: The source.
        order: Its order.
        place: Which part.
        maps: What is done to it.
    """

    is_whole = False

    def __init__(self, source: Any, order: Order, place: Place, maps: Maps):
        self._source, self._order, self._maps = source, order, maps
        self.passes = order.passes_in_table
        self._whole = min(order.batches, order.length // order.batch_size)
        self._begin, counts = part(order.batch_size, *place)
        self._rows = sum(counts)
        # Of a last batch that is not full.
        self._last_begin, counts = part(order.rows(self._whole), *place)
        self._last_rows = sum(counts) if order.batches > self._whole else 0
        self.batches = self._whole * (self._rows > 0) + (self._last_rows > 0)

    def dataset(self, epoch: int, batch: int, first: int, step: int, near: bool) -> tf.data.Dataset:
        """Returns batches from one of a pass on."""
        order, mine = self._order, max(1, self.batches)
        numbers = tf.data.Dataset.range(batch + first, self.passes * mine, step)
        rows = self._rows if self._whole else self._last_rows
        ordered = _order_in_graph(order, epoch)

        @as_graph  # type: ignore[untyped-decorator]
        def count(number: Any) -> Any:
            return tf.where(number % mine < self._whole, self._rows, self._last_rows)

        @as_graph  # type: ignore[untyped-decorator]
        def indices(number: Any) -> Any:
            # Always as many: a batch that is not full repeats its last example, and is cut below.
            begin = tf.where(number % mine < self._whole, self._begin, self._last_begin)
            within = tf.minimum(tf.range(rows), count(number) - 1)
            places = number % mine * order.batch_size + tf.cast(begin + within, tf.int64)
            return ordered(number // mine, places)

        vectors = numbers.map(indices, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        batches = self._source.in_graph(vectors, rows, near)
        batches = Maps(self._maps.examples).applied(batches, rows)
        if self._whole and self._last_rows not in (0, rows):

            @as_graph  # type: ignore[untyped-decorator]
            def real(data: Any, number: Any) -> Any:
                return cut(data, 0, count(number))

            batches = tf.data.Dataset.zip((batches, numbers))
            batches = batches.map(real, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return as_read(Maps(batch=self._maps.batch).applied(batches, rows))


class StreamShipment:
    """Of a source that is read in order: the process reads all, and makes its batches only.

    Args:
        part: The part.
        is_whole: As for `Shipment`.
    """

    passes = 1

    def __init__(self, part: StreamPart, is_whole: bool):
        self._part = part
        self.batches = part.own_batches
        self.is_whole = is_whole

    def dataset(self, epoch: int, batch: int, first: int, step: int, near: bool) -> tf.data.Dataset:
        """Returns batches from one of a pass on."""
        return as_read(
            self._part.pipeline(epoch, lambda batches: batches.skip(batch).shard(step, first))
        )


def why_not(kind: str, shipment: Shipment, near: bool) -> str:
    """Returns why no other process can make the batches, or "".

    Args:
        kind: Of the source, as in `Facts`.
        shipment: What is to be shipped.
        near: Whether it is to processes on this host.
    """
    own = {
        "sequence": "the Python code of a sequence runs in this process only; write its examples "
        "to TFRecord files",
        "generator": "the Python code of a generator runs in this process only; write its examples "
        "to TFRecord files",
    }
    if kind in own:
        return own[kind]
    size = 0
    for each in _below(shipment.dataset(0, 0, 0, 1, near)):
        name = type(each).__name__
        if "Shuffle" in name and shipment.is_whole and _is_new_elsewhere(each):
            return (
                "the dataset's own shuffle comes in another order in another process; leave it out "
                "and pass shuffle=True"
            )
        for graph in _graphs(each):
            found = {node.op for node in graph.node}
            found.update(node.op for f in graph.library.function for node in f.node_def)
            if found & _PYTHON:
                return (
                    "Python code (py_function, numpy_function, from_generator) runs in this "
                    "process only; use operations of TensorFlow"
                )
        size += sum(_bytes(tensor) for function in each._functions() for tensor in _held(function))
        size += sum(map(_bytes, getattr(each, "_tensors", ())))
    if size > _MOST_BYTES:
        return (
            f"arrays of {size / 2**30:.1f} GiB are too large to be sent; write them to TFRecord "
            "files"
        )
    return ""


def _order_in_graph(order: Order, epoch: int) -> Callable[[Any, Any], Any]:
    """Returns `Order.at` as a graph, its first argument the number of the pass after `epoch`."""
    count, size = order.shuffled, order.batch_size
    if not count:
        return lambda number, places: places
    table = tf.constant(order.table(epoch))

    def shuffled(number: Any, places: Any) -> Any:
        if count > MOST_AT_ONCE:
            return _scattered(places, count, table[number])
        return tf.cast(tf.gather(table[number], places), tf.int64)

    def at(number: Any, places: Any) -> Any:
        if not order.by_batch:
            return shuffled(number, places)
        batches = places // size
        chosen = shuffled(number, tf.minimum(batches, count - 1))
        return tf.where(batches < count, chosen, batches) * size + places % size

    return at


def _scattered(places: Any, count: int, keys: Any) -> Any:
    """`order.scattered` as a graph."""
    half = (max(2, (count - 1).bit_length()) + 1) // 2

    def whole(value: int) -> Any:
        return tf.constant(value, tf.uint64)

    def through(value: Any) -> Any:
        left = tf.bitwise.right_shift(value, whole(half))
        mask = whole((1 << half) - 1)
        right = tf.bitwise.bitwise_and(value, mask)
        for key in tf.unstack(keys, 6):
            mixed = tf.bitwise.bitwise_xor(right, key) * whole(0x9E3779B97F4A7C15)
            mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, whole(32)))
            mixed = tf.bitwise.right_shift(mixed * whole(0xD6E8FEB86659FD93), whole(32))
            left, right = right, tf.bitwise.bitwise_xor(left, tf.bitwise.bitwise_and(mixed, mask))
        return tf.bitwise.bitwise_or(tf.bitwise.left_shift(left, whole(half)), right)

    def outside(value: Any) -> Any:
        return tf.cast(value, tf.int64) >= count

    [found] = tf.while_loop(
        lambda value: tf.reduce_any(outside(value)),
        lambda value: [tf.where(outside(value), through(value), value)],
        [through(tf.cast(places, tf.uint64))],
    )
    return tf.cast(found, tf.int64)


def _below(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all that it reads from, functions of it left out."""
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        waiting += each._inputs()
        yield each


def _is_new_elsewhere(shuffle: Any) -> bool:
    """Whether a shuffle comes in another order in another process, or in its next pass there."""
    is_seeded = (int(shuffle._seed), int(shuffle._seed2)) != (0, 0)
    return bool(shuffle._reshuffle_each_iteration) or not is_seeded


def _graphs(dataset: tf.data.Dataset) -> Iterator[Any]:
    for function in dataset._functions():
        yield function.function.graph.as_graph_def()


def _held(function: Any) -> list[Any]:
    """Returns the tensors that a function of a dataset holds."""
    return list(function.function.captured_inputs)


def _bytes(tensor: Any) -> int:
    if not isinstance(tensor, tf.Tensor) or tensor.dtype in (tf.resource, tf.variant):
        return 0
    each = 16 if tensor.dtype == tf.string else tensor.dtype.size
    return int(tensor.shape.num_elements() or 0) * each
