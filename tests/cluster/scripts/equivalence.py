"""Runs many small trainings ("cells") in one process and writes their numbers, one line a cell.

The same program runs on one device by Keras alone, on local replicas and on workers; the test
compares what they write: `worker-0.jsonl` and so on, in the folder `TFDIST_TEST_OUT`.
Usage: equivalence.py one|replicas|workers NAME [NAME ...], or `equivalence.py --list`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

import tensorflow as tf

WHERE, NAMES = sys.argv[1], sys.argv[2:]
TASK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "worker", "index": 0})
OUT = Path(os.environ.get("TFDIST_TEST_OUT", "."))

if WHERE in ("replicas", "workers"):
    import tfdist

    strategy = tfdist.strategy("mirrored", replicas=2) if WHERE == "replicas" else tfdist.strategy()
    WORKERS = tfdist.detect().num_workers
else:  # Keras alone: nothing of tfdist is imported.
    strategy, WORKERS = tf.distribute.get_strategy(), 1
REPLICAS = strategy.num_replicas_in_sync

import keras  # noqa: E402
import numpy as np  # noqa: E402

# The graphs run ten times each; optimising them takes longer.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

CELLS = {}


def cell(name, **expected):
    """Registers a cell; `expected` are absolute values that every world must give."""

    def add(function):
        CELLS[name] = (function, expected)
        return function

    return add


def fill(model):
    """Gives the model weights that depend on nothing but their shapes."""
    r = np.random.RandomState(7)
    values = []
    for variable in model.weights:
        shape = tuple(variable.shape)
        value = r.uniform(-0.7, 0.7, shape).astype("float32")
        if "moving_variance" in variable.path or "gamma" in variable.path:
            value = np.ones(shape, "float32")
        if "seed" in variable.path:
            value = np.asarray(variable.value.numpy())
        values.append(value)
    model.set_weights(values)


def read(variable):
    return np.asarray(variable.value.numpy()).astype("float64").tolist()


def short(variable):
    # Counters depend on what ran before, and scopes on who builds an optimizer.
    return re.sub(r"_\d+(?=[_/]|$)", "", "/".join(variable.path.split("/")[-2:]))


def state(model):
    """Every variable of model and optimizer, in order, under a name that all worlds share."""
    found = {}
    for i, v in enumerate(model.weights):
        if "seed" not in v.path:
            found[f"weights/{i}:{short(v)}"] = read(v)
    if model.optimizer is not None:
        for i, v in enumerate(model.optimizer.variables):
            found[f"slots/{i}:{short(v)}"] = read(v)
    return found


def outcome(model, history=None, **more):
    values = state(model)
    if history is not None:
        for key, value in history.history.items():
            values[f"history/{key}"] = np.asarray(value, "float64").tolist()
    for key, value in more.items():
        values[key] = np.asarray(value, "float64").tolist()
    return values


def fit(model, data, **kwargs):
    return model.fit(data, verbose=0, **kwargs)


# --- data ---------------------------------------------------------------------------------------

EVEN = [12] * 10
LAST1 = [12] * 9 + [1]
STARVED = [12, 1, 1, 2, 1, 12, 1, 2, 5, 1]
SHAPES = {"even": EVEN, "last1": LAST1, "starved": STARVED}


def regression(rows, seed=0, columns=4):
    r = np.random.RandomState(seed)
    x = r.randn(rows, columns).astype("float32")
    w = np.linspace(1.0, -2.0, columns)[:, None]
    y = (np.tanh(x @ w) + 0.3 * r.randn(rows, 1)).astype("float32")
    return x, y


def binary(rows, seed=0, columns=4):
    x, y = regression(rows, seed, columns)
    return x, (y > 0).astype("float32")


def classes(rows, seed=0, columns=4, count=3):
    x, y = regression(rows, seed, columns)
    return x, np.clip(np.floor((y[:, 0] + 1.0) / 2.0 * count), 0, count - 1).astype("int32")


def batches(sizes, *arrays):
    """A dataset of known length with batches of these sizes, of one element spec."""
    arrays = arrays if len(arrays) > 1 else arrays[0]
    data, begin = None, 0
    while sizes:
        size = sizes[0]
        count = next((i for i, s in enumerate(sizes) if s != size), len(sizes))
        rows = slice(begin, begin + size * count)
        part = tf.data.Dataset.from_tensor_slices(
            tf.nest.map_structure(lambda a, rows=rows: a[rows], arrays)
        ).batch(size)
        data = part if data is None else data.concatenate(part)
        begin, sizes = begin + size * count, sizes[count:]
    return data


# --- the matrix: optimizers x clipping x accumulation x data ------------------------------------

OPTIMIZERS = {
    "sgd": lambda **k: keras.optimizers.SGD(0.1, momentum=0.9, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.02, epsilon=1e-3, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(0.02, weight_decay=0.1, epsilon=1e-3, **k),
    "lamb": lambda **k: keras.optimizers.Lamb(0.02, epsilon=1e-3, **k),
    "adafactor": lambda **k: keras.optimizers.Adafactor(0.02, **k),
}
# In every cell some updates are clipped and others are not.
CLIPS = {
    "noclip": {},
    "clipvalue": {"clipvalue": 0.25},
    "clipnorm": {"clipnorm": 0.45},
    "global": {"global_clipnorm": 0.5},
}
ACCUMULATIONS = {"acc1": {}, "acc3": {"gradient_accumulation_steps": 3}}

_kept = {}  # One model for the three kinds of data: tracing is what takes the time.


def small_model(optimizer, loss="binary_crossentropy", metrics=("mae", "auc"), **compile_args):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="tanh", name="hidden"),
                keras.layers.Dense(
                    1, activation="sigmoid" if loss == "binary_crossentropy" else None, name="out"
                ),
            ]
        )
        fill(model)
        made = [keras.metrics.AUC(name="auc") if m == "auc" else m for m in metrics]
        model.compile(optimizer(), loss, metrics=made, **compile_args)
        model.optimizer.build(model.trainable_variables)
    return model


def matrix_cell(optimizer, clip, accumulation, data):
    key = (optimizer, clip, accumulation)
    if key not in _kept:
        _kept.clear()
        make = OPTIMIZERS[optimizer]
        metrics = ("mae", "auc") if optimizer == "sgd" else ("mae",)  # AUC is slow to trace.
        model = small_model(
            lambda: make(**CLIPS[clip], **ACCUMULATIONS[accumulation]), metrics=metrics
        )
        fresh = [np.asarray(v.value.numpy()) for v in (*model.weights, *model.optimizer.variables)]
        _kept[key] = model, fresh
    model, fresh = _kept[key]
    for variable, value in zip((*model.weights, *model.optimizer.variables), fresh, strict=True):
        variable.assign(value)
    try:
        sizes = SHAPES[data]
        return outcome(model, fit(model, batches(sizes, *binary(sum(sizes)))))
    except BaseException:
        _kept.clear()
        raise


def _register_matrix():
    for optimizer in OPTIMIZERS:
        for clip in CLIPS:
            for accumulation in ACCUMULATIONS:
                for data in SHAPES:
                    args = (optimizer, clip, accumulation, data)
                    CELLS["/".join(args)] = (lambda args=args: matrix_cell(*args), {})


_register_matrix()


# --- the cases of sync_numbers.json -------------------------------------------------------------


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
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, **case["optimizer"]), loss, **case.get("compile", {})
        )
    data = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(batch)
    history = fit(model, data)
    return outcome(
        model,
        history,
        numbers_weights=model.get_weights()[0][:, 0],
        numbers_loss=history.history["loss"][0],
    )


def _register_numbers():
    path = Path(__file__).parents[2] / "data" / "sync_numbers.json"
    with open(path, encoding="utf-8") as file:
        cases = json.load(file)["cases"]
    for case in cases:
        expected = {"numbers_weights": case["weights"], "numbers_loss": case["loss"]}
        CELLS[f"numbers/{case['name']}"] = (lambda case=case: numbers_case(case), expected)


_register_numbers()


# --- what sync_numbers.json says beside its cases -----------------------------------------------


@cell("more/batch_norm_synchronized", moving_mean=[8.0], moving_variance=[62.0])
def batch_norm_numbers():
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.BatchNormalization(momentum=0.0, synchronized=True),
            ]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.array([[0.0], [2.0], [10.0], [20.0]], "float32")
    fit(model, batches([4], x, x))
    layer = model.layers[0]
    return {"moving_mean": read(layer.moving_mean), "moving_variance": read(layer.moving_variance)}


@cell("more/batch_norm_unsynchronized", moving_mean=[8.0])
def batch_norm_unsynchronized():
    # Every replica normalises its own examples; the mean of equal parts' means is that of all.
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.array([[0.0], [2.0], [6.0], [8.0], [10.0], [22.0]], "float32")
    fit(model, batches([6], x, x))
    return {"moving_mean": read(model.layers[0].moving_mean)}


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
    model = small_model(lambda: keras.optimizers.SGD(0.1), metrics=[])
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(0.1),
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


@cell("more/masked_loss", loss=33.222221)
def masked_loss():
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Masked()])
        model.compile(keras.optimizers.SGD(0.001), "mse", metrics=["mae"])
    history = fit(model, batches([16], *masked_data()))
    return outcome(model, history, loss=history.history["loss"][0])


@cell("more/masked_loss_several_batches")
def masked_loss_batches():
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Masked()])
        model.compile(keras.optimizers.SGD(0.001), "mse", metrics=["mae"])
    # The batch of two, 9 and 10, is masked altogether.
    return outcome(model, fit(model, batches([6, 3, 2, 4, 1], *masked_data()), epochs=2))


@cell("more/masked_weighted_loss")
def masked_weighted_loss():
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Masked()])
        model.compile(keras.optimizers.SGD(0.001), "mse", weighted_metrics=["mae"])
    weights = np.linspace(0.1, 2.0, 16).astype("float32")
    return outcome(model, fit(model, batches([7, 6, 3], *masked_data(), weights), epochs=2))


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
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, kernel_initializer="identity"),
                keras.layers.Dropout(0.5),
            ]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[table])
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
            keras.optimizers.Adam(0.01, epsilon=1e-3), initial_scale=2.0**10, dynamic_growth_steps=2
        ),
        loss="mse",
        metrics=(),
    )
    values = outcome(model, fit(model, batches([12] * 6, x, y)))
    values["finite"] = [all(np.isfinite(v).all() for k, v in values.items() if "weights" in k)]
    return values


# --- optimizers --------------------------------------------------------------------------------


def train(model, rows=None, sizes=LAST1, make=regression, **kwargs):
    return outcome(model, fit(model, batches(sizes, *make(rows or sum(sizes))), **kwargs))


def optimizer_cell(name, make, sizes=LAST1, **kwargs):
    @cell(f"optimizer/{name}")
    def run():
        return train(small_model(make, loss="mse", metrics=("mae",)), sizes=sizes, **kwargs)


SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def multi(**k):
    return lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            SGD(0.1, momentum=0.9, **k), {".*hidden.*": Adam(0.02, epsilon=1e-3, **k)}
        )
    )


optimizer_cell("multi", multi(), STARVED)
optimizer_cell("multi_global_clip", multi(global_clipnorm=0.3))
optimizer_cell("multi_accumulation", multi(gradient_accumulation_steps=3))
optimizer_cell("ema", lambda: Adam(0.02, epsilon=1e-3, use_ema=True, ema_momentum=0.7))
optimizer_cell(
    "ema_overwrite",
    lambda: SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=4),
    STARVED,
)
optimizer_cell(
    "ema_accumulation",
    lambda: SGD(
        0.1,
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=4,
        gradient_accumulation_steps=2,
        clipnorm=0.4,
    ),
    LAST1,
)
optimizer_cell("loss_scale_factor", lambda: SGD(0.1, loss_scale_factor=64.0, clipnorm=0.4))
optimizer_cell(
    "loss_scale_clip_accumulation",
    lambda: keras.optimizers.LossScaleOptimizer(
        SGD(0.1, global_clipnorm=0.5, gradient_accumulation_steps=2), dynamic_growth_steps=3
    ),
)
optimizer_cell("weight_decay_sgd", lambda: SGD(0.1, weight_decay=0.1, clipvalue=0.1), STARVED)
optimizer_cell("nesterov", lambda: SGD(0.05, momentum=0.9, nesterov=True), STARVED)
optimizer_cell("rmsprop", lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3, centered=True))
optimizer_cell("adagrad", lambda: keras.optimizers.Adagrad(0.1))
optimizer_cell("adadelta", lambda: keras.optimizers.Adadelta(0.5))
optimizer_cell("ftrl", lambda: keras.optimizers.Ftrl(0.1, l2_regularization_strength=0.01))
optimizer_cell("nadam", lambda: keras.optimizers.Nadam(0.02, epsilon=1e-3))
optimizer_cell("amsgrad", lambda: Adam(0.02, epsilon=1e-3, amsgrad=True))
optimizer_cell("muon", lambda: keras.optimizers.Muon(0.02, epsilon=1e-3))
optimizer_cell("schedule_free", lambda: keras.optimizers.ScheduleFreeAdamW(0.02, epsilon=1e-3))
optimizer_cell(
    "schedule",
    lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5), momentum=0.9),
    epochs=2,
)
optimizer_cell(
    "accumulation_over_epochs", lambda: SGD(0.1, gradient_accumulation_steps=3), epochs=2
)


@cell("optimizer/accumulation_over_fits")
def accumulation_over_fits():
    model = small_model(
        lambda: Adam(0.02, epsilon=1e-3, gradient_accumulation_steps=3, clipnorm=0.3), loss="mse"
    )
    x, y = regression(20)
    fit(model, batches([12, 8], x, y))
    model.evaluate(batches([12, 8], x, y), verbose=0)
    return train(model, sizes=[12, 8])


def constrained(optimizer):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(
                    8,
                    activation="tanh",
                    kernel_constraint=keras.constraints.MaxNorm(0.8),
                    bias_constraint="non_neg",
                ),
                keras.layers.Dense(1, kernel_constraint="unit_norm"),
            ]
        )
        fill(model)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


@cell("optimizer/constraints")
def constraints():
    return train(constrained(SGD(0.1, momentum=0.9)), sizes=STARVED)


@cell("optimizer/constraints_accumulation")
def constraints_accumulation():
    return train(constrained(SGD(0.1, gradient_accumulation_steps=3)))


@cell("optimizer/frozen_layer")
def frozen_layer():
    model = small_model(lambda: SGD(0.1), loss="mse")
    model.layers[0].trainable = False
    with strategy.scope():
        model.compile(SGD(0.1, momentum=0.5, clipnorm=0.4), "mse")
    return train(model)


# --- numeric types ------------------------------------------------------------------------------


def typed_model(dtype, optimizer, width=4):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((width,)),
                keras.layers.Dense(8, activation="tanh", dtype=dtype),
                keras.layers.Dense(1, dtype=dtype),
            ]
        )
        fill(model)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


@cell("types/mixed_bfloat16")
def mixed_bfloat16():
    return train(typed_model("mixed_bfloat16", SGD(0.05, momentum=0.5)))


@cell("types/mixed_float16")
def mixed_float16():
    # compile() wraps the optimizer in a LossScaleOptimizer only for a model of that policy.
    optimizer = keras.optimizers.LossScaleOptimizer(
        SGD(0.05, momentum=0.5), initial_scale=2.0**8, dynamic_growth_steps=4
    )
    return train(typed_model("mixed_float16", optimizer))


@cell("types/mixed_float16_auto")
def mixed_float16_auto():
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh", dtype="mixed_float16")(inputs)
        outputs = keras.layers.Dense(1, dtype="mixed_float16")(hidden)
        model = keras.Model(inputs, outputs)
        model.dtype_policy = "mixed_float16"
        fill(model)
        model.compile(SGD(0.05), "mse", metrics=["mae"])
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return train(model)


@cell("types/mixed_float16_overflow_on_one_replica")
def mixed_float16_overflow():
    x, y = regression(72)
    x[23], x[36], x[60] = 3e3, 3e3, 3e3
    y[23], y[36], y[60] = 3e4, 3e4, 3e4
    optimizer = keras.optimizers.LossScaleOptimizer(
        SGD(0.05, momentum=0.5), initial_scale=2.0**9, dynamic_growth_steps=2
    )
    return train_arrays(typed_model("mixed_float16", optimizer), [12] * 6, x, y)


def train_arrays(model, sizes, *arrays, **kwargs):
    return outcome(model, fit(model, batches(sizes, *arrays), **kwargs))


@cell("types/float64")
def float64():
    return train(typed_model("float64", SGD(0.05, momentum=0.5, clipnorm=0.4)), sizes=STARVED)


# --- losses ------------------------------------------------------------------------------------


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


def loss_cells():
    def add(name, make, weighted):
        @cell(f"loss/{name}{'/weighted' if weighted else ''}")
        def run():
            model = small_model(lambda: SGD(0.02, momentum=0.5), loss=make(), metrics=("mae",))
            sizes = STARVED
            arrays = regression(sum(sizes))
            if weighted:
                arrays = (*arrays, np.linspace(0.1, 2, sum(sizes)).astype("float32"))
            return train_arrays(model, sizes, *arrays)

    for name, make in LOSSES.items():
        add(name, make, False)
    for name in ("sum", "mean", "mean_with_sample_weight", "loss_subclass", "None"):
        add(name, LOSSES[name], True)


loss_cells()


def classifier(loss="sparse_categorical_crossentropy", metrics=(), optimizer=None, **k):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        fill(model)
        model.compile(optimizer or SGD(0.1, momentum=0.5), loss, metrics=list(metrics), **k)
    return model


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


def two_outputs(**k):
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        outputs = {
            "a": keras.layers.Dense(1, name="a")(hidden),
            "b": keras.layers.Dense(2, name="b")(hidden),
        }
        model = keras.Model(inputs, outputs)
        fill(model)
        model.compile(
            SGD(0.05),
            loss={"a": "mse", "b": "mae"},
            loss_weights={"a": 0.3, "b": 2.0},
            metrics={"a": ["mae"], "b": ["mse"]},
            **k,
        )
    return model


@cell("loss/two_outputs")
def several_outputs():
    x, y = regression(sum(STARVED))
    targets = {"a": y, "b": np.concatenate([2 * y, -y], 1)}
    model = two_outputs()
    first = {name: values[:25] for name, values in targets.items()}
    return train_arrays(
        model, STARVED, x, targets, validation_data=batches([12, 12, 1], x[:25], first)
    )


@cell("loss/two_outputs/weighted")
def several_outputs_weighted():
    x, y = regression(sum(LAST1))
    targets = {"a": y, "b": np.concatenate([2 * y, -y], 1)}
    weights = {"a": np.linspace(0.1, 2, len(x)), "b": np.linspace(3, 0.1, len(x))}
    return train_arrays(two_outputs(), LAST1, x, targets, weights)


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


@cell("loss/add_loss")
def add_loss():
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="tanh"),
                Penalty(),
                keras.layers.Dense(1),
            ]
        )
        fill(model)
        model.compile(SGD(0.1, momentum=0.5), "mse")
    return train(model, sizes=STARVED)


@cell("loss/regularizers")
def regularizers():
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(
                    8,
                    activation="tanh",
                    kernel_regularizer="l2",
                    bias_regularizer=keras.regularizers.L1(0.02),
                ),
                keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.05)),
            ]
        )
        fill(model)
        model.compile(SGD(0.1, momentum=0.5, clipnorm=0.5), "mse")
    return train(model, sizes=STARVED)


@cell("loss/regularizer_with_sum")
def regularizer_with_sum():
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1)),
            ]
        )
        fill(model)
        model.compile(SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
    return train(model, sizes=STARVED)


@cell("loss/regularizer_with_weights")
def regularizer_with_weights():
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1)),
            ]
        )
        fill(model)
        model.compile(SGD(0.05), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    x, y = regression(sum(STARVED))
    return train_arrays(model, STARVED, x, y, np.linspace(0.1, 2, len(x)).astype("float32"))


def sequences(rows):
    r = np.random.RandomState(1)
    ids = r.randint(1, 9, (rows, 6))
    lengths = r.randint(1, 7, rows)
    ids[np.arange(6)[None] >= lengths[:, None]] = 0
    return ids.astype("int32"), (ids % 3).astype("int32")


@cell("loss/masked_sequences")
def masked_sequences():
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.LSTM(5, return_sequences=True),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        fill(model)
        model.compile(SGD(0.3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = sequences(41)
    return train_arrays(model, [12, 1, 12, 2, 12, 2], x, y)


@cell("loss/masked_sequences_accumulation")
def masked_sequences_accumulation():
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        fill(model)
        model.compile(
            SGD(0.3, gradient_accumulation_steps=2, clipnorm=0.05),
            "sparse_categorical_crossentropy",
        )
    x, y = sequences(40)
    return train_arrays(model, [12, 12, 12, 1, 3], x, y)


# --- training steps of the user's own ------------------------------------------------------------


def own_step(step, compile_args=None):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.out = keras.layers.Dense(1)
            self.gap = keras.metrics.MeanAbsoluteError(name="gap")

        def call(self, x):
            return self.out(self.hidden(x))

        def train_step(self, data):
            return step(self, data)

    with strategy.scope():
        model = Own()
        model(tf.zeros((1, 4)))
        fill(model)
        model.compile(SGD(0.05, momentum=0.5), **(compile_args or {"loss": "mse"}))
    return model


def update(model, tape, loss):
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def step_reduce_mean(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = tf.reduce_mean(tf.square(predicted - y))
    update(model, tape, loss)
    model.gap.update_state(y, predicted)
    return {"loss": loss, "gap": model.gap.result()}


def step_reduce_mean_apply(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


def step_compute_loss(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted)
    update(model, tape, loss)
    return {"loss": loss}


def step_average_loss(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        each = tf.reduce_sum(tf.square(model(x, training=True) - y), -1)
        loss = tf.nn.compute_average_loss(each, global_batch_size=12)
    update(model, tape, loss)
    model.gap.update_state(y, model(x))
    return {"gap": model.gap.result()}


def step_sum(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / 12.0
    update(model, tape, loss)
    model.gap.update_state(y, model(x))
    return {"gap": model.gap.result()}


def step_keras_loss_sum(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        each = keras.losses.MeanSquaredError(reduction="none")(y, model(x, training=True))
        loss = tf.reduce_sum(each) / 12.0
    update(model, tape, loss)
    model.gap.update_state(y, model(x))
    return {"gap": model.gap.result()}


def step_keras_loss(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = keras.losses.MeanSquaredError()(y, predicted)
    update(model, tape, loss)
    model.gap.update_state(y, predicted)
    return {"gap": model.gap.result()}


def step_two_terms(model, data):
    # A mean of the user's own on top of the compiled loss.
    x, y = data
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted)
        loss += 0.1 * tf.reduce_mean(tf.abs(predicted))
    update(model, tape, loss)
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


def step_cells():
    def add(name, step, kind, sizes):
        @cell(f"step/{name}/{kind}")
        def run():
            return train(own_step(step), sizes=sizes)

    for name, step in STEPS.items():
        add(name, step, "even", EVEN)
        add(name, step, "uneven", STARVED)


step_cells()


@cell("step/custom_compute_loss")
def custom_compute_loss():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(tf.square(y - y_pred))

    with strategy.scope():
        model = Own()
        model(tf.zeros((1, 4)))
        fill(model)
        model.compile(SGD(0.05), loss="mse")
    return train(model, sizes=STARVED)


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


# --- sparse gradients, ragged and sparse inputs --------------------------------------------------


def embedding_model(optimizer):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(7, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        fill(model)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def id_data(rows):
    r = np.random.RandomState(2)
    ids = r.randint(0, 5, (rows, 3)).astype("int32")  # rows 5 and 6 of the table are never used
    ids[:, 2] = ids[:, 0]
    return ids, np.tanh(ids.sum(1, keepdims=True) / 3.0 - 2.0).astype("float32")


SPARSE = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "adam": lambda: Adam(0.02, epsilon=1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "sgd_clipnorm": lambda: SGD(0.1, clipnorm=0.1),
    "adam_global_clip": lambda: Adam(0.02, epsilon=1e-3, global_clipnorm=0.2),
    "sgd_clipvalue": lambda: SGD(0.1, clipvalue=0.05),
    "sgd_accumulation": lambda: SGD(0.1, gradient_accumulation_steps=3),
    "adam_accumulation_clip": lambda: Adam(
        0.02, epsilon=1e-3, gradient_accumulation_steps=3, clipnorm=0.1
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), dynamic_growth_steps=3),
}


def sparse_cells():
    def add(name, make):
        @cell(f"sparse/embedding/{name}")
        def run():
            return train(embedding_model(make()), make=id_data, sizes=STARVED)

    for name, make in SPARSE.items():
        add(name, make)


sparse_cells()


class MeanOfWords(keras.Model):
    """Takes ragged ids."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(9, 4)
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        words = tf.ragged.map_flat_values(self.table, ids)
        return self.out(tf.reduce_sum(words, 1) / 4.0)


