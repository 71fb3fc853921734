"""Trains what compression of gradients could spoil, and reports every number that came out.

Each model is fitted twice: first with a learning rate of 0, where History depends on nothing but
counts, divisors and metrics, then for real.
"""

from __future__ import annotations

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

# The graphs run a few times each; optimising them takes longer.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

ROWS, BATCH = 37, 12  # The last batch has one example.
RATE = 0.1


class Total(keras.metrics.Metric):
    """Counts every example as 50,001: more than a type of 16 bits can tell from its neighbours."""

    def __init__(self):
        super().__init__(name="total")
        self.sum = self.add_variable((), initializer="zeros", name="sum")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sum.assign_add(50_001.0 * tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return tf.identity(self.sum.value)


def arrays():
    r = np.random.RandomState(0)
    x = r.randn(ROWS, 4).astype("float32")
    return x, np.tanh(x @ np.linspace(1.0, -2.0, 4)[:, None]).astype("float32")


def sequences():
    r = np.random.RandomState(1)
    ids = r.randint(1, 9, (ROWS, 6))
    ids[np.arange(6)[None] >= r.randint(1, 7, ROWS)[:, None]] = 0
    return ids.astype("int32"), (ids[..., None] % 3 / 2.0).astype("float32")


def dense():
    return [
        keras.Input((4,)),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(1),
    ]


def masked():
    return [
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(1),
    ]


def clipped():
    return dense, keras.optimizers.SGD(RATE, momentum=0.5, clipnorm=0.3), "mse", arrays()


def weighted():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    weights = np.linspace(0.1, 2.0, ROWS).astype("float32")
    return dense, keras.optimizers.SGD(RATE, momentum=0.5), loss, (*arrays(), weights)


def masks():
    return masked, keras.optimizers.SGD(RATE), "mse", sequences()


def scaled():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(RATE, momentum=0.5), initial_scale=2.0**10, dynamic_growth_steps=3
    )
    return dense, optimizer, "mse", arrays()


def train(program):
    with strategy.scope():
        layers, optimizer, loss, data = program()
        model = keras.Sequential(layers())
        r = np.random.RandomState(7)
        model.set_weights([r.uniform(-0.7, 0.7, w.shape) for w in model.weights])
        model.compile(optimizer, loss, metrics=[Total(), "mae"], weighted_metrics=["mse"])
    data = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
    optimizer.learning_rate = 0.0
    still = model.fit(data, verbose=0)
    optimizer.learning_rate = RATE
    trained = model.fit(data, epochs=2, verbose=0)
    return {
        "still": still.history,
        "trained": trained.history,
        "weights": model.get_weights(),
        "counters": {
            variable.name: variable.value
            for variable in optimizer.variables
            if variable.name in ("iteration", "dynamic_scale", "step_counter")
        },
        "slots": [v.value for v in optimizer.variables if "momentum" in v.path],
    }


report(**{program.__name__: train(program) for program in (clipped, weighted, masks, scaled)})
