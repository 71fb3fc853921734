"""Sums over replicas: the one place where gradients travel.

Between CPU workers that share a host they go through shared memory (`tfdist.collectives`), bucket
after bucket in the order in which the backward pass makes them, while it goes on. Between hosts
they go through TensorFlow's ring in pieces, about twice as fast as all in one. Accelerators and the
replicas of one process use TensorFlow's own all-reduce as it is (NCCL on GPUs).
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist import collectives
from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.cluster.group import Group
from tfdist.engine import slices as slices_lib
from tfdist.engine.exchange import share_memory
from tfdist.engine.replicas import is_on_cpu
from tfdist.engine.replicas import is_several_workers
from tfdist.errors import UnsupportedError
from tfdist.strategies import communication
from tfdist.strategies.communication import CommunicationOptions

log = logging.getLogger("absl")

#: Gradients of one update that are not larger than this travel in one go, without a thread.
_AT_ONCE_BYTES = 8 << 20
#: Sizes that move fastest: through shared memory, and through TensorFlow's ring.
_BUCKET_BYTES, _PIECE_BYTES = 8 << 20, 4 << 20


def total(tensors: list[Any], owner: Any = None, *, compress: bool = False) -> list[Any]:
    """Returns the sums over all replicas; called in replica context.

    Args:
        tensors: Tensors, `tf.IndexedSlices` (which stay slices) or None.
        owner: The optimizer or the like that sums them, at every step; what is kept for it from
            step to step goes when it does. None for a few numbers.
        compress: Whether they may be compressed, if the options ask for it: gradients.
    """
    dense = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.Tensor)]
    slices = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    sums = list(tensors)
    workers = _workers_of(tf.distribute.get_strategy())
    if slices:
        for index, value in zip(slices, _all_slices([tensors[i] for i in slices]), strict=True):
            sums[index] = value
    if dense:
        given = [tensors[i] for i in dense]
        found = _all_reduce(given) if workers is None else workers.total(given, owner, compress)
        for index, value in zip(dense, found, strict=True):
            sums[index] = value
    return sums


def scalar_total(value: Any) -> Any:
    """Returns the sum over all replicas of one number; called in replica context."""
    return total([value])[0]


def begin(strategy: Any) -> None:
    """Forgets what an interrupted step has left under way; called by all workers together."""
    workers = _workers_of(strategy)  # Made here on a worker that has not come so far.
    if workers is not None:
        workers.begin()


def explain(error: Exception) -> None:
    """Raises what went wrong in a sum, if that is why TensorFlow raised `error`."""
    for workers in _known.values():
        own = workers.error if workers is not None else None
        if own is not None:
            raise own from error


def _all_reduce(tensors: list[Any]) -> list[Any]:
    context = tf.distribute.get_replica_context()
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, tensors))


def _all_slices(slices: list[Any]) -> list[Any]:
    """Returns the rows of all replicas."""
    # TensorFlow crashes where no replica has any row: each brings one of no place.
    found = _all_reduce([slices_lib.with_nowhere(each) for each in slices])
    return [slices_lib.without_nowhere(each) for each in found]


_latest: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def in_order(make: Callable[[], Any]) -> Any:
    """Returns what `make` adds to the graph, to be run after what was added here before.

    Whoever waits for other workers keeps a thread of TensorFlow: two workers that wait for each
    other in different places would wait for ever. TensorFlow itself keeps the order of calls to
    Python, but not of one in a condition and one behind it.
    """
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    before = _latest.get(graph)
    with tf.control_dependencies([graph.get_operation_by_name(before)] if before else []):
        made = make()
    _latest[graph] = tf.nest.flatten(made)[-1].op.name  # Its name, since it would keep the graph.
    return made


_known: weakref.WeakKeyDictionary[Any, _Workers | None] = weakref.WeakKeyDictionary()


def _workers_of(strategy: Any) -> _Workers | None:
    """Returns what sums dense tensors under `strategy`, or None for TensorFlow's own all-reduce."""
    if strategy not in _known:
        _known[strategy] = _choose(strategy)
    return _known[strategy]


def _choose(strategy: Any) -> _Workers | None:
    options = communication.options_of(strategy)
    group = current.group() if is_several_workers(strategy) else None
    if group is not None and is_on_cpu(strategy) and group.size == strategy.num_replicas_in_sync:
        return _Workers(group, options)
    if group is not None:
        why = "only workers of one CPU replica each can share memory or compress"
        if options.transport == "shared_memory":
            raise UnsupportedError(
                "workers that can share memory, as transport='shared_memory' asks for",
                why,
                "leave the transport at 'auto'",
            )
        log.info("gradients travel through TensorFlow's all-reduce as they are: %s", why)
    return None