def ragged_rows(rows):
    r = np.random.RandomState(4)
    return [r.randint(0, 9, r.randint(1, 6)).tolist() for _ in range(rows)]


@cell("inputs/ragged")
def ragged():
    rows = ragged_rows(41)
    y = np.array([[np.tanh(np.mean(r) - 4.0)] for r in rows], "float32")
    with strategy.scope():
        model = MeanOfWords()
        model.compile(SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
        model(tf.ragged.constant(rows[:2], dtype="int32"))
        fill(model)
    return train_arrays(
        model, [12, 12, 12, 4, 1], tf.ragged.constant(rows, dtype="int32"), y, epochs=2
    )


@cell("inputs/ragged_unbuilt")
def ragged_unbuilt():
    rows = ragged_rows(36)
    y = np.array([[np.tanh(np.mean(r) - 4.0)] for r in rows], "float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = MeanOfWords()
        model.table.embeddings_initializer = keras.initializers.Constant(0.3)
        model.out.kernel_initializer = keras.initializers.Constant(0.5)
        model.compile(SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices((tf.ragged.constant(rows, dtype="int32"), y))
    return outcome(model, fit(model, data.batch(12)))


class SparseDense(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(6, 4), name="kernel")

    def call(self, x):
        return tf.sparse.sparse_dense_matmul(x, self.kernel)


def sparse_input_data(rows):
    r = np.random.RandomState(5)
    x = r.randn(rows, 6).astype("float32") * (r.rand(rows, 6) < 0.4)
    return tf.sparse.from_dense(x.astype("float32")), np.tanh(x.sum(1, keepdims=True))


def sparse_model(layer):
    with strategy.scope():
        inputs = keras.Input((6,), sparse=True)
        hidden = layer()(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        fill(model)
        model.compile(SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    return model


def sparse_batches(rows, size):
    x, y = sparse_input_data(rows)
    return tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))).batch(size)


@cell("inputs/sparse_dense")
def sparse_dense():
    model = sparse_model(lambda: keras.layers.Dense(4))
    return outcome(model, fit(model, sparse_batches(37, 12), epochs=2))


@cell("inputs/sparse_custom")
def sparse_custom():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = SparseDense(), keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.first(x))

    with strategy.scope():
        model = Own()
        model.compile(SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
        model.first.build((None, 6))
        model.last.build((None, 4))
        model.built = True
        fill(model)
    return outcome(model, fit(model, sparse_batches(37, 12), epochs=2))


# --- how it is run -------------------------------------------------------------------------------


@cell("run/eagerly")
def eagerly():
    model = small_model(lambda: SGD(0.1, momentum=0.5), run_eagerly=True)
    return train(model, make=binary, sizes=[12, 12, 1])


@cell("run/eagerly_accumulation_clip")
def eagerly_accumulation():
    model = small_model(
        lambda: SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=0.2), run_eagerly=True
    )
    return train(model, make=binary, sizes=[12, 12, 1])


@cell("run/jit_compile")
def jit_compile():
    model = small_model(lambda: SGD(0.1, momentum=0.5), jit_compile=True, loss="mse")
    return train(model, sizes=LAST1)


@cell("run/jit_compile_clip_accumulation")
def jit_compile_clip():
    model = small_model(
        lambda: Adam(0.02, epsilon=1e-3, clipnorm=0.3, gradient_accumulation_steps=3),
        jit_compile=True,
        loss="mse",
        metrics=("mae",),
    )
    return train(model, sizes=EVEN)


@cell("run/steps_per_execution")
def steps_per_execution():
    model = small_model(lambda: SGD(0.1, momentum=0.5), steps_per_execution=3)
    return train(model, make=binary, sizes=LAST1, epochs=2)


@cell("run/steps_per_execution_accumulation")
def steps_per_execution_accumulation():
    model = small_model(
        lambda: SGD(0.1, gradient_accumulation_steps=4, clipnorm=0.15), steps_per_execution=3
    )
    return train(model, make=binary, sizes=LAST1, epochs=2)


@cell("run/train_on_batch")
def train_on_batch():
    # Each worker passes the batch, and every replica sees it whole.
    model = small_model(lambda: SGD(0.1, momentum=0.5, clipnorm=0.15))
    x, y = binary(24)
    logs = [
        model.train_on_batch(x[i : i + 12], y[i : i + 12], return_dict=True) for i in (0, 12, 0)
    ]
    tested = model.test_on_batch(x[:12], y[:12], return_dict=True)
    return outcome(
        model,
        losses=[float(each["loss"]) for each in logs],
        mae=[float(each["mae"]) for each in logs],
        tested=float(tested["loss"]),
    )


@cell("run/train_on_batch_accumulation")
def train_on_batch_accumulation():
    model = small_model(lambda: SGD(0.1, gradient_accumulation_steps=2), loss="mse", metrics=())
    x, y = regression(24)
    for i in (0, 12, 0):
        model.train_on_batch(x[i : i + 12], y[i : i + 12])
    return outcome(model)


@cell("run/evaluate_uneven")
def evaluate_uneven():
    model = small_model(lambda: SGD(0.1))
    x, y = binary(sum(STARVED))
    values = model.evaluate(batches(STARVED, x, y), verbose=0, return_dict=True)
    return {f"history/{k}": float(v) for k, v in values.items()}


@cell("run/fixed_batches")
def fixed_batches():
    # Shapes are known: nothing is asked between workers.
    x, y = binary(120)
    model = small_model(lambda: Adam(0.02, epsilon=1e-3, global_clipnorm=0.2))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12, drop_remainder=True)
    return outcome(model, fit(model, data))


