"""One process of a parameter-server contender; the same script in every role.

Prints, in the coordinator, a line of JSON: milliseconds a step of each timed `fit`, the seconds of
the first one, in which graphs are traced, and the coordinator's own CPU time a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

stack, model_name, optimizer, rows, steps = sys.argv[1:6]
ROWS, STEPS = int(rows), int(steps)
ROUNDS = 3
#: Both stacks dispatch so many steps at once; stock Keras 2 is several times slower with 1.
STEPS_PER_EXECUTION = 8


def strategy_of_stack() -> tuple[Any, Any]:
    """Returns Keras and the strategy; serves, and does not return, in workers and servers."""
    if stack == "tfdist":
        import tfdist

        strategy = tfdist.strategy()
        import keras

        return keras, strategy
    import tensorflow as tf
    import tf_keras

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
        ).join()
    return tf_keras, tf.distribute.ParameterServerStrategy(resolver)


def synthetic(keras: Any) -> tuple[Any, Any]:
    """Two towers over ids without any order: a user's table of `rows`, and one of 10,000 items."""
    import numpy as np

    items = 10_000
    random = np.random.default_rng(0)
    count = 64 * 200
    data = {
        "user": random.integers(0, ROWS, (count, 6)),
        "item": random.integers(0, items, (count, 1)),
        "x": random.normal(size=(count, 16)).astype("float32"),
    }
    labels = random.integers(0, 2, (count, 1)).astype("float32")
    user = keras.Input((6,), dtype="int64", name="user")
    item = keras.Input((1,), dtype="int64", name="item")
    x = keras.Input((16,), name="x")
    left = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 16, name="users")(user))
    left = keras.layers.Concatenate()([left, x])
    right = keras.layers.Flatten()(keras.layers.Embedding(items, 16, name="items")(item))
    for width in (64, 32):
        left = keras.layers.Dense(width, activation="relu")(left)
        right = keras.layers.Dense(width, activation="relu")(right)
    score = keras.layers.Dense(1)(keras.layers.Concatenate()([left, right]))
    return keras.Model({"user": user, "item": item, "x": x}, score), (data, labels)


def flights(keras: Any) -> tuple[Any, Any]:
    """The model and data of configs/flights-ps.yaml."""
    from trainer.experiments import flights as experiment

    options = experiment.Options(buckets=ROWS, max_rows=64 * 1000)
    features, late = experiment.arrays(options)
    names = [*experiment.CATEGORICAL, *experiment.NUMERIC]
    inputs = {
        name: keras.Input(
            (1,), dtype="int32" if name in experiment.CATEGORICAL else "float32", name=name
        )
        for name in names
    }
    parts = [
        keras.layers.Flatten()(
            keras.layers.Embedding(ROWS, options.embedding_dim, name=f"{name}_table")(inputs[name])
        )
        for name in experiment.CATEGORICAL
    ]
    parts += [inputs[name] for name in experiment.NUMERIC]
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(parts))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden)), (features, late)


keras, strategy = strategy_of_stack()

import tensorflow as tf  # noqa: E402

with strategy.scope():
    model, arrays = {"synthetic": synthetic, "flights": flights}[model_name](keras)
    model.compile(
        {"adam": keras.optimizers.Adam, "adagrad": keras.optimizers.Adagrad}[optimizer](0.001),
        keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=STEPS_PER_EXECUTION,
    )


def dataset(context: Any = None) -> Any:
    """Returns batches of 64 in memory, without end."""
    batches = tf.data.Dataset.from_tensor_slices(arrays).repeat()
    return batches.batch(64, drop_remainder=True)


data = dataset() if stack == "tfdist" else keras.utils.experimental.DatasetCreator(dataset)
began = time.perf_counter()
model.fit(data, steps_per_epoch=6 * STEPS_PER_EXECUTION, verbose=0)
first = time.perf_counter() - began
timed = []
worked = time.process_time()
for _ in range(ROUNDS):
    began = time.perf_counter()
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    timed.append(1e3 * (time.perf_counter() - began) / STEPS)
coordinator = 1e3 * (time.process_time() - worked) / (ROUNDS * STEPS)
measured = {"ms_per_step": timed, "first_seconds": first, "coordinator_cpu_ms": coordinator}
print("BENCHMARK", json.dumps(measured), flush=True)
os._exit(0)  # Stock workers would be waited for.
