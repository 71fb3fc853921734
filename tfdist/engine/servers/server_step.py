"""What the code of a step may know while it is traced for a worker of a parameter-server job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
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
        before: Value of each variable when the step began, by its id.
        applied: Variables that the optimizer updates on their servers.
        observed: What metrics that are no sums were told: metric, and (arguments, keywords).
    """

    def __init__(self, values: LocalValues):
        self.values = values
        self.before = dict(values.state_mapping)
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


def outside(function: Callable[[], None]) -> None:
    """Calls `function` as if no step were being traced, so that variables it makes stay."""
    step, scope = current(), global_state.get_global_attribute("stateless_scope")

    def call(strategy: Any) -> None:
        with tf.init_scope():
            function()

    _local.step = None
    global_state.set_global_attribute("stateless_scope", None)
    try:
        tf.distribute.get_replica_context().merge_call(call)
    finally:
        _local.step = step
        global_state.set_global_attribute("stateless_scope", scope)
