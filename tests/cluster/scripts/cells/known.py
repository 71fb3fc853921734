"""Numbers known beforehand: the cases of sync_numbers.json, and what it says beside them."""

from __future__ import annotations

import json
from pathlib import Path

from cells.data import batches
from cells.data import binary
from cells.data import regression
from cells.models import SGD
from cells.models import Adam
from cells.models import compiled
from cells.models import small_model
from cells.registry import cell
from cells.registry import fit
from cells.registry import outcome
from cells.registry import read
from cells.registry import train_arrays
from cells.world import keras
from cells.world import np
from cells.world import strategy
from cells.world import tf

CASES = Path(__file__).parents[3] / "data" / "sync_numbers.json"


def square_mean(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred))


def numbers_case(case):
    n, batch = case["n"], case["batch"]
    r = np.random.RandomState(0)
    x = r.randn(n, 3).astype("float32")
    w = np.array([[1.0], [-2.0], [3.0]], "float32")
    arrays = [x, (x @ w + 0.1 * r.randn(n, 1)).astype("float32")]
    loss = "mse"
    if "mean_with_sample_weight" in case.get("loss_fn", ""):
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        arrays.append(np.linspace(0.1, 2, 16).astype("float32"))
    elif "lambda" in case.get("loss_fn", ""):
        loss = square_mean
    model = compiled(
        lambda: [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")],
        lambda: SGD(0.1, **case["optimizer"]),
        loss,
        inputs=(3,),
        filled=False,
        **case.get("compile", {}),
    )
    data = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(batch)
    history = fit(model, data)
    return outcome(
        model,
        history,
        numbers_weights=model.get_weights()[0][:, 0],
        numbers_loss=history.history["loss"][0],
    )


for case in json.loads(CASES.read_text(encoding="utf-8"))["cases"]:
    cell(f"numbers/{case['name']}", numbers_weights=case["weights"], numbers_loss=case["loss"])(
        lambda case=case: numbers_case(case)
    )


def moving_averages(x, **kwargs):
    """Trains on one batch; returns what a batch normalisation without memory has seen of it."""
    model = compiled(
        lambda: [keras.layers.BatchNormalization(momentum=0.0, **kwargs)],
        lambda: SGD(0.0),
        inputs=(1,),
        filled=False,
    )
    x = np.array(x, "float32")[:, None]
    fit(model, batches([len(x)], x, x))
    layer = model.layers[0]
    return {"moving_mean": read(layer.moving_mean), "moving_variance": read(layer.moving_variance)}


@cell("more/batch_norm_synchronized", moving_mean=[8.0], moving_variance=[62.0])
def batch_norm_numbers():
    return moving_averages([0.0, 2.0, 10.0, 20.0], synchronized=True)


@cell("more/batch_norm_unsynchronized", moving_mean=[8.0])
def batch_norm_unsynchronized():
    # Every replica normalises its own examples; the mean of equal parts' means is that of all.
    values = moving_averages([0.0, 2.0, 6.0, 8.0, 10.0, 22.0])
    return {"moving_mean": values["moving_mean"]}


class Count(keras.metrics.Metric):
    """Number of examples. Its result is the variable itself, as in the guides of Keras."""

    def __init__(self, name="count"):
        super().__init__(name=name)
        self.total = self.add_variable((), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(self.total + tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return self.total


class BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({k: float(v) for k, v in logs.items()})


@cell("more/batch_logs_count_37", count=[8.0, 16.0, 24.0, 32.0, 37.0])
def batch_logs():
    x, y = binary(37)
    model = small_model(lambda: SGD(0.1), metrics=[])
    with strategy.scope():
        model.compile(
            SGD(0.1),
            "binary_crossentropy",
            metrics=[Count(), "mae", keras.metrics.AUC(name="auc")],
        )
    seen = BatchLogs()
    history = fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(8), callbacks=[seen])
    return outcome(
        model,
        history,
        count=[each["count"] for each in seen.logs],
        logged_loss=[each["loss"] for each in seen.logs],
        logged_mae=[each["mae"] for each in seen.logs],
        logged_auc=[each["auc"] for each in seen.logs],
    )


class Masked(keras.layers.Layer):
    """Scales the first column; examples with 0 in the second are masked."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def build(self, shape):
        self.factor = self.add_weight(shape=(1,), initializer="ones", name="factor")

    def call(self, x):
        return x[:, :1] * self.factor

    def compute_mask(self, x, previous=None):
        return keras.ops.not_equal(x[:, 1], 0.0)


def masked_data():
    mask = np.array([1] * 7 + [0] + [1, 0, 0, 0, 1, 0, 0, 0], "float32")
    x = np.stack([np.arange(16, dtype="float32"), mask], 1)
    return x, np.zeros((16, 1), "float32")


def masked_model(**compile_args):
    return compiled(
        lambda: [Masked()], lambda: SGD(0.001), inputs=(2,), filled=False, **compile_args
    )


@cell("more/masked_loss", loss=33.222221)
def masked_loss():
    model = masked_model(metrics=["mae"])
    history = fit(model, batches([16], *masked_data()))
    return outcome(model, history, loss=history.history["loss"][0])


@cell("more/masked_loss_several_batches")
def masked_loss_batches():
    # The batch of two, 9 and 10, is masked altogether.
    return train_arrays(masked_model(metrics=["mae"]), [6, 3, 2, 4, 1], *masked_data(), epochs=2)


@cell("more/masked_weighted_loss")
def masked_weighted_loss():
    model = masked_model(weighted_metrics=["mae"])
    weights = np.linspace(0.1, 2.0, 16).astype("float32")
    return train_arrays(model, [7, 6, 3], *masked_data(), weights, epochs=2)


class Table(keras.metrics.Metric):
    """Keeps every example's outputs, by the id in its target."""

    def __init__(self, rows, columns):
        super().__init__(name="table")
        self.rows = rows
        self.table = self.add_variable((rows, columns), initializer="zeros", name="table")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(y_true[:, :1], tf.int32)
        old = self.table.value
        self.table.assign(old + tf.tensor_scatter_nd_add(tf.zeros_like(old), ids, y_pred))

    def result(self):
        return {"sum": tf.reduce_sum(self.table)}


def dropout_masks(seed):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        table = Table(12, 64)
    model = compiled(
        lambda: [
            keras.layers.Dense(64, kernel_initializer="identity"),
            keras.layers.Dropout(0.5),
        ],
        lambda: SGD(0.0),
        metrics=[table],
        inputs=(64,),
        filled=False,
    )
    ids = np.arange(12, dtype="float32")[:, None] * np.ones((1, 64), "float32")
    fit(model, batches([12], np.ones((12, 64), "float32"), ids))
    return np.asarray(table.table.value.numpy()) > 0.0


@cell("more/dropout_masks", duplicates=0, repeated=1, dropped_about_half=1)
def dropout():
    first, again = dropout_masks(3), dropout_masks(3)
    tf.random.set_seed(None)
    return {
        "duplicates": 12 - len(np.unique(first, axis=0)),
        "repeated": int((first == again).all()),
        "dropped_about_half": int(0.4 < first.mean() < 0.6),
    }


@cell("more/loss_scale_overflow_on_one_replica")
def loss_scale_float32():
    x, y = regression(72)
    y[23] = 1e37  # The last example of a batch, then the first of one.
    y[48] = -1e37
    model = small_model(
        lambda: keras.optimizers.LossScaleOptimizer(
            Adam(0.01, epsilon=1e-3), initial_scale=2.0**10, dynamic_growth_steps=2
        ),
        loss="mse",
        metrics=(),
    )
    values = outcome(model, fit(model, batches([12] * 6, x, y)))
    values["finite"] = [all(np.isfinite(v).all() for k, v in values.items() if "weights" in k)]
    return values
