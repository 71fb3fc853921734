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
from tfdist.engine.replicas import is_several_workers
from tfdist.errors import UnsupportedError
from tfdist.strategies import communication
from tfdist.strategies.communication import CommunicationOptions

log = logging.getLogger("absl")

#: Gradients of one update that are not larger than this travel in one go, without a thread.
_AT_ONCE_BYTES = 8 << 20
#: Sizes that move fastest: through shared memory, and through TensorFlow's ring.
_BUCKET_BYTES, _PIECE_BYTES = 8 << 20, 4 << 20


def total(gradients: list[Any]) -> list[Any]:
    """Returns the sums over all replicas; called in replica context.

    Args:
        gradients: Tensors, `tf.IndexedSlices` (which stay slices) or None.
    """
    dense = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
    slices = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    sums = list(gradients)
    context = tf.distribute.get_replica_context()
    carry = _carrier(context.strategy)
    for indices, function in ((slices, _all_reduce), (dense, carry)):
        if indices:
            found = function([gradients[i] for i in indices])
            for index, value in zip(indices, found, strict=True):
                sums[index] = value
    return sums


def scalar_total(value: Any) -> Any:
    """Returns the sum over all replicas of one number; called in replica context."""
    return total([value])[0]


def begin(strategy: Any) -> None:
    """Forgets what an interrupted step has left under way; called by all workers together."""
    if strategy in _carriers:
        _carriers[strategy].begin()


def explain(error: Exception) -> None:
    """Raises what went wrong in a sum, if that is why TensorFlow raised `error`."""
    for carrier in _carriers.values():
        own = carrier.error
        if own is not None:
            raise own from error


def _all_reduce(tensors: list[Any]) -> list[Any]:
    context = tf.distribute.get_replica_context()
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, tensors))


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


_carriers: weakref.WeakKeyDictionary[Any, _Workers] = weakref.WeakKeyDictionary()


def _carrier(strategy: Any) -> Callable[[list[Any]], list[Any]]:
    """Returns what sums dense tensors under `strategy`."""
    devices = strategy.extended.worker_devices
    on_cpu = all("CPU" in device.upper() for device in devices)
    group = current.group() if is_several_workers(strategy) else None
    if group is None or not on_cpu or group.size != strategy.num_replicas_in_sync:
        return _all_reduce
    if strategy not in _carriers:
        _carriers[strategy] = _Workers(group, communication.options_of(strategy))
    return _carriers[strategy].total


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
        self._reducers: dict[Any, collectives.AllReduce] = {}
        self._debts: dict[tuple[int, int], Any] = {}
        self._uses: weakref.WeakKeyDictionary[Any, Counter[Any]] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Forgets what is under way."""
        for reducer in self._reducers.values():
            reducer.reset()

    @property
    def error(self) -> BaseException | None:
        """What went wrong in shared memory, or None."""
        return next((r.error for r in self._reducers.values() if r.error is not None), None)

    def total(self, tensors: list[Any]) -> list[Any]:
        """Returns the sums over all workers."""
        order = list(reversed(range(len(tensors))))  # The last layer's gradient is there first.
        size = self._options.bucket_bytes or _BUCKET_BYTES
        packs = _packs([tensors[i] for i in order], size)
        reducer = self._reducer(tensors[0], packs)
        if reducer is None:
            found = self._through_tensorflow(packs)
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

    def _reducer(self, tensor: Any, packs: list[list[Any]]) -> collectives.AllReduce | None:
        """Returns the shared memory for such tensors, made when all workers first come here."""
        if self._why_not or not all(t.dtype.name in _NAMES for pack in packs for t in pack):
            return None
        if not all(t.shape.is_fully_defined() for pack in packs for t in pack):
            return None
        buckets = tuple(
            collectives.Bucket(pack[0].dtype.name, tuple(tuple(t.shape) for t in pack))
            for pack in packs
        )
        # Two sums of one step must not take each other's place.
        use = 0
        if not tf.executing_eagerly():
            counter = self._uses.setdefault(_root(tensor.graph), Counter())
            use = counter[buckets]
            counter[buckets] += 1
        if (buckets, use) not in self._reducers:
            with tf.init_scope():
                reducer = self._connect(buckets)
            if reducer is None:
                return None
            self._reducers[buckets, use] = reducer
        return self._reducers[buckets, use]

    def _connect(self, buckets: tuple[collectives.Bucket, ...]) -> collectives.AllReduce | None:
        group = self._group
        what = "sharing memory for gradients"
        patience = rendezvous.patience_from(os.environ)
        first = not self._reducers
        reducer, why_not = collectives.connect(
            group.tasks.index(group.cluster.task),
            [str(task) for task in group.tasks],
            lambda value: group.all_gather(what, value, patience),
            buckets,
            check=lambda: group.raise_if_lost("the sum of gradients"),
            timeout_seconds=self._options.timeout_seconds,
        )
        if reducer is None and self._options.transport == "shared_memory":
            raise UnsupportedError(
                "workers that can share memory, as transport='shared_memory' asks for",
                why_not,
                "leave the transport at 'auto', which takes TensorFlow's ring then",
            )
        if reducer is None:
            self._take_ring(why_not)
        elif first:
            log.info(
                "gradients travel through memory that the workers share%s",
                ", as they are: no wire to compress them for" if self._options.compression else "",
            )
        return reducer

    def _take_ring(self, reason: str) -> None:
        self._why_not = reason
        wire = f", as {self._options.compression}" if self._options.compression else ""
        log.info("gradients travel through TensorFlow's ring%s: %s", wire, reason)

    def _through_tensorflow(self, packs: list[list[Any]]) -> list[Any]:
        size = self._options.bucket_bytes or _PIECE_BYTES
        found: list[Any] = []
        for key, pack in enumerate(packs):
            flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in pack], axis=0)
            narrow, widen = self._narrow(flat, key)
            joined = widen(tf.concat([_all_reduce([p])[0] for p in _pieces(narrow, size)], axis=0))
            at = 0
            for tensor in pack:
                found.append(tf.reshape(joined[at : at + tf.size(tensor)], tf.shape(tensor)))
                at += tf.size(tensor)
        return _named([tensor for pack in packs for tensor in pack], found)

    def _narrow(self, flat: Any, key: int) -> tuple[Any, Callable[[Any], Any]]:
        """Returns `flat` as it goes over the wire, and what makes a sum of such wide again.

        What rounding takes away is kept and added to the next step's, so that it is late, not lost
        (error feedback; Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014).
        """
        wire = self._options.compression
        if wire is None or flat.dtype != tf.float32:
            return flat, lambda value: value
        if flat.shape[0] is None:
            return tf.cast(flat, wire), lambda value: tf.cast(value, flat.dtype)
        owed = self._owed(key, int(flat.shape[0]))
        whole = flat + owed
        # A gradient that is not finite must be seen now, and not be carried on for ever.
        narrow = tf.cast(_within(whole, wire, self._group.size), wire)
        error = whole - tf.cast(narrow, flat.dtype)
        owed.assign(tf.where(tf.math.is_finite(error), error, 0.0))
        return narrow, lambda value: tf.cast(value, flat.dtype)

    def _owed(self, key: int, size: int) -> Any:
        if (key, size) not in self._debts:
            with tf.init_scope():
                # Not `tf.Variable`: a strategy would make one for all workers of it.
                self._debts[key, size] = ResourceVariable(tf.zeros([size]), trainable=False)
        return self._debts[key, size]


_NAMES = frozenset(("float32", "float64", "int32", "int64", "float16", "bfloat16"))


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
