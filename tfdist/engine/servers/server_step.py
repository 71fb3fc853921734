"""What the code of a step may know while it is traced for a worker of a parameter-server job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist.engine.per_thread import PerThread
from tfdist.engine.servers.local_values import LocalValues


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


_steps: PerThread[ServerStep | None] = PerThread()
#: The step that this thread traces, or None.
current = _steps.get
#: Makes a step the current one of this thread, as a context.
tracing = _steps.having


def outside(function: Callable[[], None]) -> None:
    """Calls `function` as if no step were being traced, so that variables it makes stay."""
    scope = global_state.get_global_attribute("stateless_scope")

    def call(strategy: Any) -> None:
        with tf.init_scope():
            function()

    global_state.set_global_attribute("stateless_scope", None)
    try:
        with tracing(None):
            tf.distribute.get_replica_context().merge_call(call)
    finally:
        global_state.set_global_attribute("stateless_scope", scope)
