"""Losses: reductions, classes of the user's own, weights, several outputs, penalties and masks."""

from __future__ import annotations

from cells.data import LAST1
from cells.data import STARVED
from cells.data import batches
from cells.data import classes
from cells.data import regression
from cells.models import SGD
from cells.models import classifier
from cells.models import compiled
from cells.models import ready
from cells.models import small_model
from cells.registry import cell
from cells.registry import train
from cells.registry import train_arrays
from cells.world import keras
from cells.world import np
from cells.world import tf


def rising_weights(rows):
    return np.linspace(0.1, 2, rows).astype("float32")


class PerExample(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_sum(tf.square(y_true - y_pred), -1)


class ScalarMean(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred))


def huber_mean(y_true, y_pred):
    return tf.reduce_mean(keras.losses.huber(y_true, y_pred))


def square_sum(y_true, y_pred):
    return 0.1 * tf.reduce_sum(tf.square(y_true - y_pred))


LOSSES = {
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "none": lambda: keras.losses.MeanSquaredError(reduction="none"),
    "None": lambda: keras.losses.MeanSquaredError(reduction=None),
    "mean": lambda: keras.losses.MeanSquaredError(reduction="mean"),
    "mean_with_sample_weight": lambda: keras.losses.MeanSquaredError(
        reduction="mean_with_sample_weight"
    ),
    "loss_subclass": PerExample,
    "loss_subclass_sum": lambda: PerExample(reduction="sum"),
    "loss_subclass_scalar": ScalarMean,
    "scalar_mean": lambda: huber_mean,
    "scalar_sum": lambda: square_sum,
    "per_example_function": lambda: lambda a, b: tf.square(a - b),
    "keras_function": lambda: keras.losses.mean_absolute_error,
}


def loss_cell(name, make, weighted):
    @cell(f"loss/{name}{'/weighted' if weighted else ''}")
    def run():
        model = small_model(lambda: SGD(0.02, momentum=0.5), loss=make(), metrics=("mae",))
        rows = sum(STARVED)
        weights = [rising_weights(rows)] if weighted else []
        return train_arrays(model, STARVED, *regression(rows), *weights)


for name, make in LOSSES.items():
    loss_cell(name, make, False)
for name in ("sum", "mean", "mean_with_sample_weight", "loss_subclass", "None"):
    loss_cell(name, LOSSES[name], True)


@cell("loss/class_weight")
def class_weight():
    return train(
        classifier(metrics=["accuracy"]),
        make=classes,
        sizes=STARVED,
        class_weight={0: 1.0, 1: 3.0, 2: 0.5},
    )


@cell("loss/ignored_class")
def ignored_class():
    x, y = classes(sum(STARVED))
    y[::3] = -1
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    return train_arrays(classifier(loss), STARVED, x, y)


def two_outputs():
    def build():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        outputs = {
            "a": keras.layers.Dense(1, name="a")(hidden),
            "b": keras.layers.Dense(2, name="b")(hidden),
        }
        return keras.Model(inputs, outputs)

    return ready(
        build,
        lambda: SGD(0.05),
        loss={"a": "mse", "b": "mae"},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"a": ["mae"], "b": ["mse"]},
    )


def two_targets(rows):
    x, y = regression(rows)
    return x, {"a": y, "b": np.concatenate([2 * y, -y], 1)}


@cell("loss/two_outputs")
def several_outputs():
    x, targets = two_targets(sum(STARVED))
    model = two_outputs()
    first = {name: values[:25] for name, values in targets.items()}
    return train_arrays(
        model, STARVED, x, targets, validation_data=batches([12, 12, 1], x[:25], first)
    )


@cell("loss/two_outputs/weighted")
def several_outputs_weighted():
    x, targets = two_targets(sum(LAST1))
    weights = {"a": np.linspace(0.1, 2, len(x)), "b": np.linspace(3, 0.1, len(x))}
    return train_arrays(two_outputs(), LAST1, x, targets, weights)


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


@cell("loss/add_loss")
def add_loss():
    model = compiled(
        lambda: [keras.layers.Dense(8, activation="tanh"), Penalty(), keras.layers.Dense(1)],
        lambda: SGD(0.1, momentum=0.5),
    )
    return train(model, sizes=STARVED)


@cell("loss/regularizers")
def regularizers():
    model = compiled(
        lambda: [
            keras.layers.Dense(
                8,
                activation="tanh",
                kernel_regularizer="l2",
                bias_regularizer=keras.regularizers.L1(0.02),
            ),
            keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.05)),
        ],
        lambda: SGD(0.1, momentum=0.5, clipnorm=0.5),
    )
    return train(model, sizes=STARVED)


def regularized(optimizer, loss):
    return compiled(
        lambda: [keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))],
        optimizer,
        loss,
    )


@cell("loss/regularizer_with_sum")
def regularizer_with_sum():
    model = regularized(lambda: SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
    return train(model, sizes=STARVED)


@cell("loss/regularizer_with_weights")
def regularizer_with_weights():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    x, y = regression(sum(STARVED))
    return train_arrays(regularized(lambda: SGD(0.05), loss), STARVED, x, y, rising_weights(len(x)))


def sequences(rows):
    r = np.random.RandomState(1)
    ids = r.randint(1, 9, (rows, 6))
    lengths = r.randint(1, 7, rows)
    ids[np.arange(6)[None] >= lengths[:, None]] = 0
    return ids.astype("int32"), (ids % 3).astype("int32")


def masked_model(optimizer, *between, **compile_args):
    return compiled(
        lambda: [
            keras.layers.Embedding(9, 4, mask_zero=True),
            *(make() for make in between),
            keras.layers.Dense(3, activation="softmax"),
        ],
        optimizer,
        "sparse_categorical_crossentropy",
        inputs=(6,),
        dtype="int32",
        **compile_args,
    )


@cell("loss/masked_sequences")
def masked_sequences():
    model = masked_model(
        lambda: SGD(0.3), lambda: keras.layers.LSTM(5, return_sequences=True), metrics=["accuracy"]
    )
    return train_arrays(model, [12, 1, 12, 2, 12, 2], *sequences(41))


@cell("loss/masked_sequences_accumulation")
def masked_sequences_accumulation():
    model = masked_model(lambda: SGD(0.3, gradient_accumulation_steps=2, clipnorm=0.05))
    return train_arrays(model, [12, 12, 12, 1, 3], *sequences(40))