@cell("run/fixed_batches_accumulation")
def fixed_batches_accumulation():
    x, y = binary(120)
    model = small_model(lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=3))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12, drop_remainder=True)
    return outcome(model, fit(model, data))


def shard_lines(lengths):
    return [
        [f"{w},{i},{((i * 7 + w * 3) % 11) / 11.0:.4f}" for i in range(length)]
        for w, length in enumerate(lengths)
    ]


def parse(line):
    parts = tf.strings.to_number(tf.strings.split(line, ",", maxsplit=2))
    parts = tf.ensure_shape(parts, (3,))
    x = tf.stack([parts[0] / 2.0, tf.sin(parts[1]), tf.cos(parts[1] * 0.7), parts[2]])
    return x, parts[2:] * 2.0 - 1.0


def file_shards(count, lengths, optimizer):
    """One file for each worker, of different lengths: some have no data for many steps."""
    rows = shard_lines(lengths)
    size = 12 // count
    if count != WORKERS:
        merged, sizes, step = [], [], 0
        while any(each[step * size :] for each in rows):
            part = [line for each in rows for line in each[step * size : (step + 1) * size]]
            merged, sizes, step = merged + part, [*sizes, len(part)], step + 1
        parsed = [parse(tf.constant(line)) for line in merged]
        x = np.stack([np.asarray(a) for a, _ in parsed])
        y = np.stack([np.asarray(b) for _, b in parsed])
        data = batches(sizes, x, y)
    else:
        folder = OUT / f"shards-{count}-{TASK['index']}"
        folder.mkdir(exist_ok=True)
        for w, lines in enumerate(rows):
            (folder / f"{w}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE
        )
        data = tf.data.Dataset.list_files(str(folder / "*.txt"), shuffle=False)
        data = data.interleave(tf.data.TextLineDataset, cycle_length=1).map(parse)
        data = data.batch(12).with_options(options)
    model = small_model(optimizer, loss="mse", metrics=("mae",))
    return outcome(model, fit(model, data))


