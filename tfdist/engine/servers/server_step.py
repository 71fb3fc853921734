"""What the code of a step may know while it is traced for a worker of a parameter-server job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist.engine.servers.local_values import LocalValues

_local = threading.local()


class ServerStep:
    """One step on a worker, while it is traced.

    Attributes:
        values: The step's copy of the variables.
        applied: Variables that the optimizer updates on their servers.
        observed: What metrics that are no sums were told: metric, and (arguments, keywords).
    """

    def __init__(self, values: LocalValues):
        self.values = values
        self.applied: dict[int, Any] = {}
        self.observed: list[tuple[Any, Any]] = []


def current() -> ServerStep | None:
    """Returns the step that this thread traces, or None."""
    return getattr(_local, "step", None)


@contextlib.contextmanager
def tracing(step: ServerStep) -> Iterator[ServerStep]:
    """Makes `step` the current one of this thread."""
    outer = current()
    _local.step = step
    try:
        yield step
    finally:
        _local.step = outer


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leaves the step that is being traced, to make variables that stay."""
    step, scope = current(), global_state.get_global_attribute("stateless_scope")
    strategy = tf.distribute.get_strategy()
    _local.step = None
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with tf.init_scope(), strategy.scope():
            yield
    finally:
        _local.step = step
        global_state.set_global_attribute("stateless_scope", scope)
