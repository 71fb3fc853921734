"""The store on Cloud Storage: TensorFlow's own client, and an emulator behind Google's names."""

from __future__ import annotations

import logging
import os

import pytest

from tests.support.cloud_storage import CloudStorage
from tests.support.states import assert_same
from tests.support.states import sample
from tfdist.errors import StaleWriterError
from tfdist.errors import StoreError
from tfdist.state.provenance import Provenance
from tfdist.state.store import Store
from tfdist.state.store import write_part


@pytest.fixture(scope="module")
def storage():
    before = dict(os.environ)
    with CloudStorage() as storage:
        os.environ.update(storage.environ)
        yield storage
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def url(storage, request):
    return f"gs://bucket/runs/{request.node.name}"


def gfile():
    import tensorflow as tf

    return tf.io.gfile


def names(url: str) -> list[str]:
    return sorted(name.rstrip("/") for name in gfile().listdir(url))


def test_commits_are_written_listed_read_and_thinned(url):
    store = Store(f"{url}/with space ü", keep=2)
    assert store.read_latest() is None
    for step in (1, 2, 3):
        store.write(sample(step))
    found = Store(f"{url}/with space ü").read_latest(mapped=True)
    assert found is not None
    assert_same(found[1], sample(3))
    assert [commit.step for commit in store.commits()] == [3, 2]
    assert len(names(f"{url}/with space ü")) == 2 + 1


@pytest.mark.parametrize(
    "damage",
    [
        "no manifest",
        pytest.param("cut", marks=pytest.mark.slow),
        pytest.param("flipped", marks=pytest.mark.slow),
        pytest.param("missing", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_commit_is_passed_over(url, damage, caplog):
    store = Store(url)
    store.write(sample(1))
    directory = store.write(sample(2)).directory
    path = f"{directory}/{'manifest.json' if damage == 'no manifest' else 'main.bin'}"
    with gfile().GFile(path, "rb") as file:
        data = file.read()
    if damage in ("no manifest", "missing"):
        gfile().remove(path)
    else:
        data = data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1])
        with gfile().GFile(path, "wb") as file:
            file.write(data)
    with caplog.at_level(logging.WARNING, "absl"):
        latest = Store(url).latest()
    assert latest is not None and latest.step == 1
    assert os.path.basename(path) in caplog.text


def test_the_manifest_is_written_last(url, storage):
    first = len(storage.requests)
    Store(url).write(sample(1))
    written = [path for method, path in storage.requests[first:] if "uploadType=resumable" in path]
    files = [path.partition("name=")[2].split("%2F")[-1] for path in written if "step-" in path]
    assert files == ["main.bin", "facts.json", "manifest.json"]


def test_a_stale_writer_is_fenced_off_and_its_late_commit_does_not_count(url):
    old = Store(url)
    old.write(sample(1))
    new = Store(url)
    with pytest.raises(StaleWriterError):
        with old.open_commit(2) as commit:
            commit.write({}, sample(2).arrays)
            new.acquire()
    assert [commit.step for commit in new.commits()] == [1]
    with pytest.raises(StaleWriterError):
        old.write(sample(3))
    with pytest.raises(StaleWriterError):
        old.finish()
    new.write(sample(2))
    assert [commit.step for commit in Store(url).commits()] == [2, 1]


@pytest.mark.slow
def test_debris_of_a_killed_writer_is_swept(url):
    old = Store(url)
    commit = old.open_commit(5)
    opened = commit.__enter__()
    write_part(opened.directory, "ps-0", sample(1).arrays)
    assert len(names(url)) == 2
    new = Store(url)
    new.acquire()
    assert names(url) == [name for name in names(url) if name.startswith("incarnation-2-")]
    del commit


def test_a_finished_run_leaves_its_facts_only(url):
    store = Store(url)
    store.write(sample(1))
    store.finish({"epochs": 3})
    assert Store(url).finished() == {"epochs": 3}
    assert Store(url).commits() == []
    assert names(url) == ["finished.json"]


@pytest.mark.slow
def test_provenance_is_kept_on_cloud_storage(url):
    record = Provenance.start(url, {"seeds": {"global": 1}}, environ={})
    record.progress(1)
    record.stop("preempted")
    again = Provenance.start(url, {"seeds": {"global": 1}}, environ={})
    again.resumed(1)
    again.progress(2)
    again.finish()
    found = Provenance.read(url)
    assert found is not None
    assert [entry["ended"] for entry in found["incarnations"]] == ["preempted", "finished"]
    assert found["incarnations"][0]["steps_lost"] == 0
    assert names(url) == ["run.json"]


def test_a_bucket_that_is_not_there_is_named(storage):
    with pytest.raises(StoreError, match="gs://nowhere"):
        Store("gs://nowhere/run").acquire()


def test_a_csv_file_on_cloud_storage_is_closed_when_training_ends(url):
    import keras
    import numpy as np

    import tfdist

    tfdist.activate()
    try:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        logger = keras.callbacks.CSVLogger(f"{url}/history.csv")
        gfile().makedirs(url)
        model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, verbose=0, callbacks=[logger])
    finally:
        tfdist.deactivate()
    with gfile().GFile(f"{url}/history.csv") as file:
        assert [line.split(",")[0] for line in file.read().splitlines()] == ["epoch", "0", "1"]