class _Book:
    """What is kept between the steps of one owner of sums.

    Attributes:
        reducers: The shared memory for given buckets, at a given place in a step.
        debts: What rounding has taken from gradients so far, for each pack of them.
    """

    def __init__(self) -> None:
        self.reducers: dict[Any, collectives.AllReduce] = {}
        self.debts: dict[tuple[int, int], Any] = {}
        self._uses: weakref.WeakKeyDictionary[Any, Counter[Any]] = weakref.WeakKeyDictionary()

    def place(self, buckets: Any, graph: Any) -> int:
        """Returns how many sums of the same buckets came before in the function of `graph`.

        Two sums of one step must not take each other's memory.
        """
        counter = self._uses.setdefault(_root(graph), Counter())
        counter[buckets] += 1
        return counter[buckets] - 1


class _Workers:
    """Sums over workers of one CPU replica each.

    Args:
        group: The workers.
        options: How gradients are to travel.
    """

    def __init__(self, group: Group, options: CommunicationOptions):
        self._group = group
        self._options = options
        self._why_not = ""
        if options.transport == "tensorflow":
            self._take_ring("transport='tensorflow' asks for it")
        self._has_shared = False
        # The memory for a sum lives as long as the owner of the sum, who is in use on all workers
        # or on none; a graph or a cache might end on one of them alone.
        self._books: weakref.WeakKeyDictionary[Any, _Book] = weakref.WeakKeyDictionary()
        self._others = _Book()
        # In the order in which all workers have made them together.
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def begin(self) -> None:
        """Forgets what is under way; called by all workers together."""
        # What nobody uses any more is collected on one worker earlier than on another.
        mine = {self._numbers[reducer]: reducer for reducer in self._reducers()}
        patience = rendezvous.patience_from(os.environ)
        everyone = self._group.all_gather("which sums to forget", sorted(mine), patience)
        for number in sorted(set(mine).intersection(*map(set, everyone))):
            mine[number].reset()

    @property
    def error(self) -> BaseException | None:
        """What went wrong in shared memory, or None."""
        return next((r.error for r in self._reducers() if r.error is not None), None)

    def _reducers(self) -> list[collectives.AllReduce]:
        books = [self._others, *self._books.values()]
        return [reducer for book in books for reducer in book.reducers.values()]

    def total(self, tensors: list[Any], owner: Any, compress: bool) -> list[Any]:
        """Returns the sums over all workers; arguments as of the function `total`."""
        order = list(reversed(range(len(tensors))))  # The last layer's gradient is there first.
        backwards = [tensors[i] for i in order]
        book = self._others if owner is None else self._books.setdefault(owner, _Book())
        packs = _packs(backwards, self._options.bucket_bytes or _BUCKET_BYTES)
        reducer = self._reducer(packs, book)
        if reducer is None:
            found = self._through_tensorflow(backwards, book.debts if compress else None)
        elif tf.executing_eagerly():
            found = [
                tf.convert_to_tensor(value)
                for key, pack in enumerate(packs)
                for value in reducer.reduce(key, [tensor.numpy() for tensor in pack])
            ]
        else:
            found = in_order(lambda: _in_graph(reducer, packs))
        sums = dict(zip(order, found, strict=True))
        return [sums[index] for index in range(len(tensors))]

    def _reducer(self, packs: list[list[Any]], book: _Book) -> collectives.AllReduce | None:
        """Returns the shared memory for such tensors, made when all workers first come here."""
        tensors = [tensor for pack in packs for tensor in pack]
        if self._why_not or not all(t.dtype.name in collectives.ITEM_BYTES for t in tensors):
            return None
        if not all(tensor.shape.is_fully_defined() for tensor in tensors):
            return None
        buckets = tuple(
            collectives.Bucket(pack[0].dtype.name, tuple(tuple(t.shape) for t in pack))
            for pack in packs
        )
        place = 0 if tf.executing_eagerly() else book.place(buckets, tensors[0].graph)
        if (buckets, place) not in book.reducers:
            with tf.init_scope():
                reducer = self._connect(buckets)
            if reducer is None:
                return None
            self._numbers[reducer] = self._count
            self._count += 1
            book.reducers[buckets, place] = reducer
        return book.reducers[buckets, place]

    def _connect(self, buckets: tuple[collectives.Bucket, ...]) -> collectives.AllReduce | None:
        limit = self._options.timeout_seconds
        reducer, why_not = share_memory(self._group, "the sum of gradients", buckets, limit)
        if reducer is None and self._options.transport == "shared_memory":
            raise UnsupportedError(
                "workers that can share memory, as transport='shared_memory' asks for",
                why_not,
                "leave the transport at 'auto', which takes TensorFlow's ring then",
            )
        if reducer is None:
            self._take_ring(why_not)
        elif not self._has_shared:
            self._has_shared = True
            log.info(
                "gradients travel through memory that the workers share%s",
                ", as they are: no wire to compress them for" if self._options.compression else "",
            )
        return reducer

    def _take_ring(self, reason: str) -> None:
        self._why_not = reason
        wire = f", as {self._options.compression}" if self._options.compression else ""
        log.info("gradients travel through TensorFlow's ring%s: %s", wire, reason)

    def _through_tensorflow(
        self, tensors: list[Any], debts: dict[tuple[int, int], Any] | None
    ) -> list[Any]:
        size = self._options.bucket_bytes or _PIECE_BYTES
        found: list[Any] = []
        for key, pack in enumerate(_packs(tensors, size)):
            flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in pack], axis=0)
            narrow = flat if debts is None else self._narrow(flat, key, debts)
            joined = tf.concat([_all_reduce([piece])[0] for piece in _pieces(narrow, size)], axis=0)
            joined, at = tf.cast(joined, flat.dtype), 0
            for tensor in pack:
                found.append(tf.reshape(joined[at : at + tf.size(tensor)], tf.shape(tensor)))
                at += tf.size(tensor)
        return _named(tensors, found)

    def _narrow(self, flat: Any, key: int, debts: dict[tuple[int, int], Any]) -> Any:
        """Returns `flat` as it goes over the wire.

        What rounding takes away is kept and added to the next step's, so that it is late, not lost
        (error feedback; Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014).
        """
        wire = self._options.compression
        if wire is None or flat.dtype != tf.float32:
            return flat
        if flat.shape[0] is None:
            return tf.cast(_within(flat, wire, self._group.size), wire)
        place = key, int(flat.shape[0])
        if place not in debts:
            with tf.init_scope():
                # Not `tf.Variable`: a strategy would make one for all workers of it.
                debts[place] = ResourceVariable(tf.zeros([place[1]]), trainable=False)
        whole = flat + debts[place]
        narrow = tf.cast(_within(whole, wire, self._group.size), wire)
        error = whole - tf.cast(narrow, flat.dtype)
        # A gradient that is not finite must be seen now, and not be carried on for ever.
        debts[place].assign(tf.where(tf.math.is_finite(error), error, 0.0))
        return narrow


