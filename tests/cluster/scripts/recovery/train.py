"""A training that is killed and started again; see test_recovery.py.

    train.py DIRECTORY [--kill INCARNATION:TASK:WHEN ...] [--data KIND] [--reference] ...

TASK is a worker's number or "all", WHEN a number of batches, "v" and a number of batches of
validation, or "commit" (as soon as the chief writes one). With --signal 15 it gets SIGTERM instead,
with --launcher the launcher does. With --reference, the same training follows undisturbed in the
process that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import threading
import time
from pathlib import Path

import tfdist

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--url", default=None, help="where commits are, if not in DIRECTORY")
parser.add_argument("--strategy", default="")
parser.add_argument("--kill", action="append", default=[])
parser.add_argument("--signal", type=int, default=9)
parser.add_argument("--launcher", action="store_true")
parser.add_argument("--data", default="dataset")
parser.add_argument("--every", default="3")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--accumulate", type=int, default=None)
parser.add_argument("--execution", type=int, default=1)
parser.add_argument("--validation", type=int, default=None, help="batch size")
parser.add_argument("--wait-for", type=int, default=0, help="step of a commit, before a kill")
parser.add_argument("--keep-commits", action="store_true")
parser.add_argument("--reference", action="store_true")
parser.add_argument("--random", type=int, default=0, help="incarnations that die at any moment")
options = parser.parse_args()

if options.strategy == "default":
    tfdist.activate()
    scope = contextlib.nullcontext
elif options.strategy == "mirrored":
    scope = tfdist.strategy("mirrored", replicas=2).scope
else:
    scope = tfdist.strategy().scope

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

tf.config.experimental.enable_op_determinism()
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
WORKERS = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
INCARNATION = os.environ.get("TFDIST_INCARNATION", "0")
ROWS, BATCH = 70, 8
every = int(options.every) if options.every.isdigit() else options.every


class Seen(keras.metrics.Metric):
    """How often each example was seen."""

    def __init__(self):
        super().__init__(name="seen")
        self.counts = self.add_variable((ROWS,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(y_true[:, 1], tf.int32)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(ids, ROWS), axis=0))

    def result(self):
        return keras.ops.copy(self.counts)


class Dies(keras.callbacks.Callback):
    """Kills this process where it was told to, and remembers what it was called for."""

    def __init__(self):
        super().__init__()
        self.batches = self.validations = 0
        self.epochs = []

    def on_train_begin(self, logs=None):
        # The first step takes seconds to compile on a busy machine, and a launcher gives up where
        # five starts in a row have come no further: of three, two are killed after it.
        if int(INCARNATION) % 3 == 0:
            die_soon()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append([epoch, logs["loss"]])

    def on_train_batch_end(self, batch, logs=None):
        die_soon()
        if options.random and not done:
            time.sleep(0.03)
        self.batches += 1
        here.append(batch)
        for when in list(kills):
            if when.isdigit() and self.batches >= int(when):
                self.die(when)
        if options.launcher and not done:
            time.sleep(0.05)

    def on_test_batch_end(self, batch, logs=None):
        self.validations += 1
        if f"v{self.validations}" in kills:
            self.die(f"v{self.validations}")

    def die(self, when):
        print("dies", flush=True)
        kills.remove(when)
        name = f"step-{options.wait_for:09}"
        while options.wait_for and not any(options.directory.glob(f"{name}*")):
            time.sleep(0.01)
        os.kill(os.getppid() if options.launcher else os.getpid(), options.signal)


class CountsUp(keras.callbacks.Callback):
    """Has a state of its own kind."""

    def __init__(self):
        super().__init__()
        self._secret = object()
        self._count = 0

    def on_train_batch_end(self, batch, logs=None):
        self._count += 1

    def get_state(self):
        return {"count": self._count, "pair": (1, 2.5)}

    def set_state(self, state):
        assert state["pair"] == (1, 2.5)
        self._count = state["count"]


def die_soon():
    """Kills this process within a second or two, if this incarnation is to die: once."""
    is_meant = int(INCARNATION) < options.random and int(INCARNATION) % 2 % WORKERS == TASK
    if is_meant and not soon:
        soon.append(True)
        seconds = random.Random(int(INCARNATION)).uniform(0.0, 1.5)
        threading.Thread(target=die_after, args=[seconds], daemon=True).start()


def die_after(seconds):
    time.sleep(seconds)
    if not done:
        os.kill(os.getpid(), 9)


def die_in_a_commit():
    while True:
        for name in os.listdir(options.directory) if options.directory.exists() else ():
            if name.startswith(".") and "step" in name and "000000000" not in name:
                os.kill(os.getpid(), 9)
        time.sleep(0.0002)


def mse(y_true, y_pred):
    return tf.square(y_true[:, 0] - y_pred[:, 0])


def train(callbacks):
    keras.utils.set_random_seed(7)
    generator = np.random.RandomState(0)
    x = generator.randn(ROWS, 6).astype("float32")
    y = x[:, :1] * 2 + generator.randn(ROWS, 1) * 0.1
    y = np.concatenate([y, np.arange(ROWS)[:, None]], axis=1).astype("float32")
    with scope():
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
        if not options.dropout:
            layers = [keras.layers.Dense(16, activation="tanh")]
        model = keras.Sequential(
            [
                keras.Input((6,)),
                *layers,
                keras.layers.Dropout(options.dropout),
                keras.layers.Dense(1),
            ]
        )
        adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=options.accumulate)
        model.compile(adam, mse, metrics=[Seen()], steps_per_execution=options.execution)
    arguments = {"batch_size": BATCH}
    if options.data == "arrays":
        data = (x, y)
    elif options.data == "files":

        def parse(record):
            row = tf.strings.to_number(record, tf.int32)
            return tf.gather(x, row), tf.gather(y, row)

        pattern = str(options.directory.parent / "*.tfrecord")
        data = (
            tfdist.data.shard(pattern, global_batch_size=BATCH, shuffle=True, seed=3, parse=parse),
        )
        arguments = {}
    elif options.data == "sharded":
        data = (tfdist.data.shard((x, y), global_batch_size=BATCH, shuffle=True, seed=3),)
        arguments = {}
    else:
        data = (tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH),)
        arguments = {}
    history = model.fit(
        *data,
        epochs=options.epochs,
        verbose=0,
        validation_data=(x[:20], y[:20]),
        validation_batch_size=options.validation,
        callbacks=[
            *callbacks,
            keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5),
        ],
        **arguments,
    )
    counts = [np.asarray(each) for each in history.history["seen"]]
    weights = b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "values": [float(value) for w in model.get_weights() for value in np.ravel(w)],
        "iterations": int(model.optimizer._iterations.numpy()),
        "seen": [[float(each.min()), float(each.max())] for each in counts],
        "history": {k: v for k, v in history.history.items() if "seen" not in k},
        "epochs": history.epoch,
    }


here, kills, done, soon = [], [], [], []
for each in options.kill:
    incarnation, task, when = each.split(":")
    if incarnation == INCARNATION and task in ("all", str(TASK)):
        kills.append(when)
if "commit" in kills:
    threading.Thread(target=die_in_a_commit, daemon=True).start()
dies, up = Dies(), CountsUp()
table = options.directory.with_suffix(f".{TASK}.csv")
place = options.url or str(options.directory)
backup = tfdist.callbacks.BackupAndRestore(
    place, save_every=every, delete_checkpoint=not options.keep_commits
)
# Arrays are read in another order where nothing is to be restored.
again = tfdist.callbacks.BackupAndRestore(options.directory.with_suffix(".again"))
found = train([backup, dies, up, keras.callbacks.CSVLogger(table)])
done.append(True)
trained_here = len(here)
kills = []
report(
    **found,
    batches=dies.batches,
    validations=dies.validations,
    here=trained_here,
    told=dies.epochs,
    count=up._count,
    table=table.read_text().splitlines() if table.exists() else [],
    files=sorted(tf.io.gfile.listdir(place)) if TASK == 0 else [],
    undisturbed=train([again]) if options.reference else None,
    incarnation=INCARNATION,
)
