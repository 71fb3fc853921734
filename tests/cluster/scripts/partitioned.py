"""Plain Keras under a strategy of the user's own that cuts variables; see test_tables.py.

As in TensorFlow's tutorial, every task starts its own server.
"""

from __future__ import annotations

import sys

import tensorflow as tf
from report import report

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        start=True,
    ).join()

import keras  # noqa: E402
import numpy as np  # noqa: E402

partitioners = tf.distribute.experimental.partitioners
PARTITIONERS = {
    "min size": partitioners.MinSizePartitioner(min_shard_bytes=256, max_shards=3),
    "fixed shards": partitioners.FixedShardsPartitioner(2),
}
strategy = tf.distribute.ParameterServerStrategy(
    resolver, variable_partitioner=PARTITIONERS["min size"]
)
import tfdist  # noqa: E402

ROWS = 211
random = np.random.default_rng(0)
IDS = random.integers(0, ROWS, size=(96, 2))
TARGETS = random.normal(size=(96, 1)).astype("float32")


def model_of(ours):
    ids = keras.Input((2,), dtype="int64")
    tables = [keras.layers.Embedding(ROWS, 8), ours(ROWS, 8)]
    hidden = keras.layers.Flatten()(keras.layers.Concatenate()([table(ids) for table in tables]))
    hidden = keras.layers.Dense(64, activation="relu")(hidden)  # Would be cut, too.
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adagrad(0.3), "mse", metrics=["mae"])
    return model


def trained(folder):
    """Trains, evaluates, predicts, saves and loads; returns what the test compares."""
    with strategy.scope():
        model = model_of(tfdist.layers.Embedding)
    history = model.fit(IDS, TARGETS, batch_size=8, epochs=12, verbose=0).history
    evaluated = model.evaluate(IDS, TARGETS, verbose=0)
    path = f"{folder}/model.keras"
    model.save(path)
    with strategy.scope():
        loaded = keras.models.load_model(path)
    # On one device: an ordinary model of the same weights.
    alone = model_of(keras.layers.Embedding)
    alone.load_weights(path)
    predicted = [each.predict(IDS, verbose=0) for each in (model, loaded, alone)]
    loaded.fit(IDS, TARGETS, batch_size=8, verbose=0)
    return {
        "loss": history["loss"],
        "steps": int(model.optimizer.iterations),
        "steps after loading": int(loaded.optimizer.iterations),
        "shapes": [tuple(variable.shape) for variable in model.trainable_variables],
        "devices": sorted({v.value.device.split("/replica")[0] for v in model.variables}),
        "tasks": sorted({v.value.device.split("/")[3] for v in model.variables}),
        "off": [float(np.abs(each - predicted[-1]).max()) for each in predicted[:-1]],
        "evaluated": evaluated,
        "alone": alone.evaluate(IDS, TARGETS, verbose=0),
    }


results = {}
for kind, partitioner in PARTITIONERS.items():
    strategy.extended._variable_partitioner = partitioner
    results[kind] = trained(sys.argv[1])
report(**results)
