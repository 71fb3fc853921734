"""How long a loop waits for its data is measured, and a pipeline that is too slow is named."""

from __future__ import annotations

import logging
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.engine import training
from tfdist.engine.input_wait import InputWait
from tfdist.engine.inputs import Feed

X = np.zeros((24 * 4, 2), "float32")


def _slow(batch):
    def sleep(data):
        time.sleep(0.02)
        return data

    [out] = tf.numpy_function(sleep, [batch], [tf.float32])
    out.set_shape(batch.shape)
    return out


def _sources():
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(4)
    sequential = dataset.map(_slow)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    return {
        "dataset": (tf.distribute.get_strategy(), sequential),
        "dataset of a strategy": (strategy, sequential),
        "shards": (strategy, tfdist.data.shard(lambda: sequential, global_batch_size=4)),
    }


@pytest.mark.parametrize("name", ["dataset", "dataset of a strategy", "shards"])
def test_a_slow_pipeline_is_named_as_the_bottleneck_once(name, caplog):
    strategy, data = _sources()[name]
    feed = Feed(strategy, data)
    assert feed.input_wait is None
    with caplog.at_level(logging.INFO, "absl"):
        for _ in range(2):
            assert len(list(feed.epoch())) == 24
    found = feed.input_wait
    assert found.steps == 22
    assert 0.015 < found.seconds / found.steps <= found.elapsed / found.steps
    assert found.share > 0.5 and found.is_bottleneck
    text = [record.getMessage() for record in caplog.records]
    assert sum("the input pipeline is the bottleneck" in line for line in text) == 1
    assert sum(line.startswith("input wait ") for line in text) == 2


def test_what_the_steps_take_themselves_is_not_waited_for(caplog):
    feed = Feed(tf.distribute.get_strategy(), tf.data.Dataset.from_tensor_slices(X).batch(4))
    with caplog.at_level(logging.INFO, "absl"):
        for _ in feed.epoch():
            time.sleep(0.01)
    found = feed.input_wait
    assert found.elapsed / found.steps >= 0.01
    assert found.share < 0.2 and not found.is_bottleneck
    assert not any("bottleneck" in record.getMessage() for record in caplog.records)


def test_a_prefetched_batch_is_made_while_the_step_runs():
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(4).map(_slow)
    feed = Feed(tf.distribute.get_strategy(), dataset)
    for _ in feed.epoch():
        time.sleep(0.03)
    assert feed.input_wait.seconds / feed.input_wait.steps < 0.01


def test_callbacks_find_it_at_the_end_of_an_epoch():
    found = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found.append(training.of(self.model).feed.input_wait)

    tfdist.activate()
    try:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = tfdist.data.shard((X, X[:, :1]), global_batch_size=8)
        model.fit(data, epochs=2, verbose=0, callbacks=[Look()])
    finally:
        tfdist.deactivate()
    assert [each.steps for each in found] == [10, 10]


def test_a_short_wait_or_few_steps_are_no_bottleneck():
    assert InputWait(20, 0.2, 0.4).is_bottleneck
    assert not InputWait(9, 0.2, 0.4).is_bottleneck
    assert not InputWait(1000, 0.5, 1.0).is_bottleneck
    assert not InputWait(20, 0.2, 1.1).is_bottleneck
    assert str(InputWait(20, 0.016, 0.48)) == (
        "input wait 0.8 ms of a step of 24.0 ms (3%), mean of 20 steps"
    )
