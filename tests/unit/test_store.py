from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.states import assert_same
from tests.support.states import sample
from tfdist.errors import ConfigError
from tfdist.errors import DamagedCommitError
from tfdist.errors import StoreError
from tfdist.state.store import Snapshot
from tfdist.state.store import Store
from tfdist.state.store import write_part
from tfdist.state.writer import AsyncWriter


def steps(store: Store) -> list[int]:
    return [commit.step for commit in store.commits()]


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_read_is_what_was_written_for_every_kind_of_array(tmp_path, mapped):
    written = sample()
    commit = Store(tmp_path / "with space ü").write(written)
    store = Store(str(tmp_path / "with space ü") + "/")
    assert store.latest() == commit
    assert_same(store.read(commit, mapped=mapped), written)


def test_arrays_that_were_read_can_be_written_to_and_mapped_ones_cannot(tmp_path):
    store = Store(tmp_path)
    commit = store.write(sample())
    assert store.read(commit).arrays["half"].flags.writeable
    assert not store.read(commit, mapped=True).arrays["half"].flags.writeable


def test_numpys_numbers_and_tuples_are_read_as_plain_ones(tmp_path):
    facts = {"lr": np.float32(0.1), "n": np.int64(3), "shape": (1, 2), "flag": np.bool_(True)}
    store = Store(tmp_path)
    store.write(Snapshot(1, facts))
    found = store.read_latest()
    assert found is not None
    expected = {"lr": float(np.float32(0.1)), "n": 3, "shape": [1, 2], "flag": True}
    assert found[1].facts == expected


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (Snapshot(1, {"a": {"b": [object()]}}), "facts['a']['b'][0]"),
        (Snapshot(1, {"a": {1: 2}}), "facts['a']"),
        (Snapshot(1, {}, {"x": np.array([{}])}), "'x'"),
        (Snapshot(1, {}, {"x": np.zeros(1, [("a", "f4")])}), "'x'"),
    ],
)
def test_what_cannot_be_written_is_named_and_leaves_nothing_behind(tmp_path, snapshot, words):
    store = Store(tmp_path)
    with pytest.raises(ConfigError) as error:
        store.write(snapshot)
    assert words in str(error.value)
    assert [name for name in os.listdir(tmp_path) if "step" in name] == []


def test_the_newest_commits_are_kept_and_nothing_else_is_left(tmp_path):
    store = Store(tmp_path, keep=3)
    for step in range(7):
        store.write(sample(step))
    assert steps(store) == [6, 5, 4]
    assert len(os.listdir(tmp_path)) == 3 + 1


def test_two_commits_of_one_step_are_two(tmp_path):
    store = Store(tmp_path)
    store.write(Snapshot(5, {"a": 1}))
    store.write(Snapshot(5, {"a": 2}))
    assert [store.read(commit).facts["a"] for commit in store.commits()] == [2, 1]


def test_a_run_that_went_back_to_an_older_step_goes_on_from_its_own_commits(tmp_path):
    Store(tmp_path, keep=5).write(Snapshot(100))
    Store(tmp_path, keep=5).write(Snapshot(3))
    assert steps(Store(tmp_path)) == [3, 100]


def test_a_store_that_only_reads_touches_nothing(tmp_path):
    assert Store(tmp_path / "nothing").latest() is None
    assert Store(tmp_path / "nothing").read_latest() is None
    assert Store(tmp_path / "nothing").finished() is None
    assert os.listdir(tmp_path) == []


def test_parts_and_files_of_other_processes_are_in_one_commit(tmp_path):
    store = Store(tmp_path)
    with store.open_commit(7) as commit:
        parts = []
        for number in range(2):
            code = (
                "import sys, json, numpy as np; from tfdist.state.store import write_part;"
                f"print(json.dumps(write_part(sys.argv[1], 'ps-{number}',"
                f"{{'t{number}': np.full(3, {number})}})))"
            )
            done = subprocess.run(
                [sys.executable, "-c", code, commit.directory], capture_output=True, check=True
            )
            parts.append(json.loads(done.stdout))
        with open(commit.path("table.data-00000-of-00001"), "wb") as file:
            file.write(b"rows")
        for part in parts:
            commit.add_part(part)
        commit.add_file("table.data-00000-of-00001")
        commit.write({"epoch": 2}, {"dense": np.ones(2)})
        assert Store(tmp_path).commits() == []
    found = Store(tmp_path).read_latest()
    assert found is not None
    assert sorted(found[1].arrays) == ["dense", "t0", "t1"]
    assert found[1].arrays["t1"].tolist() == [1, 1, 1]
    path = found[0].path("table.data-00000-of-00001")
    with open(path, "rb") as file:
        assert file.read() == b"rows"
    with open(path, "wb") as file:
        file.write(b"ROWS")
    with pytest.raises(DamagedCommitError, match="table.data-00000-of-00001"):
        store.check(found[0])


