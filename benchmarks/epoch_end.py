"""How long the end of an epoch takes: tfdist's `fit` beside TensorFlow's distributed iterator.

    tfdist run --workers 2 benchmarks/epoch_end.py

Both train the same model (0.8 M parameters, 64 examples per worker and step) on the same data in
the same processes, one after the other, ten epochs each. Printed are the median time of a step and
the time from the last step of an epoch to the first of the next, as median and maximum.
"""

from __future__ import annotations

import statistics
import time

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

ROUNDS = 10
STEPS = 40
GLOBAL_BATCH = 64 * strategy.num_replicas_in_sync


class Clock(keras.callbacks.Callback):
    """Notes the time at the end of every step."""

    def __init__(self):
        super().__init__()
        self.ends: list[list[float]] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.ends.append([])

    def on_train_batch_end(self, batch, logs=None):
        self.ends[-1].append(time.perf_counter())


def data() -> tf.data.Dataset:
    """Returns `STEPS` global batches of random images."""
    r = np.random.RandomState(0)
    x = r.rand(GLOBAL_BATCH * STEPS, 784).astype("float32")
    y = r.randint(0, 10, len(x))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)


def report(name: str, ends: list[list[float]]) -> None:
    """Prints one line of figures."""
    steps = [b - a for epoch in ends for a, b in zip(epoch, epoch[1:], strict=False)]
    # From one epoch's last step to the end of the next one's first, less that step.
    step = statistics.median(steps)
    gaps = [b[0] - a[-1] - step for a, b in zip(ends, ends[1:], strict=False)]
    print(
        f"{name:32} step {1e3 * step:6.1f} ms   between epochs: "
        f"median {1e3 * statistics.median(gaps):6.0f} ms, maximum {1e3 * max(gaps):6.0f} ms",
        flush=True,
    )


with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(700, "relu"),
            keras.layers.Dense(300, "relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

dataset = data()
model.fit(dataset, epochs=1, verbose=0)  # Compiles.

clock = Clock()
for _ in range(2):
    model.fit(dataset, epochs=ROUNDS // 2, verbose=0, callbacks=[clock])

distributed = strategy.experimental_distribute_dataset(dataset)
step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
by_hand: list[list[float]] = []
for _ in range(ROUNDS):
    by_hand.append([])
    for batch in distributed:
        step(batch)
        by_hand[-1].append(time.perf_counter())

if tfdist.detect().is_chief:
    report("TensorFlow's iterator, by hand", by_hand[1:])
    report("model.fit with tfdist", clock.ends)
