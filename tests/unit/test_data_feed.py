"""A feed goes on where another one stood, in the same order, whatever it reads."""

from __future__ import annotations

import json
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.engine.inputs import Feed
from tfdist.errors import ConfigError

ROWS, BATCH = 103, 10
X = np.arange(ROWS, dtype="float32")
Y = 2 * X


def _feed(x, y=None, **options):
    return Feed(tf.distribute.get_strategy(), x, y, recoverable=True, **options)


def _numbers(batches):
    return [np.ravel(tf.nest.flatten(batch.data)[0]).astype(int).tolist() for batch in batches]


def _pipeline():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=3)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def _by_python(x):
    return tf.ensure_shape(tf.numpy_function(lambda value: value, [x], tf.float32), [])


KINDS = {
    "arrays": lambda: _feed(X, Y, batch_size=BATCH, shuffle=True),
    "arrays in batches": lambda: _feed(X, Y, batch_size=BATCH, shuffle="batch"),
    "arrays in order": lambda: _feed(X, Y, batch_size=BATCH),
    "arrays in steps": lambda: _feed(X, Y, batch_size=BATCH, shuffle=True, steps=11),
    "sharded": lambda: _feed(data.shard((X, Y), global_batch_size=BATCH, shuffle=True)),
    "sharded stream": lambda: _feed(
        data.shard(tf.data.Dataset.from_tensor_slices(X), global_batch_size=BATCH, shuffle=True)
    ),
    "dataset": lambda: _feed(_pipeline().batch(BATCH)),
    "dataset that cannot be saved": lambda: _feed(
        _pipeline().map(lambda x, y: (_by_python(x), y)).batch(BATCH)
    ),
    "py_dataset": lambda: _feed(Batches(), shuffle=True),
    "generator": lambda: _feed((X[i : i + 1], Y[i : i + 1]) for i in range(ROWS)),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "generator"])
@pytest.mark.parametrize("batches", [4, 11])
def test_a_new_feed_goes_on_at_the_next_batch_and_through_later_passes(kind, batches):
    feed = KINDS[kind]()
    first = _numbers(feed.epoch())
    assert sorted(sum(first, [])) == list(range(ROWS))
    reading = feed.epoch()
    taken = _numbers(next(reading) for _ in range(batches))
    position = feed.position()
    json.dumps({name: value for name, value in position.items() if name != "iterator"})
    rest = _numbers(reading)
    later = _numbers(feed.epoch())

    other = KINDS[kind]()
    other.restore(position)
    assert _numbers(other.epoch(done=batches)) == rest
    assert _numbers(other.epoch()) == later
    assert sorted(sum(taken + rest, [])) == list(range(ROWS))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "generator"])
def test_an_epoch_that_was_read_to_its_end_is_not_read_again(kind):
    # An execution of several steps, the last of an epoch, finds the end of the data.
    feed = KINDS[kind]()
    list(feed.epoch())
    list(feed.epoch())
    position = feed.position()
    later = _numbers(feed.epoch())

    other = KINDS[kind]()
    other.restore(position)
    assert list(other.epoch(done=11)) == []
    assert other.num_batches == 11
    assert _numbers(other.epoch()) == later


@pytest.mark.parametrize("kind", ["arrays", "arrays in steps", "dataset", "py_dataset"])
def test_a_new_feed_goes_on_between_two_passes(kind):
    feed = KINDS[kind]()
    list(feed.epoch())
    other = KINDS[kind]()
    other.restore(feed.position())
    assert _numbers(other.epoch()) == _numbers(feed.epoch())


def test_a_generator_is_read_and_dropped_up_to_its_place(caplog):
    feed = KINDS["generator"]()
    reading = feed.epoch()
    for _ in range(4):
        next(reading)
    other = KINDS["generator"]()
    with caplog.at_level(logging.INFO, "absl"):
        other.restore(feed.position())
    assert "reading 4 batches again" in caplog.text
    assert _numbers(other.epoch(done=4))[0] == [4]


@pytest.fixture
def unseeded():
    """A program without a seed, whatever tests before have set."""
    from tensorflow.python.eager import context

    before = context.global_seed()
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(before)