def test_a_part_that_is_not_there_is_named(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="gone.bin"), store.open_commit(1) as commit:
        commit.add_part({"name": "gone.bin", "size": 3, "crc32": 0})
    with pytest.raises(StoreError, match="short.bin of 3 bytes"), store.open_commit(1) as commit:
        write_part(commit.directory, "short", {})
        commit.add_part({"name": "short.bin", "size": 3, "crc32": 0})
    assert store.commits() == []


def test_a_value_in_two_parts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'w'"), Store(tmp_path).open_commit(1) as commit:
        commit.add_part(write_part(commit.directory, "a", {"w": np.ones(1)}))
        commit.add_part(write_part(commit.directory, "b", {"w": np.ones(1)}))
    assert Store(tmp_path).commits() == []


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "manifest.json", "a\nb"])
def test_names_that_lead_out_of_a_commit_are_refused(tmp_path, name):
    with pytest.raises(ConfigError), Store(tmp_path).open_commit(1) as commit:
        commit.add_file(name)
    with pytest.raises(ConfigError), Store(tmp_path).open_commit(1) as commit:
        commit.add_part({"name": name, "size": 0, "crc32": 0})


def test_an_exception_while_a_commit_is_open_takes_it_back(tmp_path):
    store = Store(tmp_path)
    store.write(sample(1))
    with pytest.raises(KeyError), store.open_commit(2) as commit:
        commit.write({}, {"w": np.ones(5)})
        raise KeyError("peer")
    assert steps(store) == [1]
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))


def test_a_finished_run_leaves_its_facts_only(tmp_path):
    store = Store(tmp_path)
    store.write(sample(1))
    store.finish({"epochs": 3})
    assert Store(tmp_path).finished() == {"epochs": 3}
    assert Store(tmp_path).latest() is None
    assert os.listdir(tmp_path) == ["finished.json"]


def test_a_store_that_has_finished_may_begin_another_run(tmp_path):
    store = Store(tmp_path)
    store.write(sample(1))
    store.finish()
    assert store.write(sample(2)).incarnation == 2
    assert steps(Store(tmp_path)) == [2]
    assert Store(tmp_path).finished() is None


def test_a_finished_run_may_keep_its_commits(tmp_path):
    store = Store(tmp_path)
    store.write(sample(1))
    store.finish({"epochs": 3}, keep=True)
    assert Store(tmp_path).finished() == {"epochs": 3}
    assert steps(Store(tmp_path)) == [1]


def test_a_finished_run_stays_finished_until_a_later_one_commits(tmp_path):
    store = Store(tmp_path)
    store.write(sample(1))
    store.finish({"epochs": 3}, keep=True)
    again = Store(tmp_path)
    again.acquire()
    assert again.finished() == {"epochs": 3}
    third = Store(tmp_path)
    assert third.acquire() == 3
    assert third.finished() == {"epochs": 3}
    third.write(sample(2))
    assert Store(tmp_path).finished() is None
    assert steps(Store(tmp_path)) == [2, 1]
    third.finish({"epochs": 4})
    assert Store(tmp_path).finished() == {"epochs": 4}


def test_keep_has_to_be_at_least_one(tmp_path):
    with pytest.raises(ConfigError, match="keep=0"):
        Store(tmp_path, keep=0)


