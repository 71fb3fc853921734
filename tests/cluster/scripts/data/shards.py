"""Reads every kind of data that `tfdist.data.shard` takes, and trains; see test_data.py.

Usage: shards.py FOLDER POSITION [mirrored REPLICAS]
FOLDER holds TFRecord files. POSITION is a file: where it exists, arrays are read on from there.
"""

from __future__ import annotations

import json
import os
import random
import sys

import tfdist

folder, position, *where = sys.argv[1:]
strategy = tfdist.strategy(where[0], replicas=int(where[1])) if where else tfdist.strategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from report import report  # noqa: E402

from tfdist import data  # noqa: E402
from tfdist.data.world import workers_here  # noqa: E402
from tfdist.engine.inputs import Feed  # noqa: E402
from tfdist.errors import DisagreementError  # noqa: E402

BATCH = 64
PASSES = 2
ROWS = 1003
workers, worker = workers_here()


def shards(source, size=BATCH, **options):
    return data.shard(source, global_batch_size=size, **options)


def numbers():
    yield from range(101)


def others():
    """Another order on every worker: what no splitting by example can make right."""
    chosen = list(range(101))
    random.Random(worker).shuffle(chosen)
    yield from chosen


def parts(context):
    rows = tf.data.Dataset.range(101)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(7)


def parse(record):
    return tf.strings.to_number(record, tf.int64)


files = {"parse": parse, "shuffle": True, "seed": 3}
sources = {
    "arrays": lambda: shards(np.arange(ROWS), shuffle=True, seed=3),
    "arrays without a seed": lambda: shards(np.arange(ROWS), shuffle=True),
    "few": lambda: shards(np.arange(BATCH + 2)),
    "sequence": lambda: shards(list(range(101)), 16, shuffle=True, seed=3),
    "seven files": lambda: shards(f"{folder}/seven/*", 16, **files),
    "seven files by file": lambda: shards(f"{folder}/seven/*", 16, policy="file", **files),
    "compressed": lambda: shards(f"{folder}/compressed/*", 16, **files),
    "one file": lambda: shards(f"{folder}/one/*", 16, **files),
    "dataset": lambda: shards(tf.data.Dataset.range(101).shuffle(50), 16),
    "sharded": lambda: shards(tf.data.Dataset.range(101).shard(workers, worker), 16),
    "function": lambda: shards(parts, 16),
    "generator": lambda: shards(numbers, 16, map=lambda x: x),
}


def numbers_of(batch):
    values = strategy.experimental_local_results(batch.unpacked(strategy))
    return [int(x) for part in values for x in np.ravel(part)]


def batches(feed, done=0):
    """Returns the numbers that this worker reads in an epoch, batch by batch."""
    return [numbers_of(batch) for batch in feed.epoch(done)]


def refused(source):
    """Returns the message that data which differs between workers ends with."""
    try:
        return batches(Feed(strategy, shards(source, 16)))
    except DisagreementError as error:
        return str(error)


read = {}
for name, make in sources.items():
    feed = Feed(strategy, make())
    read[name] = [batches(feed) for _ in range(PASSES if name.startswith("arrays") else 1)]
disagreements = [refused(others), refused(np.arange(101)[worker::workers][:33])]

feed = Feed(strategy, shards(np.arange(ROWS), shuffle=True))
if os.path.exists(position):
    with open(position, encoding="utf-8") as file:
        feed.restore(json.load(file))
    continued = batches(feed, done=5)
else:
    reading = feed.epoch()
    for _ in range(5):
        next(reading)
    found = feed.position()
    if worker == 0:
        with open(position, "w", encoding="utf-8") as file:
            json.dump(found, file)
    continued = [numbers_of(batch) for batch in reading]

# A pipeline of the user's own, put back by its iterator.
pipeline = tf.data.Dataset.range(101).shuffle(50, seed=1).batch(6).prefetch(2)
whole = Feed(strategy, pipeline, recoverable=True)
batches(whole)
reading = whole.epoch()
for _ in range(4):
    next(reading)
saved = whole.position()
rest = [numbers_of(batch) for batch in reading]
again = Feed(strategy, pipeline, recoverable=True)
again.restore(saved)
pipelines = [rest, batches(again, done=4), saved["iterator"] is not None]


def trained(x, y, on, *, as_shards):
    with on.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        metrics = [keras.metrics.MeanAbsoluteError(), keras.metrics.MeanSquaredError()]
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=metrics)
    if as_shards:
        sharded = shards((x, y))
        history = model.fit(sharded, epochs=2, verbose=0)
        evaluated = model.evaluate(sharded, verbose=0)
        predicted = model.predict(sharded, verbose=0)
    else:
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
    return {
        "history": history.history,
        "evaluated": evaluated,
        "predicted": np.ravel(predicted),
        "weights": [np.ravel(w) for w in model.get_weights()],
    }


r = np.random.RandomState(0)
x = r.randn(ROWS, 3).astype("float32")
y = r.randn(ROWS, 1).astype("float32")
report(
    replicas=strategy.num_replicas_in_sync,
    read=read,
    disagreements=disagreements,
    continued=continued,
    pipelines=pipelines,
    fit=trained(x, y, strategy, as_shards=True),
    alone=trained(x, y, tf.distribute.get_strategy(), as_shards=False) if worker == 0 else {},
)
