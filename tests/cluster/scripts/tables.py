"""Trains a model with tables on two parameter servers, and the same model in this process."""

import sys

import tfdist

strategy = tfdist.strategy()
# From here on only the coordinator runs.
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

ROWS, STEPS = 40_000, 6
random = np.random.RandomState(0)
small_ids = random.randint(0, 10, (STEPS, 8, 3)).astype("int64")
large_ids = random.randint(0, ROWS, (STEPS, 8, 2)).astype("int64")
targets = random.randn(STEPS, 8, 1).astype("float32")


def build(small, large):
    keras.utils.set_random_seed(1)
    one, two = keras.Input((3,), dtype="int64"), keras.Input((2,), dtype="int64")
    joined = keras.layers.Concatenate()([small(one), keras.layers.Flatten()(large(two))])
    model = keras.Model([one, two], keras.layers.Dense(1)(joined))
    optimizer = tfdist.optimizers.RowSparse(keras.optimizers.Adam(0.05))
    optimizer.build(model.trainable_variables)
    return model, optimizer


def train_step(model, optimizer, one, two, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model([one, two]) - y))
    variables = [variable.value for variable in model.trainable_variables]
    gradients = tape.gradient(loss, variables)
    assert sum(isinstance(g, tf.IndexedSlices) for g in gradients) == len(gradients) - 2
    optimizer.apply(gradients, model.trainable_variables)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    small = tfdist.layers.Embedding(10, 4, num_shards=2, combiner="mean", name="small")
    large = tfdist.layers.Embedding(ROWS, 4, name="large")  # of 640 kB
    model, optimizer = build(small, large)
    partitioners = tf.distribute.experimental.partitioners
    strategy.extended._variable_partitioner = partitioners.FixedShardsPartitioner(3)
    asked = tfdist.layers.Embedding(10, 2)
    asked.build()
    strategy.extended._variable_partitioner = None

start = [small.get_weights(), large.get_weights(), model.layers[-1].get_weights()]


@tf.function
def remote_step(one, two, y):
    strategy.run(train_step, args=(model, optimizer, one, two, y))


for step in range(STEPS):
    coordinator.schedule(remote_step, args=(small_ids[step], large_ids[step], targets[step]))
coordinator.join()
path = f"{sys.argv[1]}/model.weights.h5"
model.save_weights(path)

# An ordinary model in one process, from the same weights, through the same batches.
local, local_optimizer = build(
    tfdist.layers.Embedding(10, 4, combiner="mean", name="small"),
    keras.layers.Embedding(ROWS, 4, name="large"),
)
parts = [local.get_layer("small"), local.get_layer("large"), local.layers[-1]]
for layer, weights in zip(parts, start, strict=True):
    layer.set_weights(weights)
for step in range(STEPS):
    train_step(local, local_optimizer, small_ids[step], large_ids[step], targets[step])
expected = local.get_weights()
local.load_weights(path)
loaded = local.get_weights()
large_table = local.get_layer("large").get_weights()[0]
slots = optimizer._momentums
report(
    shards=[[shard.value.device for shard in layer.shards] for layer in (small, large)],
    asked=[int(shard.shape[0]) for shard in asked.shards],
    slots_beside=[
        slot.value.device == variable.value.device
        for slot, variable in zip(slots, model.trainable_variables, strict=True)
    ],
    iterations=int(optimizer.iterations.numpy()),
    moved=int((large_table != start[1][0]).any(axis=1).sum()),
    touched=len(set(large_ids.ravel().tolist())),
    difference=max(float(np.abs(a - b).max()) for a, b in zip(expected, loaded, strict=True)),
)
