"""`tfdist.testing`: says that a right model trains alike, and where a wrong one does not."""

from __future__ import annotations

import os
import tempfile
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from tests.support.harness import LEAN
from tests.support.harness import eventually
from tfdist.errors import ConfigError
from tfdist.testing import assert_matches_single_device
from tfdist.testing import records
from tfdist.testing.differences import Tolerance
from tfdist.testing.differences import difference
from tfdist.testing.differences import excessive
from tfdist.testing.records import Steps

ROWS = 29  # Over batches of 8: the last has 5.


@pytest.fixture(autouse=True)
def lean(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(LEAN), prepend=os.pathsep)


def arrays(rows: int = ROWS):
    r = np.random.RandomState(0)
    x = r.randn(rows, 3).astype("float32")
    return x, np.tanh(x.sum(1, keepdims=True)).astype("float32")


def batches():
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(8)


def model_of(*layers):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def right_model():
    return model_of(keras.layers.Dense(4, activation="tanh", name="hidden"))  # Unseeded weights.


class OfReplica(keras.layers.Layer):
    """From its third batch on it adds the number of its replica."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="seen", aggregation="mean"
        )

    def call(self, x):
        context = tf.distribute.get_replica_context()  # None while the model is built.
        number = tf.cast(context.replica_id_in_sync_group if context else 0, x.dtype)
        self.seen.assign_add(1.0)
        return x + tf.where(self.seen > 2.5, number, 0.0)


def wrong_model():
    return model_of(keras.layers.Dense(4, name="hidden"), OfReplica(name="of_replica"))


def broken_model():
    raise RuntimeError("no such vocabulary: cities.txt")


def test_a_right_model_matches_on_two_workers():
    report = assert_matches_single_device(right_model, batches, workers=2, epochs=2)
    assert report.world == "2 workers"
    assert report.steps == 8
    assert report.variables > 4
    assert report.largest_variable_difference < 1e-5
    assert report.largest_history_difference < 1e-5
    assert report.seconds > 0


def test_closures_arrays_and_arguments_of_fit_travel_to_local_replicas():
    width = 5

    class Local(keras.layers.Dense):
        pass

    report = assert_matches_single_device(
        lambda: model_of(Local(width)),
        lambda: (*arrays(), np.linspace(0.5, 2, ROWS)),
        replicas=3,
        epochs=2,
        batch_size=8,
        validation_data=arrays(7),
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))],
    )
    assert report.world == "3 replicas"
    assert report.steps == 8  # In the shuffled order of one device.


def test_data_of_unknown_length_is_counted_right_on_one_device():
    assert_matches_single_device(
        right_model, lambda: batches().filter(lambda x, y: True), replicas=2, epochs=2
    )


def test_a_step_between_two_records_is_found_in_a_second_run(monkeypatch):
    # Room for about four records of this model's variables: not for those of all eight steps.
    monkeypatch.setattr(records, "BUDGET_BYTES", 1200)
    with pytest.raises(AssertionError) as error:
        assert_matches_single_device(wrong_model, batches, epochs=2, replicas=2)
    assert "2 replicas do not train as one device does." in str(error.value)
    assert "The first difference is in step 3 of 8" in str(error.value)
    assert "code that asks for the replica" in str(error.value)


@pytest.mark.parametrize("kind", ["workers", pytest.param("replicas", marks=pytest.mark.slow)])
def test_a_wrong_model_fails_with_the_first_step_and_the_first_variable(kind):
    with pytest.raises(AssertionError) as error:
        assert_matches_single_device(wrong_model, batches, epochs=2, **{kind: 2})
    message = str(error.value)
    assert f"2 {kind} do not train as one device does." in message
    assert "The first difference is in step 3 of 8, in sequential/hidden/kernel" in message
    assert "on one device" in message
    assert "code that asks for the replica" in message


@pytest.mark.slow
def test_dropout_and_batch_normalization_are_named_as_likely_causes():
    def model():
        return model_of(
            keras.layers.Dropout(0.5, name="drop"), keras.layers.BatchNormalization(name="norm")
        )

    with pytest.raises(AssertionError) as error:
        assert_matches_single_device(model, batches, replicas=2)
    message = str(error.value)
    assert "in step 1 of 4" in message
    assert "drop: draws other random numbers on every replica" in message
    assert "norm: BatchNormalization of a replica's own examples" in message


def test_an_error_in_model_fn_is_shown():
    with pytest.raises(AssertionError, match="no such vocabulary: cities.txt"):
        assert_matches_single_device(broken_model, batches)


def test_an_error_in_the_cluster_alone_is_shown():
    def model():
        if tf.distribute.has_strategy():
            raise RuntimeError("cannot build here")
        return right_model()

    with pytest.raises(AssertionError, match="(?s)training on 2 workers failed.*cannot build here"):
        assert_matches_single_device(model, batches)


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(AssertionError, match="Expected model_fn to return a compiled Keras model"):
        assert_matches_single_device(lambda: keras.Sequential([keras.layers.Dense(1)]), batches)


def test_a_cluster_that_hangs_is_ended_at_the_deadline_and_its_output_shown(tmp_path, monkeypatch):
    # The job's folder goes there, whose name is in the command line of every process of it.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def model():
        if tf.distribute.has_strategy():
            print("waits for something that never comes", flush=True)
            time.sleep(600)
        return right_model()

    began = time.monotonic()
    with pytest.raises(AssertionError, match="did not end before the deadline") as error:
        assert_matches_single_device(model, batches, timeout=30)
    assert time.monotonic() - began < 40
    assert "[worker 1] waits for something that never comes" in str(error.value)
    # The guard of the launcher takes a moment.
    assert eventually(lambda: not _processes_of(tmp_path), timeout=2)


def test_arguments_that_cannot_be_right_are_refused_before_anything_is_started():
    with pytest.raises(ConfigError, match="workers to be at least 1"):
        assert_matches_single_device(right_model, batches, workers=0)
    with pytest.raises(ConfigError, match="can be sent to another process"):
        generator = (i for i in range(3))
        assert_matches_single_device(right_model, lambda: generator)


def test_differences_are_measured_against_the_largest_magnitude():
    reference = {"a": [1.0, 1e-9], "b": [0.0, 0.0], "c": [np.nan, np.inf]}
    values = {"a": [1.0, 2e-9], "b": [0.0, 1e-8], "c": [np.nan, np.inf]}
    assert not excessive(reference, values, Tolerance(rtol=1e-5, atol=1e-7))
    [found] = excessive(reference, {**values, "a": [1.1, 0.0]}, Tolerance(1e-5, 1e-7))
    assert (found.name, found.reference, found.value) == ("a", 1.0, 1.1)
    assert difference("c", [1.0], [np.nan]).absolute == np.inf
    assert [each.name for each in excessive(reference, {"a": [1.0, 1e-9]}, Tolerance(1, 1))] == [
        "b",
        "c",
    ]


def test_records_of_steps_stay_within_their_budget(tmp_path):
    steps = Steps(tmp_path, budget=10 * 800)
    for step in range(1, 200):
        if steps.wants(step):
            steps.add(step, {"w": np.full(100, float(step))})
    kept = steps.numbers()
    assert 2 <= len(kept) <= 11
    assert len(set(np.diff(kept))) == 1  # Evenly spaced, to the end.
    assert kept[-1] > 180
    assert steps.load(kept[0])["w"][0] == kept[0]
    window = Steps(tmp_path / "window", budget=8000, after=kept[0], until=kept[1])
    assert [s for s in range(1, 200) if window.wants(s)] == list(range(kept[0] + 1, kept[1] + 1))


def _processes_of(folder):
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if str(folder) in " ".join(p.info["cmdline"] or ())]
