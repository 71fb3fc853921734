"""Training on parameter servers, one world after the other; run by test_parameter_servers.py.

With one worker nothing is asynchronous: weights and metrics must be those of one device.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

# The graphs run a few times each; optimising them takes longer.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

rng = np.random.default_rng(7)
ROWS = 83
X = rng.normal(size=(ROWS, 6)).astype("float32")
Y = (X[:, :1] * 2 - X[:, 1:2] + 0.1 * rng.normal(size=(ROWS, 1))).astype("float32")
IDS = rng.integers(0, 20, size=(ROWS, 3))
LABELS = (Y > 0).astype("float32")
WEIGHTS = rng.uniform(0.2, 2.0, size=(ROWS,)).astype("float32")
CITIES = np.array(["oslo", "rome", "kyiv", "lima"])[rng.integers(0, 4, size=(ROWS, 1))]
LENGTHS = rng.integers(0, 5, size=ROWS)
RAGGED = tf.RaggedTensor.from_row_lengths(rng.integers(0, 20, size=LENGTHS.sum()), LENGTHS)


class Sum(keras.metrics.Metric):
    """The sum of all targets, and of their number."""

    def __init__(self):
        super().__init__(name="sum")
        self.sum = self.add_variable((), "zeros", name="sum")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sum.assign_add(keras.ops.sum(y_true))

    def result(self):
        return keras.ops.copy(self.sum)


class Largest(keras.metrics.Metric):
    """No sum: the largest target so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def result(self):
        return keras.ops.copy(self.value)


class OneLayer(keras.Model):
    """For those that write a train_step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x)


class Own(OneLayer):
    """A train_step of the user's own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "twice": 2 * loss}


class Guide(OneLayer):
    """The train_step of Keras's guide, whose metrics hold others."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(y)[0])
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Parts(keras.Model):
    """Two optimizers, one of which is built in its first step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(1)
        self.other = keras.optimizers.Adam(0.05)

    def call(self, x, training=False):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients[:2] + [tf.zeros_like(g) for g in gradients[2:]], variables)
        self.other.apply(gradients[2:], variables[2:])
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self._loss_tracker.result()}


