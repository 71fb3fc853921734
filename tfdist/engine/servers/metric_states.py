"""The states of a model's metrics, gathered by the coordinator from executions.

An execution begins with the states of metrics that were just reset, and returns them as they are
after its steps. States that are sums are added up; metrics whose states are none (a maximum, the
last value) are told on the coordinator what the step would have told them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class MetricStates:
    """The states of the metrics of `model`.

    Args:
        model: A built Keras model.
    """

    def __init__(self, model: Any):
        self._model = model
        self.variables = [v for metric in model.metrics for v in metric.variables]
        self._ids = {id(v) for v in self.variables}
        self._counted = [m for m in model.metrics if id(getattr(m, "count", None)) in self._ids]
        model.reset_metrics()
        self._start = [np.array(v.numpy()) for v in self.variables]
        self._sums = [value.astype(_wide(value)) for value in self._start]

    def __contains__(self, variable: Any) -> bool:
        return id(variable) in self._ids

    # In the graph of an execution.

    def start(self) -> list[Any]:
        """Returns the states before the first step."""
        return [tf.constant(value) for value in self._start]

    def pairs(self, states: list[Any]) -> list[tuple[Any, Any]]:
        """Returns pairs of variable and state."""
        return list(zip(self.variables, states, strict=True))

    def pack(self, states: list[Any]) -> Any:
        """Returns all states as one vector of float64."""
        if not states:
            return tf.zeros([0], tf.float64)
        return tf.concat([tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states], axis=0)

    def told(self, assigned: Container[int]) -> set[str]:
        """Returns the names of results that a step has brought up to date, inside that step.

        Args:
            assigned: Ids of the variables that it has assigned.
        """
        unused = {m.name for m in self._counted if id(m.count) not in assigned}
        return set(self._model.get_metrics_result()) - unused

    # On the coordinator.

    def reset(self) -> None:
        """Forgets all executions."""
        self._sums = [value.astype(_wide(value)) for value in self._start]

    def load(self) -> None:
        """Goes on from the states that the metrics themselves have."""
        self._sums = [np.array(v.numpy()).astype(_wide(v.numpy())) for v in self.variables]

    def add(self, vector: np.ndarray) -> None:
        """Adds what an execution has returned.

        Args:
            vector: float64, as made by `pack`.
        """
        offset = 0
        for index, start in enumerate(self._start):
            part = vector[offset : offset + start.size].reshape(start.shape)
            self._sums[index] = self._sums[index] + (part - start)
            offset += start.size

    def observe(self, metrics: list[Any], told: list[Any]) -> None:
        """Tells metrics what a step would have told them.

        Args:
            metrics: Metrics of the model.
            told: Arguments and keyword arguments of `update_state` for each.
        """
        for metric, (args, kwargs) in zip(metrics, told, strict=True):
            with keras.StatelessScope(state_mapping=self._totals()) as scope:
                metric.update_state(*args, **kwargs)
            own = {id(v) for v in metric.variables}
            for index, variable in enumerate(self.variables):
                if id(variable) in own:
                    self._sums[index] = np.array(scope.get_current_value(variable))

    def results(self) -> dict[str, Any]:
        """Returns the metrics over all executions since the last reset.

        Those that nobody has told anything are left out: a loss tracker that a step of the user's
        own does not use would say 0.
        """
        with keras.StatelessScope(state_mapping=self._totals()):
            found: dict[str, Any] = self._model.get_metrics_result()
        totals = dict(zip(map(id, self.variables), self._sums, strict=True))
        unused = {metric.name for metric in self._counted if not totals[id(metric.count)].any()}
        return {name: value for name, value in found.items() if name not in unused}

    def _totals(self) -> list[tuple[Any, Any]]:
        return [
            (variable, tf.constant(total, variable.dtype))
            for variable, total in zip(self.variables, self._sums, strict=True)
        ]

    def store(self) -> None:
        """Puts the states into the metrics themselves, for `metric.result()`."""
        for variable, total in zip(self.variables, self._sums, strict=True):
            variable.assign(total.astype(variable.dtype))


def _wide(value: np.ndarray) -> Any:
    return np.float64 if np.issubdtype(value.dtype, np.floating) else np.int64
