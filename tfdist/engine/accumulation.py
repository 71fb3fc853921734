"""The gradients that replicas have accumulated: apart within an epoch, one sum outside it.

With `gradient_accumulation_steps` every replica adds up its own gradients, and they travel once an
update. An epoch may end in the middle of that. What is then read, saved or taken to another number
of replicas must be the sum, as one device has it: so the parts are added up at the end of an epoch,
and only the first replica goes on with the sum.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine import allreduce
from tfdist.engine.replicas import is_synchronous
from tfdist.engine.scope import optimizers_of
from tfdist.engine.scope import parts_of

_apart: weakref.WeakSet[Any] = weakref.WeakSet()  # Optimizers whose replicas have their own.
_compiled: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def begin() -> None:
    """Forgets who has what, after a step was broken off: all go on with what the chief has."""
    _apart.clear()


class Accumulation:
    """The accumulated gradients of the optimizers of one model.

    Args:
        model: A Keras model under synchronous replicas.
    """

    def __init__(self, model: Any):
        self._strategy = model.distribute_strategy
        self._optimizers = [
            part
            for optimizer in optimizers_of(model)
            if is_synchronous(self._strategy)
            for part in parts_of(optimizer)
            if getattr(part, "gradient_accumulation_steps", None)
        ]

    def part(self) -> None:
        """Leaves the sum to the first replica; before the steps of an epoch."""
        for optimizer in self._open():
            if optimizer not in _apart:
                self._run(_leave_to_first, optimizer)
        _apart.update(self._optimizers)

    def join(self) -> None:
        """Gives every replica the sum; after the steps of an epoch, by all workers together."""
        for optimizer in self._open():
            if optimizer in _apart:
                self._run(_add_up, optimizer)
        _apart.difference_update(self._optimizers)

    @property
    def is_open(self) -> bool:
        """Whether an update is half done."""
        return bool(self._open())

    def _open(self) -> list[Any]:
        """Returns the optimizers that are in the middle of an update."""
        return [
            each
            for each in self._optimizers
            if each.built and int(each._iterations.value.numpy()) % each.gradient_accumulation_steps
        ]

    def _run(self, function: Any, optimizer: Any) -> None:
        functions = _compiled.setdefault(optimizer, {})
        if function not in functions:
            accumulators = [a for a in optimizer._accumulated_gradients if a is not None]
            owner = weakref.ref(optimizer)
            # Not as arguments: the strategy would hand over what the variables hold.
            on_replica = functools.partial(function, accumulators, owner)
            on_replicas = functools.partial(self._strategy.run, on_replica)
            functions[function] = tf.function(on_replicas, autograph=False)
        functions[function]()


def _leave_to_first(accumulators: list[keras.Variable], owner: Any) -> None:
    first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
    for accumulator in accumulators:
        value = accumulator.value
        accumulator.assign(tf.where(first, value, tf.zeros_like(value)))


def _add_up(accumulators: list[keras.Variable], owner: Any) -> None:
    sums = allreduce.total([tf.identity(a.value) for a in accumulators], owner())
    for accumulator, value in zip(accumulators, sums, strict=True):
        accumulator.assign(value)
