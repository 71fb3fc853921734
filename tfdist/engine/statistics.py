"""Moving statistics that every replica keeps for itself are averaged at the end of each epoch.

`BatchNormalization` without `synchronized=True` updates its moving mean and variance on every
replica from that replica's part of the batch. Stock Keras then evaluates and saves those of
replica 0 only (tensorflow issues 46488 and 32653). Here all replicas of all workers take the mean
over replicas before anything reads them at the end of an epoch: validation, callbacks, files.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


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
        self._strategy = model.distribute_strategy
        self._variables = statistics_of(model)
        self._average = tf.function(self._averages)

    def synchronize(self) -> None:
        """Sets each statistic to its mean over replicas; a collective, one message in all."""
        if not self._variables or self._strategy.num_replicas_in_sync == 1:
            return
        means = self._average().numpy()
        start = 0
        for variable in self._variables:
            size = int(tf.size(variable.value))
            part = means[start : start + size].reshape(tuple(variable.shape))
            start += size
            with self._strategy.scope():
                variable.assign(part)

    def _averages(self) -> Any:
        def local() -> Any:
            flat = [tf.reshape(tf.cast(v.value, tf.float64), [-1]) for v in self._variables]
            return tf.concat(flat, axis=0)

        values = self._strategy.run(local)
        return self._strategy.reduce(tf.distribute.ReduceOp.MEAN, values, axis=None)
