"""Trains on batches that other processes make, and on the same ones made here; see the tests.

Usage: service.py FOLDER [--pause STEP] [--die STEP] [--service SERVICE]
FOLDER is for backups. At step STEP of the first training it says "paused" and waits for the file
FOLDER/go, or it is killed in its first incarnation.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import tfdist

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--pause", type=int)
parser.add_argument("--die", type=int)
parser.add_argument("--service", default="")
given = parser.parse_args()
strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

from tfdist.data import service as processes  # noqa: E402
from tfdist.data.world import workers_here  # noqa: E402

ROWS, EPOCHS = 1003, 3
x = np.random.RandomState(0).rand(ROWS, 4).astype("float32")
steps_here: list[int] = []
first = os.environ["TFDIST_INCARNATION"] == "0"


def bent(values, number):
    for _ in range(5):
        values = tf.sin(values * 2)
    return (values, tf.cast(number, tf.float32)), tf.reduce_sum(values)


class Steps(keras.callbacks.Callback):
    """Stops on the way."""

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1  # Comes back with the rest.
        steps_here.append(batch)
        if self.count == given.pause:
            print("paused", flush=True)
            while not os.path.exists(os.path.join(given.folder, "go")):
                time.sleep(0.02)
        if self.count == given.die and first:
            os.kill(os.getpid(), signal.SIGKILL)


def train(service, backup):
    keras.utils.set_random_seed(1)
    data = tfdist.data.shard(
        (x, np.arange(ROWS)),
        global_batch_size=64,
        map=bent,
        shuffle=True,
        seed=5,
        service=service,
    )
    assert service is None or not data.why_no_service
    with strategy.scope():
        inputs = keras.Input([4]), keras.Input([])
        hidden = keras.layers.Dense(8, "relu")(inputs[0])
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    steps = Steps()
    callbacks = [steps] if backup else []
    if backup and given.die:
        callbacks.append(tfdist.callbacks.BackupAndRestore(given.folder, save_every=5))
    history = model.fit(data, epochs=EPOCHS, callbacks=callbacks, verbose=0).history
    return {
        "weights": [weight.ravel().tolist() for weight in model.get_weights()],
        "loss": history["loss"],
        "steps": steps.count,
        "steps here": len(steps_here),
    }


def numbers(service):
    """Returns the examples that this worker reads in two passes, batch by batch."""
    data = tfdist.data.shard(
        np.arange(ROWS), global_batch_size=64, shuffle=True, seed=2, service=service
    )
    return [
        [batch.data.numpy()[batch.mask.numpy()].tolist() for batch in data.batches(*here, epoch)]
        for epoch in range(2)
    ]


here = workers_here()
service = given.service or True
there = train(service, True)
report(
    there=there,
    here=train(None, False),
    read=numbers(service),
    expected=numbers(None),
    children=[child.process.pid for child in processes._children.values()],
)
