"""Moving statistics that every replica keeps for itself are averaged at the end of each epoch.

`BatchNormalization` without `synchronized=True` updates its moving mean and variance on every
replica from that replica's part of the batch. Stock Keras then evaluates and saves those of
replica 0 only (tensorflow issues 46488 and 32653). Here all replicas of all workers take the mean
over replicas before anything reads them at the end of an epoch: validation, callbacks, files.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist.engine import allreduce


def statistics_of(model: Any, *, synchronized: bool = True) -> list[Any]:
    """Returns the variables that the layers of `model` update themselves, such as moving means.

    Args:
        model: A Keras model.
        synchronized: Whether those count that are the same on all replicas at every step.
    """
    # As created: a frozen layer's weights are not trainable either, and they do not move.
    return [
        variable
        for layer in model._flatten_layers()
        if synchronized or not getattr(layer, "synchronized", False)
        for variable in layer._non_trainable_variables
        if tf.as_dtype(variable.dtype).is_floating
    ]


class Statistics:
    """The statistics of one model.

    Args:
        model: A built Keras model under synchronous replicas.
    """

    def __init__(self, model: Any):
        self._model = model
        self._strategy = model.distribute_strategy
        self._variables: list[Any] = []
        self._average: Any = None
        self._prepare()  # Now, and not between two epochs.

    def synchronize(self) -> None:
        """Sets each statistic to its mean over replicas; a collective, one message in all."""
        self._prepare()
        if self._average is not None:
            self._average()

    def _prepare(self) -> None:
        variables = statistics_of(self._model)
        # A model that builds itself in its first step has more of them after it.
        if len(variables) == len(self._variables) or self._strategy.num_replicas_in_sync == 1:
            return
        self._variables = variables
        on_replicas = functools.partial(self._strategy.run, self._take_means)
        self._average = tf.function(on_replicas, autograph=False)
        self._average.get_concrete_function()

    def _take_means(self) -> None:
        values = [tf.cast(variable.value, tf.float64) for variable in self._variables]
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
        [total] = allreduce.total([flat], self._model)
        means = total / self._strategy.num_replicas_in_sync
        sizes = [int(value.shape.num_elements()) for value in values]
        for variable, mean in zip(self._variables, tf.split(means, sizes), strict=True):
            variable.assign(tf.reshape(mean, variable.shape))
