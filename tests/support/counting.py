"""Imported by scripts under test: a model of ids, and a metric that knows which it was given.

from counting import Counts, model_of_ids, seen
model = model_of_ids(509, "adam", metrics=[Counts(509)])
history = model.fit(ids, ids)
assert seen(history) == [[1.0, 1.0]]
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Counts(keras.metrics.Metric):
    """How often each example was seen, whose target is its id.

    Args:
        rows: Number of examples.
    """

    def __init__(self, rows: int):
        super().__init__(name="counts")
        self.rows = rows
        self.seen = self.add_variable((rows,), "zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.seen.assign_add(tf.reduce_sum(tf.one_hot(ids, self.rows), axis=0))

    def result(self) -> Any:
        return keras.ops.copy(self.seen)


def model_of_ids(rows: int, optimizer: Any, *, columns: int = 4, **compiled: Any) -> Any:
    """Returns a compiled model of ids of shape [batch, 1]: a table and a Dense layer.

    Args:
        rows: Number of ids.
        optimizer: A Keras optimizer.
        columns: Of the table.
        **compiled: More arguments of `compile`.
    """
    ids = keras.Input((1,), dtype="int64")
    table = keras.layers.Embedding(rows, columns, embeddings_initializer="zeros")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
    model.compile(optimizer, "mse", **compiled)
    return model


def seen(history: Any, key: str = "counts") -> list[list[float]]:
    """Returns the smallest and largest number of times that an example was seen, by epoch."""
    return [[float(np.min(c)), float(np.max(c))] for c in history.history[key]]
