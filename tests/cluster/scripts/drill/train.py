"""A small training to drill; see test_drill.py.

    train.py [--anew] [--unseeded] [--no-backup] [--strategy NAME] [--fits N] [--dies]

With --anew its examples come in another order after a restart, which is a mistake that a drill is
to find.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import tfdist

parser = argparse.ArgumentParser()
parser.add_argument("--anew", action="store_true")
parser.add_argument("--unseeded", action="store_true")
parser.add_argument("--no-backup", action="store_true")
parser.add_argument("--strategy", default="")
parser.add_argument("--fits", type=int, default=1)
options = parser.parse_args()

if options.strategy == "default":
    tfdist.activate()
    scope = contextlib.nullcontext
else:
    scope = tfdist.strategy(options.strategy or None).scope

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(int.from_bytes(os.urandom(3), "big") if options.unseeded else 7)
ROWS = 70
generator = np.random.RandomState(0)
x = generator.randn(ROWS, 6).astype("float32")
y = x[:, :1] * 2 + generator.randn(ROWS, 1).astype("float32") * 0.1
order = np.arange(ROWS)
if options.anew:
    np.random.RandomState(int(os.environ["TFDIST_INCARNATION"])).shuffle(order)


def examples():
    for index in order:
        yield x[index], y[index]


with scope():
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
specs = tf.TensorSpec((6,)), tf.TensorSpec((1,))
data = tf.data.Dataset.from_generator(examples, output_signature=specs).batch(8)
callbacks = []
if not options.no_backup:
    callbacks.append(tfdist.callbacks.BackupAndRestore("backup", save_every=4))
for _ in range(options.fits):
    model.fit(data, epochs=4, callbacks=callbacks, verbose=0)
