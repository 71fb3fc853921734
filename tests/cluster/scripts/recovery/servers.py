"""Training on parameter servers, whose coordinator dies once; see test_recovery.py.

    servers.py DIRECTORY BATCHES [SIGNAL] [--launcher]

It gets SIGNAL (9) after so many batches, or the launcher does.
"""

from __future__ import annotations

import os
import sys

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

ROWS, BATCH, EPOCHS = 509, 8, 3
INCARNATION = int(os.environ.get("TFDIST_INCARNATION", "0"))
directory, dies_after = sys.argv[1], int(sys.argv[2])
number = int(sys.argv[3]) if len(sys.argv) > 3 else 9
pid = os.getppid() if "--launcher" in sys.argv else os.getpid()


class Seen(keras.metrics.Metric):
    """How often each example was seen."""

    def __init__(self):
        super().__init__(name="seen")
        self.counts = self.add_variable((ROWS,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(ids, ROWS), axis=0))

    def result(self):
        return keras.ops.copy(self.counts)


class Dies(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        here.clear()

    def on_train_batch_end(self, batch, logs=None):
        here.append(batch)
        if INCARNATION == 0 and len(here) == dies_after:
            os.kill(pid, number)


here = []
ids = np.arange(ROWS)[:, None]
data = tf.data.Dataset.from_tensor_slices((ids, ids.astype("float32")))
data = data.shuffle(ROWS, seed=5).batch(BATCH)
with strategy.scope():
    inputs = keras.Input((1,), dtype="int64")
    # Another number of shards after the restart.
    table = tfdist.layers.Embedding(ROWS, 4, num_shards=2 - INCARNATION)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(table(inputs))))
    model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=[Seen()])
backup = tfdist.callbacks.BackupAndRestore(directory, save_every=10)
history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[backup, Dies()])
report(
    seen=[[float(np.min(each)), float(np.max(each))] for each in history.history["seen"]],
    loss=history.history["loss"],
    iterations=int(model.optimizer.iterations),
    here=len(here),
    incarnation=INCARNATION,
)