class Reconstructed(keras.Model):
    """No targets: a layer says what the loss is."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(2, activity_regularizer="l2")
        self.outer = keras.layers.Dense(6)

    def call(self, x):
        y = self.outer(self.inner(x))
        self.add_loss(keras.ops.mean((x - y) ** 2))
        return y


class Clipped(OneLayer):
    """Assigns to its weights after their update."""

    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(keras.ops.clip(weight, -0.1, 0.1))
        return logs


def dense(**options):
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", **options),
            keras.layers.Dense(1),
        ]
    )


def normalized():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(momentum=0.8)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])


def spectral():
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    return keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])


def combined(sparse=False):
    ids = keras.Input((4 if sparse else None,), dtype="int64", ragged=not sparse, sparse=sparse)
    table = tfdist.layers.Embedding(20, 4, combiner="sqrtn" if sparse else "mean")
    return keras.Model(ids, keras.layers.Dense(1)(table(ids)))


def of_text():
    text = keras.Input((1,), dtype="string")
    known = keras.layers.StringLookup(vocabulary=["oslo", "rome"])(text)
    rows = [
        keras.layers.Embedding(3, 4)(known),
        keras.layers.Embedding(7, 4)(keras.layers.Hashing(7)(text)),
        tfdist.layers.Embedding(5, 4, hash_ids=True)(text),
    ]
    rows = keras.layers.Flatten()(keras.layers.Concatenate()(rows))
    return keras.Model(text, keras.layers.Dense(1)(rows))


def embedded(**options):
    ids = keras.Input((3,), dtype="int32", name="ids")
    x = keras.Input((6,), name="x")
    rows = keras.layers.Flatten()(keras.layers.Embedding(20, 4, **options)(ids))
    both = keras.layers.Concatenate()([rows, x])
    return keras.Model({"ids": ids, "x": x}, keras.layers.Dense(1)(both))


def two_outputs():
    x = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="tanh")(x)
    return keras.Model(
        x,
        {
            "a": keras.layers.Dense(1, name="a")(hidden),
            "b": keras.layers.Dense(1, name="b")(hidden),
        },
    )


def batches(*parts, size=16):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0]).batch(size)


#: name -> (model, compile arguments, fit arguments)
o = keras.optimizers
CELLS = {
    "sgd": (dense, {"optimizer": lambda: o.SGD(0.1, momentum=0.9)}, {}),
    "adam": (dense, {"optimizer": lambda: o.Adam(0.01)}, {}),
    "adamw": (dense, {"optimizer": lambda: o.AdamW(0.01, weight_decay=0.1)}, {}),
    "adagrad": (dense, {"optimizer": lambda: o.Adagrad(0.1)}, {}),
    "nadam": (dense, {"optimizer": lambda: o.Nadam(0.01)}, {}),
    "lamb": (dense, {"optimizer": lambda: o.Lamb(0.01)}, {}),
    "adafactor": (dense, {"optimizer": lambda: o.Adafactor(0.01)}, {}),
    "ftrl": (dense, {"optimizer": lambda: o.Ftrl(0.1)}, {}),
    "rmsprop": (dense, {"optimizer": lambda: o.RMSprop(0.01, centered=True, momentum=0.5)}, {}),
    "clipnorm": (dense, {"optimizer": lambda: o.SGD(0.1, clipnorm=0.1)}, {}),
    "global_clipnorm": (dense, {"optimizer": lambda: o.Adam(0.01, global_clipnorm=0.1)}, {}),
    "clipvalue": (dense, {"optimizer": lambda: o.SGD(0.1, clipvalue=0.02)}, {}),
    "average": (
        dense,
        {
            "optimizer": lambda: o.SGD(
                0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
            )
        },
        {},
    ),
    "schedule": (
        dense,
        {"optimizer": lambda: o.Adam(o.schedules.ExponentialDecay(0.05, 2, 0.8))},
        {},
    ),
    "constraint": (
        lambda: dense(kernel_constraint=keras.constraints.MaxNorm(0.5), kernel_regularizer="l2"),
        {"optimizer": lambda: o.SGD(0.1)},
        {},
    ),
    "normalized": (normalized, {"optimizer": lambda: o.SGD(0.05)}, {}),
    "embedded": (
        embedded,
        {"optimizer": lambda: o.SGD(0.1)},
        {"x": {"ids": IDS, "x": X}, "y": Y, "batch_size": 16},
    ),
    "clipped rows": (
        embedded,
        {"optimizer": lambda: o.SGD(0.1, global_clipnorm=0.1)},
        {"x": {"ids": IDS, "x": X}, "y": Y, "batch_size": 16},
    ),
    "penalty of a table": (
        lambda: embedded(embeddings_regularizer="l2", embeddings_constraint="non_neg"),
        {"optimizer": lambda: o.SGD(0.1)},
        {"x": {"ids": IDS, "x": X}, "y": Y, "batch_size": 16},
    ),
    "ragged": (
        combined,
        {"optimizer": lambda: o.Adagrad(0.1)},
        {"x": lambda: batches(RAGGED, Y), "validation_data": lambda: batches(RAGGED, Y)},
    ),
    "sparse": (
        lambda: combined(sparse=True),
        {"optimizer": lambda: o.Adagrad(0.1)},
        {"x": lambda: batches(RAGGED.to_sparse(), Y)},
    ),
    "text": (of_text, {"optimizer": lambda: o.SGD(0.1)}, {"x": lambda: batches(CITIES, Y)}),
    "spectral": (spectral, {"optimizer": lambda: o.SGD(0.05)}, {}),
    "guide": (Guide, {"optimizer": lambda: o.SGD(0.1)}, {}),
    "two optimizers": (Parts, {"optimizer": lambda: o.SGD(0.1), "metrics": lambda: None}, {}),
    "added loss": (
        Reconstructed,
        {"optimizer": lambda: o.SGD(0.1), "loss": None, "metrics": lambda: None},
        {"x": X, "batch_size": 16},
    ),
    "clipped afterwards": (Clipped, {"optimizer": lambda: o.SGD(0.1)}, {}),
    "weighted": (
        dense,
        {"optimizer": lambda: o.SGD(0.1), "weighted_metrics": ["mae"]},
        {"x": X, "y": Y, "batch_size": 16, "sample_weight": WEIGHTS},
    ),
    "classes": (
        dense,
        {
            "optimizer": lambda: o.SGD(0.1),
            "loss": keras.losses.BinaryCrossentropy(from_logits=True),
            "metrics": lambda: [keras.metrics.AUC(from_logits=True, name="auc"), "accuracy"],
        },
        {"x": X, "y": LABELS, "batch_size": 16, "class_weight": {0: 1.0, 1: 3.0}},
    ),
    "two outputs": (
        two_outputs,
        {
            "optimizer": lambda: o.SGD(0.1),
            "loss": {"a": "mse", "b": "mae"},
            "loss_weights": {"a": 1.0, "b": 0.3},
            "metrics": lambda: {"a": ["mae"], "b": ["mse"]},
        },
        {"x": X, "y": {"a": Y, "b": Y}, "batch_size": 16},
    ),
    "own step": (
        Own,
        {"optimizer": lambda: o.SGD(0.1), "metrics": lambda: None},
        {"epochs": 1},
    ),
    "unknown length": (
        dense,
        {"optimizer": lambda: o.SGD(0.1)},
        {"x": lambda: batches(X, Y).filter(lambda x, y: True)},
    ),
    "generator": (
        dense,
        {"optimizer": lambda: o.SGD(0.1)},
        {"x": lambda: ((X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)), "epochs": 1},
    ),
    "steps per epoch": (
        dense,
        {"optimizer": lambda: o.SGD(0.1)},
        {"x": lambda: batches(X, Y).repeat(), "steps_per_epoch": 5, "epochs": 3},
    ),
    "steps per execution": (dense, {"optimizer": lambda: o.SGD(0.1), "steps_per_execution": 4}, {}),
    "validated": (
        dense,
        {"optimizer": lambda: o.SGD(0.1), "metrics": lambda: ["mae", Largest(), Sum()]},
        {"validation_data": lambda: batches(X[:37], Y[:37]), "epochs": 2},
    ),
    "bfloat16": (
        lambda: dense(dtype="mixed_bfloat16"),
        {"optimizer": lambda: o.SGD(0.1)},
        {},
    ),
}


def inputs_of(name):
    """Returns what to predict on."""
    if name == "text":
        return batches(CITIES)
    if name in ("ragged", "sparse"):
        return batches(RAGGED.to_sparse() if name == "sparse" else RAGGED)
    return {"ids": IDS, "x": X} if CELLS[name][0] is embedded or "table" in name else X


def trained(name, scope):
    make, compiled, fitted = CELLS[name]
    keras.utils.set_random_seed(3)
    compiled = {"loss": "mse", "metrics": lambda: ["mae"], **compiled}
    called = {
        key: value() if key in ("optimizer", "metrics") else value
        for key, value in compiled.items()
    }
    if name == "clipped rows" and isinstance(scope, contextlib.nullcontext):
        # Keras alone takes the norm of rows as often as the batch names them.
        called["optimizer"] = tfdist.optimizers.RowSparse(called["optimizer"])
    fitted = {"x": lambda: batches(X, Y), "epochs": 2, **fitted}
    with scope:
        model = make()
        if not model.built:
            model.build((None, 6))
        start = [
            0.3 * np.random.default_rng(i).normal(size=w.shape) for i, w in enumerate(model.weights)
        ]
        model.set_weights(
            [
                np.abs(w) if "variance" in v.path else w
                for w, v in zip(start, model.weights, strict=True)
            ]
        )
        model.compile(**called)
    arguments = {key: value() if callable(value) else value for key, value in fitted.items()}
    losses = []
    if name == "own step" and isinstance(scope, contextlib.nullcontext):
        tell = lambda batch, logs: losses.append(float(logs["loss"]))  # noqa: E731
        arguments["callbacks"] = [keras.callbacks.LambdaCallback(on_train_batch_end=tell)]
    history = model.fit(**arguments, shuffle=False, verbose=0).history
    x = inputs_of(name)
    return {
        "history": {key: [float(v) for v in values] for key, values in history.items()},
        "weights": [w.tolist() for w in model.get_weights()],
        "slots": [np.asarray(v.numpy(), "float64").tolist() for v in model.optimizer.variables],
        "predicted": np.concatenate(
            [np.ravel(p) for p in tf.nest.flatten(model.predict(x, batch_size=10, verbose=0))]
        ).tolist(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "losses": losses,
    }


if __name__ == "__main__":
    names = sys.argv[1:] or list(CELLS)
    results = {}
    for name in names:
        began = time.monotonic()
        try:
            alone = trained(name, contextlib.nullcontext())
            results[name] = {"one device": alone, "servers": trained(name, strategy.scope())}
        except Exception:
            traceback.print_exc()
            results[name] = {"error": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    report(**results)
