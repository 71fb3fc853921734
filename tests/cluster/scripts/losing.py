"""Training on parameter servers while tasks are killed or stopped; see test_losing_machines.py."""

from __future__ import annotations

import os
import sys
import time

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from counting import Counts  # noqa: E402
from counting import model_of_ids  # noqa: E402
from counting import seen  # noqa: E402
from report import report  # noqa: E402

from tfdist.engine.servers import dispatcher  # noqa: E402

dispatcher.PATIENCE_SECONDS = 6.0  # So that the tests need not sit through the usual 15.
ROWS, BATCH = 509, 8
EPOCHS = int(sys.argv[1])


class Talk(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        print(f"epoch {epoch} begins", flush=True)


def slowly():
    """Yields batches at a pace that leaves time to do harm in the middle of an epoch."""
    ids = np.arange(ROWS)[:, None]
    for begin in range(0, ROWS, BATCH):
        time.sleep(0.03)
        yield ids[begin : begin + BATCH], ids[begin : begin + BATCH].astype("float32")


data = tf.data.Dataset.from_generator(
    slowly,
    output_signature=(tf.TensorSpec([None, 1], tf.int64), tf.TensorSpec([None, 1], tf.float32)),
)
with strategy.scope():
    model = model_of_ids(ROWS, keras.optimizers.SGD(1e-3), metrics=[Counts(ROWS)])

talk = Talk()
callbacks = [talk]
if len(sys.argv) > 2:
    callbacks.append(keras.callbacks.BackupAndRestore(sys.argv[2], delete_checkpoint=False))
history = model.fit(data, epochs=EPOCHS, callbacks=callbacks, verbose=0)
# Made anew, so that every worker must be told of it.
found = model.evaluate(data.take(8), verbose=0, return_dict=True)
report(
    evaluated=float(np.sum(found["counts"])),
    seen=seen(history),
    iterations=int(model.optimizer.iterations),
    epochs=talk.epochs,
    start=int(os.environ.get("TFDIST_INCARNATION", 0)),
)
print("done", flush=True)