@cell("shards/two_workers")
def shards_two():
    return file_shards(2, (60, 18), lambda: SGD(0.1, momentum=0.5))


@cell("shards/three_workers")
def shards_three():
    return file_shards(3, (13, 40, 21), lambda: SGD(0.1, momentum=0.5))


@cell("shards/two_workers_accumulation_clip")
def shards_two_accumulation():
    return file_shards(
        2, (60, 18), lambda: Adam(0.02, epsilon=1e-3, gradient_accumulation_steps=3, clipnorm=0.3)
    )


# --- metrics -------------------------------------------------------------------------------------


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


def metric_cell(name, make, data=regression, builder=None, validated=True):
    @cell(f"metric/{name}")
    def run():
        with strategy.scope():
            metrics = make()
        if builder:
            model = builder(metrics)
        else:
            model = small_model(lambda: SGD(0.1), loss="mse", metrics=metrics)
        x, y = data(sum(STARVED))
        validation = batches([12, 12, 1], x[:25], y[:25]) if validated else None
        return train_arrays(model, STARVED, x, y, epochs=2, validation_data=validation)


def one_hot(rows):
    x, y = classes(rows)
    return x, np.eye(3, dtype="float32")[y]


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


# --- batch normalisation -------------------------------------------------------------------------


def normalized(synchronized=True, optimizer=None, **kwargs):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(6, use_bias=False),  # A bias here has no gradient but rounding.
                keras.layers.BatchNormalization(momentum=0.8, synchronized=synchronized, **kwargs),
                keras.layers.Activation("tanh"),
                keras.layers.Dense(1),
            ]
        )
        fill(model)
        model.compile(optimizer or SGD(0.05, momentum=0.5), "mse", metrics=["mae"])
    return model


