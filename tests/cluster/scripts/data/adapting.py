"""Fits preprocessing layers to each kind of data; run by test_adapt.py.

What is reported of a layer is what it makes of five examples, so tables and constants are used.
"""

from __future__ import annotations

import tfdist

strategy = tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

from tfdist.cluster import current  # noqa: E402

RANK = current.group().rank if current.group() is not None else 0
ROWS = 101
random = np.random.default_rng(3)
NUMBERS = random.normal(3, 2, (ROWS, 3)).astype("float32")
TOKENS = np.array([[f"t{int(n) % 17}"] for n in random.integers(0, 90, ROWS)])
TEXTS = np.array([f"{a[0]} {b[0]} of {a[0]}" for a, b in zip(TOKENS, TOKENS[::-1], strict=True)])
IDS = random.integers(0, 23, (ROWS, 1))
TARGETS = NUMBERS.sum(axis=1, keepdims=True)

LAYERS = {
    "numbers": (lambda: keras.layers.Normalization(), NUMBERS),
    "bins": (lambda: keras.layers.Discretization(num_bins=5, output_mode="multi_hot"), NUMBERS),
    "tokens": (lambda: keras.layers.StringLookup(output_mode="multi_hot"), TOKENS),
    "ids": (lambda: keras.layers.IntegerLookup(output_mode="multi_hot"), IDS),
    "texts": (lambda: keras.layers.TextVectorization(output_mode="tf_idf"), TEXTS),
}


def kinds(data):
    """Returns the data in each form, each holding all of it on every worker."""
    dataset = tf.data.Dataset.from_tensor_slices((data, TARGETS))
    pairs = tfdist.data.shard(
        (data, TARGETS), global_batch_size=16, shuffle=True, seed=5, remainder="drop"
    )
    streamed = tfdist.data.shard(dataset, global_batch_size=16, shuffle=True, seed=5)
    return {
        "array": data,
        "dataset": dataset.map(lambda x, y: x).batch(16),
        "sharded": pairs,
        "sharded stream": streamed,
    }


def made_of(layer, data):
    return np.asarray(layer(tf.constant(data[:5]))).astype("float64").ravel().tolist()


found, losses = {}, {}
for name, (make, data) in LAYERS.items():
    found[name] = {}
    for kind, given in kinds(data).items():
        with strategy.scope():
            layer = make()
            layer.adapt(given)
        found[name][kind] = made_of(layer, data)
    outside = make()
    outside.adapt(data)
    found[name]["outside the scope"] = made_of(outside, data)
    # In the model, and in the data.
    width = len(found[name]["array"]) // 5
    inputs = keras.Input(data.shape[1:], dtype=tf.as_dtype(tf.constant(data[:1]).dtype).name)
    for where in ("model", "data") if name in ("numbers", "texts") else ():
        with strategy.scope():
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            if where == "model":
                hidden = keras.layers.Lambda(
                    lambda x: tf.cast(x, tf.float32), output_shape=(width,)
                )(layer(inputs))
                model = keras.Model(inputs, dense(hidden))
            else:
                model = keras.Sequential([keras.Input((width,)), dense])
            model.compile("sgd", "mse")
        given = tfdist.data.shard((data, TARGETS), global_batch_size=16)
        if where == "data":
            given = given.mapped(lambda x, y, layer=layer: (tf.cast(layer(x), tf.float32), y))
        losses[f"{name} in the {where}"] = model.fit(given, verbose=0).history["loss"]

refused = {}
if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
    for name, (make, data) in LAYERS.items():
        layer = make()
        try:
            layer.adapt(data[RANK::2])
        except tfdist.errors.DisagreementError as error:
            refused[name] = str(error)
    broken = keras.layers.Normalization()
    try:
        broken.adapt(NUMBERS if RANK else iter([]))
    except ValueError as error:
        refused["nothing to read"] = str(error)
    except tfdist.errors.ConfigError as error:
        refused["nothing to read"] = str(error)
    with strategy.scope():
        inputs = keras.Input((1,), dtype="string")
        own = keras.layers.StringLookup(vocabulary=["b", "a"] if RANK else ["a", "b"])
        numbers = keras.layers.Lambda(lambda x: tf.cast(x, tf.float32), output_shape=(1,))
        model = keras.Model(inputs, keras.layers.Dense(1)(numbers(own(inputs))))
        model.compile("sgd", "mse")
    try:
        model.fit(tf.constant([["a"], ["b"]]), np.ones((2, 1)), batch_size=2, verbose=0)
    except tfdist.errors.DisagreementError as error:
        refused["a vocabulary of its own"] = str(error)
    rounded = keras.layers.Normalization()
    rounded.adapt(NUMBERS + np.float32(1e-6 * RANK))
    found["rounded"] = [float(each) for each in np.ravel(rounded.mean)]
report(found=found, losses=losses, refused=refused)
