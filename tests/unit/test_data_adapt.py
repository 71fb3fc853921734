"""Preprocessing layers adapt to what `tfdist.data.shard` returns: to all of it, once."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tfdist.engine import activate
from tfdist.engine import repairs

X = np.arange(1.0, 12.0, dtype="float32")[:, np.newaxis]


@pytest.fixture(autouse=True)
def engine():
    tfdist.activate()
    yield
    tfdist.deactivate()


@pytest.mark.parametrize("remainder", ["pad", "partial", "drop"])
def test_every_example_counts_once_whatever_becomes_of_the_last_batch(remainder):
    data = tfdist.data.shard((X, X), global_batch_size=4, shuffle=True, seed=1, remainder=remainder)
    layer = keras.layers.Normalization()
    layer.adapt(data)
    assert float(np.squeeze(layer.mean)) == pytest.approx(6.0)
    assert float(np.squeeze(layer.variance)) == pytest.approx(np.var(X))


def test_adapting_does_not_begin_a_pass_over_the_data():
    data = tfdist.data.shard(X, global_batch_size=11, shuffle=True, seed=1)
    other = tfdist.data.shard(X, global_batch_size=11, shuffle=True, seed=1)
    keras.layers.Normalization().adapt(data)
    [mine], [theirs] = list(data), list(other)
    assert np.array_equal(mine.data, theirs.data)


def test_examples_that_are_single_words_are_documents_of_one_word():
    words = np.array(["a", "b", "b", "c"])
    whole = keras.layers.StringLookup(output_mode="tf_idf")
    whole.adapt(words)
    layer = keras.layers.StringLookup(output_mode="tf_idf")
    layer.adapt(tfdist.data.shard(words, global_batch_size=3))
    assert layer.get_vocabulary() == whole.get_vocabulary() == ["[UNK]", "b", "c", "a"]
    assert np.array_equal(layer.idf_weights.numpy(), whole.idf_weights.numpy())


def test_one_of_several_inputs_is_asked_for_and_can_be_chosen():
    data = tfdist.data.shard(({"a": X, "b": 2 * X}, X), global_batch_size=4)
    layer = keras.layers.Normalization()
    with pytest.raises(tfdist.errors.ConfigError, match="a dict of several"):
        layer.adapt(data)
    layer.adapt(data.mapped(lambda x, y: x["b"]))
    assert float(np.squeeze(layer.mean)) == pytest.approx(12.0)


def test_single_numbers_are_not_taken_for_features():
    data = tfdist.data.shard(X[:, 0], global_batch_size=11)
    with pytest.raises(tfdist.errors.ConfigError, match="axis=None"):
        keras.layers.Normalization().adapt(data)
    layer = keras.layers.Normalization(axis=None)
    layer.adapt(data)
    assert float(np.squeeze(layer.mean)) == pytest.approx(6.0)


def test_an_adapted_layer_maps_data_as_it_maps_a_batch():
    layer = keras.layers.Discretization(num_bins=3)
    data = tfdist.data.shard(X, global_batch_size=4, remainder="partial")
    layer.adapt(data)
    mapped = np.concatenate([np.asarray(batch) for batch in data.mapped(layer)])
    assert np.array_equal(mapped, np.asarray(layer(X)))
    assert len(np.unique(mapped)) == 3


def test_the_layers_are_as_imported_once_the_engine_is_out():
    replaced = [each for each in repairs.repairs() if each.name == "adapt"]
    assert len(replaced) == 4
    assert all(hasattr(each.owner.adapt, activate._MARK) for each in replaced)
    tfdist.deactivate()
    assert not any(hasattr(each.owner.adapt, activate._MARK) for each in replaced)
