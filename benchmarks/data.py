"""How fast data is read: `tfdist.data.shard` beside Keras's arrays and plain `tf.data` pipelines.

    python benchmarks/data.py

One process reads 60,000 examples of 784 floats (20,000 from files) in shuffled batches of 64, and
does nothing with them. Printed are examples a second and the CPU time of a batch in this process,
each of the fastest of three passes after a first one. Last comes a pipeline that takes about a
millisecond for each of 4,000 examples, made here and by one other process on the same machine.
"""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np
import tensorflow as tf

from tfdist import data
from tfdist.engine.inputs import Feed

ROWS, RECORDS, HEAVY, FILES, BATCH = 60_000, 20_000, 4_000, 4, 64
STRATEGY = tf.distribute.get_strategy()
X = np.random.RandomState(0).rand(ROWS, 784).astype("float32")
Y = np.arange(ROWS) % 10
SPEC = {"x": tf.io.FixedLenFeature([784], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


class Sequence:
    """One example for a number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return X[index], Y[index]


def write(folder):
    """Writes records into a folder, and returns their files."""
    paths = [os.path.join(folder, f"{number}.tfrecord") for number in range(FILES)]
    each = RECORDS // FILES
    for number, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as file:
            for row in range(number * each, (number + 1) * each):
                features = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=X[row])),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[Y[row]])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                file.write(example.SerializeToString())
    return paths


def double(x, y):
    return 2 * x, y


def heavy(x, y):
    image = tf.reshape(x, [28, 28])
    for _ in range(150):
        image = tf.tanh(tf.linalg.matmul(image, image) / 28)
    return tf.reshape(image, [784]), y


def parse(record):
    found = tf.io.parse_single_example(record, SPEC)
    return found["x"], found["y"]


def parse_all(records):
    found = tf.io.parse_example(records, SPEC)
    return found["x"], found["y"]


def measure(name, rows, *arguments, **options):
    """Reads four passes and prints the fastest of the last three."""
    feed = Feed(STRATEGY, *arguments, **options)
    passes = []
    for _ in range(4):
        begin, cpu, batches = time.perf_counter(), time.process_time(), 0
        for _ in feed.epoch():
            batches += 1
        passes.append((time.perf_counter() - begin, (time.process_time() - cpu) / batches))
    seconds, cpu = min(passes[1:])
    print(f"{name:36} {rows / seconds:9.0f} examples/s {1e6 * cpu:6.0f} us of CPU a batch")


def shard(source, **options):
    return data.shard(source, global_batch_size=BATCH, shuffle=True, **options)


measure("arrays, Keras", ROWS, X, Y, batch_size=BATCH, shuffle=True)
measure("arrays, shard", ROWS, shard((X, Y)))
slices = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(10_000)
measure("arrays, tf.data", ROWS, slices.batch(BATCH))
measure("arrays with map, shard", ROWS, shard((X, Y), map=double))
mapped = slices.map(double, num_parallel_calls=tf.data.AUTOTUNE)
measure("arrays with map, tf.data", ROWS, mapped.batch(BATCH))
measure("sequence, shard", ROWS, shard(Sequence()))
with tempfile.TemporaryDirectory() as folder:
    paths = write(folder)
    measure("records with parse, shard", RECORDS, shard(paths, parse=parse))
    measure("records with map_batch, shard", RECORDS, shard(paths, map_batch=parse_all))
    records = tf.data.TFRecordDataset(paths).shuffle(10_000)
    parsed = records.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    measure("records with parse, tf.data", RECORDS, parsed.batch(BATCH))
few = X[:HEAVY], Y[:HEAVY]
measure("heavy map, shard", HEAVY, shard(few, map=heavy))
measure("heavy map, service=1", HEAVY, shard(few, map=heavy, service=1))
