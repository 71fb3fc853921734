"""What the engine costs where there is nothing to distribute: `fit` on one device.

    python benchmarks/one_device.py

Two equal models, built and trained on one core in one process, one while the engine is in Keras
and one while it is out, turn by turn, so that noise hits both alike. Printed is the median over
pairs of turns of the ratio of their CPU time a step, and where the middle half of the pairs lies.
"""

from __future__ import annotations

import os
import statistics
import time

os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1", OMP_NUM_THREADS="1")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfdist  # noqa: E402

PAIRS, STEPS = 60, 50


class Clock(keras.callbacks.Callback):
    """CPU time of a step in the second epoch; the first begins with what `fit` does once."""

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Starts."""
        self.began = time.process_time()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Stops."""
        self.milliseconds = (time.process_time() - self.began) / STEPS * 1e3


def build() -> keras.Model:
    """Returns the 0.8 M MLP of `benchmarks/sync.py`."""
    model = keras.Sequential(
        [
            keras.Input((1024,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss=loss)
    return model


def turn(model: keras.Model, data: tf.data.Dataset, engine: bool) -> float:
    """Returns the CPU time of a step in milliseconds."""
    tfdist.activate() if engine else tfdist.deactivate()
    clock = Clock()
    model.fit(data, steps_per_epoch=STEPS, epochs=2, verbose=0, callbacks=[clock])
    return clock.milliseconds


def main() -> None:
    """Measures and prints."""
    x = np.random.rand(8, 64, 1024).astype("float32")
    y = np.random.randint(0, 10, (8, 64))
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    models = {}
    for engine in (False, True):
        tfdist.activate() if engine else tfdist.deactivate()
        models[engine] = build()
        turn(models[engine], data, engine)
    ratios, times = [], []
    for pair in range(PAIRS):
        first = bool(pair % 2)  # Whoever goes second finds a warmer or a busier machine.
        taken = {engine: turn(models[engine], data, engine) for engine in (first, not first)}
        ratios.append(taken[True] / taken[False])
        times.append(taken[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"plain Keras: {statistics.median(times):.2f} ms of CPU time a step")
    print(f"with the engine / without: {middle:.3f} ({low:.3f} to {high:.3f}, {PAIRS} pairs)")


if __name__ == "__main__":
    main()