@cell("batch_norm/synchronized_even")
def normalized_even():
    return train(normalized(), sizes=[12] * 6, epochs=2)


@cell("batch_norm/synchronized_uneven")
def normalized_uneven():
    return train(normalized(), sizes=[12, 11, 7, 5, 12, 4])


@cell("batch_norm/synchronized_few_rows")
def normalized_few():
    return train(normalized(epsilon=0.01), sizes=[12, 3, 12, 2, 5])


@cell("batch_norm/synchronized_clip_accumulation")
def normalized_accumulation():
    return train(
        normalized(optimizer=SGD(0.05, clipnorm=0.2, gradient_accumulation_steps=2)),
        sizes=[12, 11, 7, 5, 12],
    )


@cell("batch_norm/unsynchronized_finite", finite=1)
def normalized_apart():
    model = normalized(synchronized=False)
    values = train(model, sizes=STARVED)
    return {"finite": int(all(np.isfinite(v).all() for v in values.values()))}


# --- run -----------------------------------------------------------------------------------------


def main():
    with open(OUT / f"worker-{TASK['index']}.jsonl", "a", encoding="utf-8") as file:

        def write(**line):
            file.write(json.dumps(line) + "\n")
            file.flush()

        for name in NAMES:
            print("cell", name, flush=True)
            function, expected = CELLS[name]
            write(begin=name)
            began = time.monotonic()
            try:
                line = {"values": function(), "expected": expected}
            except Exception as error:  # noqa: BLE001  one cell must not stop the others
                trace = "".join(traceback.format_exception(error))[-6000:]
                line = {"error": f"{type(error).__name__}: {error}"[:1500], "trace": trace}
            write(end=name, seconds=round(time.monotonic() - began, 2), replicas=REPLICAS, **line)


if WHERE == "--list":
    print("\n".join(CELLS))
else:
    main()
