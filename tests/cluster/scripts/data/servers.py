"""Trains on sharded data under parameter servers, and counts the examples; see test_data.py.

Usage: servers.py FOLDER
"""

from __future__ import annotations

import sys

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

from tfdist import data  # noqa: E402

ROWS, BATCH, EPOCHS = 101, 16, 2


class Counts(keras.metrics.Metric):
    """How often each example was seen in an epoch."""

    def __init__(self):
        super().__init__(name="counts")
        self.seen = self.add_variable((ROWS,), "zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.seen.assign_add(tf.reduce_sum(tf.one_hot(ids, ROWS), axis=0))

    def result(self):
        return keras.ops.copy(self.seen)


def pair(number):
    return tf.cast([number], tf.float32), tf.cast([number], tf.float32)


def parse(record):
    return pair(tf.strings.to_number(record, tf.int64))


def parts(context):
    rows = tf.data.Dataset.range(ROWS)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id).map(pair)


numbers = np.arange(ROWS, dtype="float32")[:, None]
sources = {
    "files": (f"{sys.argv[1]}/seven/*", {"parse": parse, "shuffle": True}),
    "function": (parts, {}),
}
counts = {}
for name, (source, options) in sources.items():
    sharded = data.shard(source, global_batch_size=BATCH, **options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, trainable=False)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Counts()])
    history = model.fit(sharded, epochs=EPOCHS, verbose=0).history["counts"]
    evaluated = model.evaluate(sharded, verbose=0, return_dict=True)["counts"]
    counts[name] = [np.asarray(each).tolist() for each in (*history, evaluated)]
in_order = data.shard(numbers, global_batch_size=BATCH)
predicted = model.predict(in_order, verbose=0)
expected = model.predict(numbers, batch_size=BATCH, verbose=0)
report(counts=counts, predicted=np.ravel(predicted), expected=np.ravel(expected))