def test_the_state_room_needs_no_tensorflow_for_local_files():
    code = (
        "import sys, tempfile; from tfdist.state.writer import AsyncWriter;"
        "from tfdist.state.store import Store, Snapshot; s = Store(tempfile.mkdtemp());"
        "s.write(Snapshot(1)); assert s.latest(); assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_background_writer_is_durable_when_it_closes(tmp_path):
    seen = []
    store = Store(tmp_path)
    with AsyncWriter(store, on_commit=lambda commit: seen.append(commit.step)) as writer:
        writer.submit(sample(1))
        assert writer.wait(20)
        writer.submit(sample(2))
    assert seen == [1, 2]
    assert writer.last == Store(tmp_path).latest()


def test_a_newer_commit_takes_the_place_of_the_one_that_waits(tmp_path, caplog):
    store = Store(tmp_path, keep=9)
    gate = threading.Event()

    def slow(store: Store):
        gate.wait(20)
        return store.write(sample(1))

    writer = AsyncWriter(store)
    writer.submit(slow)
    for step in (2, 3, 4):
        writer.submit(sample(step))
    assert not writer.wait(0.05)
    gate.set()
    writer.close()
    assert steps(store) == [4, 1]
    assert writer.skipped == 2
    # Said once, and counted at the end.
    told = [message for message in caplog.messages if "skipped" in message]
    assert len(told) == 2 and told[1].startswith("2 commits were skipped"), told


def paced_seconds(store: Store, then: Callable[[AsyncWriter], None], **given: float) -> float:
    """Returns the wall time by which a commit of 24 MB is durable."""
    done: list[float] = []
    writer = AsyncWriter(store, on_commit=lambda _: done.append(time.perf_counter()))
    began = time.perf_counter()
    writer.submit(Snapshot(1, {}, {"w": np.ones(3 << 20)}), **given)
    then(writer)
    while not done:
        time.sleep(0.01)
    writer.close()
    return done[0] - began


def test_a_commit_takes_a_small_share_of_a_core_unless_somebody_waits_for_it(tmp_path):
    def nothing(writer: AsyncWriter) -> None:
        """Training goes on."""

    def newer(writer: AsyncWriter) -> None:
        writer.submit(lambda store: None)

    before = time.thread_time(), time.process_time()
    paced = paced_seconds(Store(tmp_path / "paced"), nothing)
    mine, all_threads = time.thread_time() - before[0], time.process_time() - before[1]
    assert all_threads - mine < 0.1 * paced
    # What training has paid for the snapshot is made up for.
    assert paced_seconds(Store(tmp_path / "spent"), nothing, spent=0.1) > 1.6
    for name, impatient in (("wait", AsyncWriter.wait), ("newer", newer)):
        assert paced_seconds(Store(tmp_path / name), impatient, spent=60.0) < 20.0


def test_what_is_lent_is_copied_at_once_into_memory_that_is_used_again(tmp_path):
    class Lent(np.ndarray):
        """Can be asked whether somebody holds it."""

    addresses = set()
    with AsyncWriter(Store(tmp_path)) as writer:
        for step in (1, 2):
            lent = np.full((3, 5), float(step)).T.view(Lent)
            held = weakref.ref(lent)
            arrays = {"w": lent, "s": np.array([b"a"], object), "n": np.array(step, np.int8)}
            writer.submit(Snapshot(step, {}, arrays), spent=60.0, is_lent=True)
            del lent, arrays
            deadline = time.monotonic() + 20
            while held() is not None and time.monotonic() < deadline:
                time.sleep(0.001)
            assert held() is None and not writer.is_idle
            address = writer._memory["w"].ctypes.data
            writer.wait()
            found = Store(tmp_path).read_latest()
            assert found is not None and found[1].step == step
            assert found[1].arrays["w"].tolist() == [[step] * 3] * 5
            assert found[1].arrays["s"].tolist() == [b"a"] and found[1].arrays["n"] == step
            addresses.add(address)
    assert len(addresses) == 1


def test_what_went_wrong_in_the_background_is_raised_at_the_next_submit(tmp_path):
    (tmp_path / "file").write_text("")
    writer = AsyncWriter(Store(tmp_path / "file"))
    writer.submit(sample(1))
    with pytest.raises(StoreError, match="a directory at"):
        writer.wait(20)
    writer.submit(sample(2))
    while not writer.is_idle:
        pass
    with pytest.raises(StoreError, match="a directory at"):
        writer.submit(sample(3))


def test_a_program_that_ends_completes_what_it_submitted_at_once(tmp_path):
    code = (
        "import sys, numpy as np; from tfdist.state.writer import AsyncWriter;"
        "from tfdist.state.store import Store, Snapshot;"
        "state = Snapshot(1, {}, {'w': np.ones(1 << 20)});"
        "AsyncWriter(Store(sys.argv[1])).submit(state, spent=60.0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert steps(Store(tmp_path)) == [1]