def _within(values: Any, wire: str, terms: int) -> Any:
    """Returns `values` so far cut that the sum of `terms` such fits `wire`; not finite stays so."""
    if wire != "float16":
        return values
    most = tf.float16.max / terms
    return tf.where(tf.math.is_finite(values), tf.clip_by_value(values, -most, most), values)


def _in_graph(reducer: collectives.AllReduce, packs: list[list[Any]]) -> list[Any]:
    """Hands over each pack as soon as it is there, and waits when all have been."""
    size = sum(_bytes(t) for pack in packs for t in pack)
    found: list[Any] = []
    if len(packs) == 1 and size <= _AT_ONCE_BYTES:
        [pack] = packs
        return _named(pack, _call(functools.partial(_reduce, reducer), pack, pack))
    submitted: list[Any] = []
    for key, pack in enumerate(packs):
        # All workers must hand them over in the same order.
        with tf.control_dependencies(submitted[-1:]):
            submitted.append(_call(functools.partial(_submit, reducer, key), pack, []))
    for key, pack in enumerate(packs):
        # Whoever waits keeps a thread of TensorFlow that the backward pass may need.
        with tf.control_dependencies(submitted[-1:]):
            found += _named(pack, _call(functools.partial(_wait, reducer, key), [], pack))
    return found


def _reduce(reducer: collectives.AllReduce, *arrays: Any) -> Any:
    return reducer.reduce(0, arrays)


def _submit(reducer: collectives.AllReduce, key: int, *arrays: Any) -> Any:
    reducer.submit(key, arrays)
    return 0


def _wait(reducer: collectives.AllReduce, key: int) -> Any:
    return reducer.wait(key)


def _call(function: Callable[..., Any], inputs: list[Any], like: list[Any]) -> Any:
    types = [tensor.dtype for tensor in like] if like else tf.int64
    return tf.numpy_function(function, inputs, types)


def _named(pack: list[Any], found: Any) -> list[Any]:
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    for like, tensor in zip(pack, found, strict=True):
        tensor.set_shape(like.shape)
    return found


def _packs(tensors: list[Any], size: int) -> list[list[Any]]:
    """Returns `tensors` in runs of one type, each of about `size` bytes."""
    packs: list[list[Any]] = []
    filled = 0
    for tensor in tensors:
        nbytes = _bytes(tensor)
        if not packs or packs[-1][0].dtype != tensor.dtype or filled + nbytes > size:
            packs.append([])
            filled = 0
        packs[-1].append(tensor)
        filled += nbytes
    return packs


def _root(graph: Any) -> Any:
    """Returns the graph of the function that a branch or a loop of it belongs to."""
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def _bytes(tensor: Any) -> int:
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)


def _pieces(flat: Any, size: int) -> list[Any]:
    length, step = flat.shape[0], max(1, size // int(flat.dtype.size))
    if length is None or length <= step:
        return [flat]
    return list(tf.split(flat, [min(step, length - at) for at in range(0, length, step)]))