def test_an_order_that_cannot_come_again_is_warned_of(unseeded, caplog):
    def feed():
        dataset = tf.data.Dataset.range(20).shuffle(20)
        return _feed(dataset.map(lambda x: x + tf.random.uniform([], 0, 1, tf.int64)).batch(2))

    first = feed()
    reading = first.epoch()
    next(reading)
    position = first.position()
    assert position["iterator"] is None
    feed().restore(position)
    assert "shuffled without a seed: pass 1 goes on in another order" in caplog.text


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: _feed(X[:-1], Y[:-1], batch_size=BATCH, shuffle=True), "examples: 103 before, 10"),
        (lambda: _feed(X + 1, Y, batch_size=BATCH, shuffle=True), "sampled: "),
        (lambda: _feed(X, Y, batch_size=5, shuffle=True), "global_batch_size: 10 before, 5 now"),
        (lambda: _feed(X, Y, batch_size=BATCH), "shuffle: True before, False now"),
    ],
)
def test_the_position_of_other_data_is_refused_with_the_difference(other, difference):
    feed = KINDS["arrays"]()
    next(feed.epoch())
    with pytest.raises(ConfigError, match=difference):
        other().restore(feed.position())
    other().restore(feed.position(), force=True)


def test_the_seed_that_was_drawn_is_part_of_the_position():
    feed, other = KINDS["arrays"](), KINDS["arrays"]()
    assert feed.position()["seed"] != other.position()["seed"]
    expected = _numbers(feed.epoch())
    other.restore({**feed.position(), "epoch": 0, "batch": 0})
    assert _numbers(other.epoch()) == expected


def test_a_seeded_program_draws_the_same_orders_again():
    orders = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        orders.append([_numbers(KINDS["arrays"]().epoch()) for _ in range(2)])
    tf.random.set_seed(None)
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_a_position_can_be_that_of_batches_dealt_with_while_more_were_read():
    feed = KINDS["sharded"]()
    reading = feed.epoch()
    taken = _numbers(next(reading) for _ in range(6))
    other = KINDS["sharded"]()
    other.restore(feed.position(taken=4))
    assert _numbers(other.epoch(done=4))[:2] == taken[4:]


def test_sharded_data_goes_on_in_the_next_pass_where_steps_are_more_than_it_has():
    sharded = data.shard(X, global_batch_size=BATCH, shuffle=True, seed=1)
    feed = _feed(sharded, steps=4)
    read = [_numbers(feed.epoch()) for _ in range(11)]
    assert [len(epoch) for epoch in read] == [4] * 11
    batches = sum(read, [])
    for index in range(4):
        seen = sum(batches[11 * index : 11 * (index + 1)], [])
        assert sorted(seen) == list(range(ROWS))
    other = _feed(sharded, steps=4)
    reading = other.epoch()
    for _ in range(3):
        next(reading)
    third = _feed(sharded, steps=4)
    third.restore(other.position())
    assert _numbers(third.epoch(done=3)) + _numbers(third.epoch()) == batches[3:8]


def test_weights_of_classes_and_samples_stay_with_their_examples():
    labels = (X % 3).astype("int32")
    feed = _feed(X, labels, batch_size=BATCH, shuffle=True, class_weight={0: 1.0, 1: 2.0, 2: 4.0})
    for batch in feed.epoch():
        x, y, weight = batch.data
        np.testing.assert_array_equal(weight, 2.0 ** np.asarray(y))
        np.testing.assert_array_equal(np.asarray(x).ravel() % 3, y)
    sharded = data.shard((X, labels), global_batch_size=BATCH)
    for batch in _feed(sharded, class_weight={0: 1.0, 1: 2.0, 2: 4.0}).epoch():
        np.testing.assert_array_equal(batch.data[2], 2.0 ** np.asarray(batch.data[1]))


def test_labels_beside_sharded_data_are_refused():
    with pytest.raises(ConfigError, match="shard them together"):
        _feed(data.shard(X, global_batch_size=BATCH), Y)
