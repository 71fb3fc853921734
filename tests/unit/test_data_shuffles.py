"""Shuffles of a pipeline are begun as often as earlier passes have begun them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.data.shuffles import Shuffles
from tfdist.engine import iterators


def rows(count=20):
    return tf.data.Dataset.range(count)


def mixed(dataset):
    return dataset.map(lambda value: value + 1)


PIPELINES = {
    "one": lambda: rows().shuffle(20, seed=1).batch(4),
    "no seed but the program's": lambda: rows().shuffle(20).batch(4),
    "in a fixed order": lambda: rows().shuffle(20, seed=1, reshuffle_each_iteration=False).batch(4),
    "one after the other": lambda: mixed(rows().shuffle(20, seed=1)).shuffle(5, seed=2).batch(4),
    "files and records": lambda: (
        rows(5)
        .shuffle(5, seed=1)
        .interleave(lambda n: rows(4).map(lambda r: 4 * n + r), num_parallel_calls=2)
        .shuffle(6, seed=2)
        .batch(4)
    ),
    "beside each other": lambda: tf.data.Dataset.zip(
        (rows().shuffle(20, seed=1), rows().shuffle(20, seed=2))
    ).batch(4),
    "one before the other": lambda: (
        rows(10).shuffle(9, seed=1).concatenate(rows(10).shuffle(9, seed=2)).batch(4)
    ),
    "repeated": lambda: rows().shuffle(20, seed=1).repeat(3).batch(4),
    "repeated batches": lambda: rows().shuffle(20, seed=1).batch(4).repeat(3),
    "repeated once": lambda: rows().shuffle(20, seed=1).batch(4).repeat(1),
    "repeated and shuffled": lambda: (
        rows().shuffle(9, seed=1).batch(4).repeat(2).shuffle(3, seed=2)
    ),
    "cached": lambda: rows().cache().shuffle(20, seed=1).batch(4).prefetch(1),
    "kept by a cache": lambda: rows().shuffle(20, seed=1).cache().batch(4).shuffle(3, seed=2),
    "a part of it": lambda: rows().shuffle(20, seed=1).take(12).batch(4),
    "of no effect": lambda: rows().shuffle(1).batch(4),
}


def order(dataset):
    return [tf.nest.map_structure(lambda leaf: leaf.numpy().tolist(), each) for each in dataset]


@pytest.fixture(autouse=True)
def seeded():
    tf.random.set_seed(5)
    yield
    tf.random.set_seed(5)


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_third_pass_of_a_new_pipeline_is_that_of_the_old_one(name, spare):
    old = PIPELINES[name]()
    expected = []
    for _ in range(3):
        expected.append(order(old))
        for _ in range(spare):
            iter(old)
    tf.random.set_seed(5)
    new = PIPELINES[name]()
    shuffles = Shuffles(new)
    assert shuffles.keeps_first == (name == "kept by a cache")
    if shuffles.keeps_first:
        assert order(new) == expected[0]
    shuffles.begin(2 - shuffles.keeps_first, 2 * spare)
    assert order(new) == expected[2]
    if name not in ("in a fixed order", "of no effect"):
        assert expected[0] != expected[2]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_state_that_holds_all_shuffles_brings_later_passes_along_and_others_are_told(name):
    old = PIPELINES[name]()
    reading, states = iter(old), []
    for batch in range(4):
        next(reading, None)
        states.append((batch + 1, iterators.saved(reading)))
    rest = order(reading)
    expected = [order(old) for _ in range(2)]
    found = [Shuffles(old).are_in(state) for _, state in states]
    for (batch, state), is_whole in zip(states, found, strict=True):
        if not is_whole:
            continue
        tf.random.set_seed(5)
        new = PIPELINES[name]()
        again = iter(new)
        iterators.restore(again, state)
        assert order(again)[4 - batch :] == rest
        assert [order(new) for _ in range(2)] == expected
    # So small are these data that what comes first is soon read to its end.
    never = ("one before the other", "kept by a cache")
    assert any(found) or name in (*never, "a part of it", "files and records")


def test_a_distributed_pipeline_shares_its_shuffles_with_the_one_it_was_made_of():
    old = PIPELINES["one after the other"]()
    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    [inner] = strategy.experimental_distribute_dataset(old)._cloned_datasets
    expected = [order(inner) for _ in range(3)]
    tf.random.set_seed(5)
    new = PIPELINES["one after the other"]()
    Shuffles(new).begin(2)
    [inner] = strategy.experimental_distribute_dataset(new)._cloned_datasets
    assert order(inner) == expected[2]
