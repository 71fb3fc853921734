"""Metrics: sums, results that are no sums, and states that cannot be added."""

from __future__ import annotations

from cells.data import STARVED
from cells.data import batches
from cells.data import binary
from cells.data import classes
from cells.data import one_hot
from cells.data import regression
from cells.known import Count
from cells.models import SGD
from cells.models import classifier
from cells.models import small_model
from cells.registry import cell
from cells.registry import train_arrays
from cells.world import keras
from cells.world import strategy
from cells.world import tf


class Most(keras.metrics.Metric):
    """The largest target seen."""

    def __init__(self):
        super().__init__(name="most")
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y_true))))

    def result(self):
        return tf.identity(self.value.value)


class Last(keras.metrics.Metric):
    """The last target seen."""

    def __init__(self):
        super().__init__(name="last")
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        flat = tf.reshape(y_true, [-1])
        last = tf.cond(tf.size(flat) > 0, lambda: flat[-1], lambda: tf.identity(self.value.value))
        self.value.assign(last)

    def result(self):
        return tf.identity(self.value.value)


def mean_square_model(metrics):
    return small_model(lambda: SGD(0.1), loss="mse", metrics=metrics)


def metric_cell(name, make, data=regression, builder=mean_square_model, validated=True):
    @cell(f"metric/{name}")
    def run():
        with strategy.scope():
            metrics = make()
        model = builder(metrics)
        x, y = data(sum(STARVED))
        validation = batches([12, 12, 1], x[:25], y[:25]) if validated else None
        return train_arrays(model, STARVED, x, y, epochs=2, validation_data=validation)


# Keras reads a result that is a variable after validation has changed it.
metric_cell("count", lambda: [Count()], validated=False)
metric_cell("maximum", lambda: [Most()])
metric_cell("last_value", lambda: [Last()])
metric_cell("r2", lambda: [keras.metrics.R2Score(name="r2")])
metric_cell(
    "regression",
    lambda: [
        keras.metrics.RootMeanSquaredError(),
        keras.metrics.CosineSimilarity(),
        keras.metrics.LogCoshError(),
    ],
)
metric_cell(
    "classes",
    lambda: [
        keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2"),
        keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou"),
        "accuracy",
    ],
    data=classes,
    builder=lambda metrics: classifier(metrics=metrics),
)
metric_cell(
    "f1",
    lambda: [keras.metrics.F1Score(average="macro", name="f1")],
    data=one_hot,
    builder=lambda metrics: classifier("categorical_crossentropy", metrics=metrics),
)
metric_cell(
    "binary",
    lambda: [
        keras.metrics.PrecisionAtRecall(0.6, name="par"),
        keras.metrics.AUC(name="auc", curve="PR"),
        keras.metrics.Precision(name="p"),
        keras.metrics.BinaryIoU(name="biou"),
    ],
    data=binary,
    builder=lambda metrics: small_model(lambda: SGD(0.1), metrics=metrics),
)
