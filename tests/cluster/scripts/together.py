"""Several workers on parameter servers at once; run by test_parameter_servers.py."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from counting import Counts  # noqa: E402
from counting import model_of_ids  # noqa: E402
from counting import seen  # noqa: E402
from report import report  # noqa: E402

# The graphs run a few times each; optimising them takes longer.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

ROWS = 509  # A prime: the last batch is a part of one whatever the batch size.


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


def build():
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.01)
        return model_of_ids(ROWS, optimizer, columns=16, metrics=[Counts(ROWS)])


IDS = np.arange(ROWS)[:, None]
TARGETS = IDS.astype("float32")


def whole(context):
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS))
    return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(16)


def endless():
    return tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).repeat().batch(16)


#: Keeps a core busy; ends with the process that it was started by.
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextlib.contextmanager
def load():
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            yield
        finally:
            busy.kill()


def measured():
    """Trains without moving, so that each metric has one right value, whatever the order."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    y = (x[:, :1] + random.normal(size=(ROWS, 1)) > 0).astype("float32")

    def build(scope):
        keras.utils.set_random_seed(5)
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
            auc = keras.metrics.AUC(name="auc")
            metrics = ["accuracy", auc, "mae"]
            model.compile(keras.optimizers.Adam(0.0), "binary_crossentropy", metrics=metrics)
        return model

    model = build(strategy.scope())
    history = model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0).history
    alone = build(contextlib.nullcontext())
    alone.set_weights(model.get_weights())
    return {
        "history": history,
        "alone": alone.evaluate(x, y, batch_size=ROWS, return_dict=True, verbose=0),
        "iterations": int(model.optimizer.iterations),
    }


def learned():
    """Trains as long here as on one device; returns both losses."""
    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    y = (x @ random.normal(size=(4, 1)) + 0.5 * random.normal(size=(ROWS, 1))).astype("float32")
    losses = []
    for scope in (strategy.scope(), contextlib.nullcontext()):
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adagrad(0.3), "mse")
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        losses.append(model.evaluate(x, y, verbose=0))
    return losses


results = {}

model = build()
history = model.fit(IDS, TARGETS, batch_size=16, epochs=4, verbose=0)
results["arrays"] = {"seen": seen(history), "iterations": int(model.optimizer.iterations)}
with load():
    results["measured"] = measured()
results["learned"] = learned()

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
