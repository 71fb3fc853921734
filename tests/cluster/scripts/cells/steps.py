"""Training steps and losses of the user's own model."""

from __future__ import annotations

from cells.data import EVEN
from cells.data import LAST1
from cells.data import STARVED
from cells.models import SGD
from cells.models import ready
from cells.registry import cell
from cells.registry import train
from cells.world import keras
from cells.world import tf


class Stepping(keras.Model):
    """Trains by `step(model, data)`."""

    def __init__(self, step):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.gap = keras.metrics.MeanAbsoluteError(name="gap")
        self.step = step

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        return self.step(self, data)


class OwnLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred))


def built(model):
    model(tf.zeros((1, 4)))
    return model


def own_step(step):
    return ready(lambda: built(Stepping(step)), lambda: SGD(0.05, momentum=0.5))


def descend(model, data, loss_of):
    """Updates the model by the gradients of `loss_of(y, predicted)`."""
    x, y = data
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = loss_of(y, predicted)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss, predicted


def gap(model, y, predicted):
    model.gap.update_state(y, predicted)
    return {"gap": model.gap.result()}


def gap_after(model, data):
    """The gap with the weights that the step has made."""
    x, y = data
    return gap(model, y, model(x))


def mean_square(y, predicted):
    return tf.reduce_mean(tf.square(predicted - y))


def step_reduce_mean(model, data):
    loss, predicted = descend(model, data, mean_square)
    return {"loss": loss, **gap(model, data[1], predicted)}


def step_reduce_mean_apply(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = mean_square(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


def step_compute_loss(model, data):
    def loss_of(y, predicted):
        return model.compute_loss(x=data[0], y=y, y_pred=predicted)

    loss, _ = descend(model, data, loss_of)
    return {"loss": loss}


def step_average_loss(model, data):
    def loss_of(y, predicted):
        each = tf.reduce_sum(tf.square(predicted - y), -1)
        return tf.nn.compute_average_loss(each, global_batch_size=12)

    descend(model, data, loss_of)
    return gap_after(model, data)


def step_sum(model, data):
    descend(model, data, lambda y, predicted: tf.reduce_sum(tf.square(predicted - y)) / 12.0)
    return gap_after(model, data)


def step_keras_loss_sum(model, data):
    def loss_of(y, predicted):
        each = keras.losses.MeanSquaredError(reduction="none")(y, predicted)
        return tf.reduce_sum(each) / 12.0

    descend(model, data, loss_of)
    return gap_after(model, data)


def step_keras_loss(model, data):
    _, predicted = descend(model, data, lambda y, p: keras.losses.MeanSquaredError()(y, p))
    return gap(model, data[1], predicted)


def step_two_terms(model, data):
    # A mean of the user's own on top of the compiled loss.
    def loss_of(y, predicted):
        loss = model.compute_loss(x=data[0], y=y, y_pred=predicted)
        return loss + 0.1 * tf.reduce_mean(tf.abs(predicted))

    descend(model, data, loss_of)
    return {"gap": model.gap.result()}


STEPS = {
    "reduce_mean": step_reduce_mean,
    "reduce_mean_apply": step_reduce_mean_apply,
    "compute_loss": step_compute_loss,
    "average_loss": step_average_loss,
    "sum": step_sum,
    "keras_loss_sum": step_keras_loss_sum,
    "keras_loss": step_keras_loss,
    "two_terms": step_two_terms,
}


def step_cell(name, step, kind, sizes):
    @cell(f"step/{name}/{kind}")
    def run():
        return train(own_step(step), sizes=sizes)


for name, step in STEPS.items():
    step_cell(name, step, "even", EVEN)
    step_cell(name, step, "uneven", STARVED)


@cell("step/custom_compute_loss")
def custom_compute_loss():
    return train(ready(lambda: built(OwnLoss()), lambda: SGD(0.05)), sizes=STARVED)


@cell("step/gradient_modified")
def gradient_modified():
    # Clipping by hand, in the step: it acts on what the step sees.
    def step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply([2.0 * g for g in gradients], model.trainable_variables)
        return {"loss": loss}

    return train(own_step(step), sizes=LAST1)
