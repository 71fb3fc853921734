"""Several workers on parameter servers at once; run by test_parameter_servers.py."""

from __future__ import annotations

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

ROWS = 509  # A prime: the last batch is a part of one whatever the batch size.


class Counts(keras.metrics.Metric):
    """How often each example was seen."""

    def __init__(self):
        super().__init__(name="counts")
        self.seen = self.add_variable((ROWS,), "zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.seen.assign_add(tf.reduce_sum(tf.one_hot(ids, ROWS), axis=0))

    def result(self):
        return keras.ops.copy(self.seen)


class Told(keras.callbacks.Callback):
    def __init__(self, stop_at=None):
        super().__init__()
        self.ends, self.begins, self.stop_at = [], [], stop_at

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(batch)
        if batch == self.stop_at:
            self.model.stop_training = True


def build(rows=16):
    with strategy.scope():
        ids = keras.Input((1,), dtype="int32")
        table = keras.layers.Embedding(ROWS, rows, embeddings_initializer="zeros")
        hidden = keras.layers.Flatten()(table(ids))
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[Counts()])
    return model


IDS = np.arange(ROWS)[:, None]
TARGETS = IDS.astype("float32")


def seen(history, key="counts"):
    """Returns the smallest and largest number of times that an example was seen, by epoch."""
    return [[float(np.min(c)), float(np.max(c))] for c in history.history[key]]


def whole(context):
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(16)


def endless():
    return tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).repeat().batch(16)


results = {}

model = build()
history = model.fit(IDS, TARGETS, batch_size=16, epochs=4, verbose=0)
results["arrays"] = {"seen": seen(history), "iterations": int(model.optimizer.iterations)}

data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).shuffle(ROWS).batch(7)
data = data.filter(lambda ids, targets: True)
model = build()
history = model.fit(data, epochs=2, validation_data=data, verbose=0)
results["unknown length"] = {
    "seen": seen(history) + seen(history, "val_counts"),
    "iterations": int(model.optimizer.iterations),
}

model = build()
history = model.fit(whole, epochs=2, validation_data=whole, verbose=0)
results["dataset function"] = {
    "seen": seen(history) + seen(history, "val_counts"),
    "iterations": int(model.optimizer.iterations),
}

model = build()
history = model.fit(endless, epochs=2, steps_per_epoch=21, verbose=0)
results["endless function"] = {"iterations": int(model.optimizer.iterations)}

with strategy.scope():
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
model = build()
model.fit(coordinator.create_per_worker_dataset(endless), steps_per_epoch=10, verbose=0)
results["per worker dataset"] = {"iterations": int(model.optimizer.iterations)}

model, told = build(), Told()
model.fit(IDS, TARGETS, batch_size=16, epochs=1, verbose=0, callbacks=[told])
results["told"] = {"begins": told.begins, "ends": told.ends}

model, told = build(), Told(stop_at=9)
history = model.fit(IDS, TARGETS, batch_size=1, epochs=5, verbose=0, callbacks=[told])
results["stopped"] = {
    "epochs": len(history.history["loss"]),
    "ends": told.ends,
    "iterations": int(model.optimizer.iterations),
    "examples": float(np.sum(history.history["counts"][0])),
}

model = build()
predicted = model.predict(IDS, batch_size=10, verbose=0)
model.set_weights([np.arange(ROWS * 16).reshape(ROWS, 16) / ROWS, *model.get_weights()[1:]])
ordered = model.predict(IDS, batch_size=10, verbose=0)
alone = np.asarray(model.get_weights()[0]) @ model.get_weights()[1] + model.get_weights()[2]
results["predicted"] = {"shape": list(ordered.shape), "off": float(np.abs(ordered - alone).max())}

try:
    broken = tf.data.Dataset.from_tensor_slices((IDS + 1, TARGETS)).batch(16)
    build().fit(broken, verbose=0)
except Exception as error:
    results["error"] = [type(error).__name__, str(error)]
model = build()
model.fit(IDS, TARGETS, batch_size=16, verbose=0)
results["after an error"] = {"iterations": int(model.optimizer.iterations)}

report(**results)
