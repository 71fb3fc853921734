from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.states import assert_same
from tests.support.states import sample
from tfdist.errors import DamagedCommitError
from tfdist.errors import StoreError
from tfdist.state.filesystem import LocalFiles
from tfdist.state.filesystem import mount_type
from tfdist.state.manifest import Manifest
from tfdist.state.store import Snapshot
from tfdist.state.store import Store


def two_commits(directory) -> Store:
    store = Store(directory, keep=2)
    store.write(sample(1))
    store.write(sample(2))
    return store


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


DAMAGES = {
    "flip first": lambda path: flip(path, 0),
    "flip middle": lambda path: flip(path, path.stat().st_size // 2),
    "flip last": lambda path: flip(path, -1),
    "cut last": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "delete": lambda path: path.unlink(),
    "append": lambda path: path.open("ab").write(b"\n"),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "link": lambda path: (shutil.move(path, path.parent.parent), path.symlink_to("/dev/null")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["manifest.json", "facts.json", "main.bin"])
def test_a_damaged_file_makes_readers_fall_back_and_say_why(tmp_path, name, damage, caplog):
    store = two_commits(tmp_path)
    newest = store.commits()[0]
    DAMAGES[damage](tmp_path / newest.name / name)
    reader = Store(tmp_path)
    with caplog.at_level(logging.WARNING, "absl"):
        commit = reader.latest()
        assert commit is not None and commit.step == 1
        reader.latest()
        found = reader.read_latest(mapped=True)
        assert found is not None
        assert_same(found[1], sample(1))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert newest.name in messages[0] and name in messages[0]
    with pytest.raises(DamagedCommitError, match=name):
        reader.read(newest)


def test_any_flipped_byte_of_a_commit_is_noticed(tmp_path):
    store = Store(tmp_path)
    commit = store.write(Snapshot(3, {"epoch": 1}, {"w": np.arange(3.0)}, {"b": b"x"}))
    missed = []
    for name in os.listdir(commit.directory):
        path = tmp_path / commit.name / name
        before = path.read_bytes()
        for position in range(len(before)):
            flip(path, position)
            try:
                store.read(commit)
                missed.append((name, position))
            except DamagedCommitError:
                pass
            path.write_bytes(before)
    assert missed == []


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"format": "other"}', '{"manifest": {"format": 1}}', "[" * 9999],
)
def test_a_foreign_manifest_is_passed_over(tmp_path, text):
    store = two_commits(tmp_path)
    (tmp_path / store.commits()[0].name / "manifest.json").write_text(text)
    commit = Store(tmp_path).latest()
    assert commit is not None and commit.step == 1


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/x", ".x"])
def test_a_manifest_cannot_name_files_outside_its_directory(tmp_path, name):
    store = two_commits(tmp_path)
    newest = store.commits()[0]
    path = tmp_path / newest.name / "manifest.json"
    (tmp_path / "secret").write_bytes(b"")
    manifest = Manifest.from_bytes(path.read_bytes())
    file = manifest.files["main.bin"]
    forged = Manifest(2, 1, 2, {**manifest.files, name: type(file)(name, 0, 0)})
    path.write_bytes(forged.to_bytes())
    with pytest.raises(DamagedCommitError, match="not well formed"):
        store.read(newest)


def test_values_that_reach_beyond_their_file_are_refused(tmp_path):
    store = two_commits(tmp_path)
    newest = store.commits()[0]
    path = tmp_path / newest.name / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes())
    for change in ({"offset": 10**9}, {"size": 1}, {"dtype": "O"}, {"dtype": "object_"}):
        file = manifest.files["main.bin"]
        values = list(file.values)
        fields = {f: getattr(values[0], f) for f in values[0].__dataclass_fields__}
        values[0] = type(values[0])(**{**fields, **change})
        changed = type(file)(file.name, file.size, file.crc32, tuple(values))
        forged = Manifest(2, 1, 2, {**manifest.files, "main.bin": changed})
        path.write_bytes(forged.to_bytes())
        with pytest.raises(DamagedCommitError):
            store.read(newest)


def test_a_commit_under_a_wrong_name_does_not_count(tmp_path):
    store = two_commits(tmp_path)
    newest = store.commits()[0]
    os.rename(newest.directory, tmp_path / newest.name.replace("000002", "000009"))
    commit = Store(tmp_path).latest()
    assert commit is not None and commit.step == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EREMOTEIO, errno.ETIMEDOUT])
def test_a_file_that_cannot_be_read_now_is_no_damage(tmp_path, number):
    class Unreadable(LocalFiles):
        def chunks(self, path):
            if path.endswith("main.bin"):
                raise OSError(number, os.strerror(number), path)
            return super().chunks(path)

    two_commits(tmp_path)
    reader = Store(tmp_path)
    reader._files = Unreadable()
    for read in (reader.latest, reader.read_latest):
        with pytest.raises(StoreError, match="main.bin") as error:
            read()
        assert not isinstance(error.value, DamagedCommitError)


def test_a_reader_whose_commits_are_thinned_away_meanwhile_finds_the_newer_ones(tmp_path, caplog):
    class Slow(LocalFiles):
        def chunks(self, path):
            if writer is not None and path.endswith("manifest.json"):
                for step in range(3, 9):
                    writer.write(sample(step))
                takes.append(path)
            return super().chunks(path)

    writer, takes = None, []
    writer_store = two_commits(tmp_path)
    reader = Store(tmp_path)
    reader._files = Slow()
    writer = writer_store
    with caplog.at_level(logging.WARNING, "absl"):
        # The first list is gone by the time that it is read, the second is read in time.
        commits = reader._candidates()
        first = next(commits)
        with pytest.raises(DamagedCommitError):
            reader.read(first)
        writer = None
        assert len(takes) == 1
        found = reader.read_latest()
    assert found is not None and found[1].step == 8
    assert [commit.step for commit in commits] == [1, 8, 7]
    assert caplog.records == []


def test_a_commit_in_progress_that_was_looked_at_is_kept_when_it_is_complete(tmp_path):
    store = Store(tmp_path)
    store._files = LocalFiles(renames=False)
    store.write(sample(1))
    with store.open_commit(2) as commit:
        commit.write({}, sample(2).arrays)
        latest = store.latest()
        assert latest is not None and latest.step == 1
    assert [commit.step for commit in store.commits()] == [2, 1]


def test_a_record_that_is_removed_while_readers_look_makes_them_look_again(tmp_path):
    class Racing(LocalFiles):
        def names(self, path):
            names = super().names(path)
            if not os.path.exists(stray):
                # Between the reader's look at the names and at the records.
                Store(path).acquire()
                shutil.copytree(newest, stray)
            return names

    two_commits(tmp_path)
    newest = Store(tmp_path).commits()[0].directory
    stray = newest.replace("step-000000002-i1-c2", "step-000000009-i1-c9")
    reader = Store(tmp_path)
    reader._files = Racing()
    assert [commit.step for commit in reader.commits()] == [2, 1]


def test_a_file_in_the_place_of_a_commit_is_passed_over(tmp_path):
    store = two_commits(tmp_path)
    newest = store.commits()[0]
    shutil.rmtree(newest.directory)
    (tmp_path / newest.name).write_text("")
    latest = Store(tmp_path).latest()
    assert latest is not None and latest.step == 1
    store.write(sample(3))
    store.write(sample(4))
    assert [commit.step for commit in store.commits()] == [4, 3]
    assert len(os.listdir(tmp_path)) == 3


def test_when_no_commit_is_sound_that_is_said(tmp_path, caplog):
    store = two_commits(tmp_path)
    for commit in store.commits():
        (tmp_path / commit.name / "main.bin").unlink()
    with caplog.at_level(logging.ERROR, "absl"):
        assert Store(tmp_path).read_latest() is None
    assert "none of the 2 commits" in caplog.text


def test_a_damaged_commit_is_not_counted_among_those_kept(tmp_path):
    two_commits(tmp_path)
    newest = Store(tmp_path).commits()[0]
    (tmp_path / newest.name / "main.bin").unlink()
    store = Store(tmp_path, keep=2)
    store.acquire()
    assert store.read_latest() is not None
    store.write(sample(3))
    assert [commit.step for commit in store.commits()] == [3, 1]


def test_damaged_files_of_the_fence_stop_nobody(tmp_path):
    two_commits(tmp_path)
    for path in tmp_path.glob("incarnation-*.json"):
        path.write_text("{")
    (tmp_path / "finished.json").write_text('{"incarnation": "x"}')
    store = Store(tmp_path)
    assert store.finished() is None
    assert store.acquire() == 2
    store.write(sample(3))
    assert [commit.step for commit in store.commits()] == [3, 2]


COMMITTER = """
import os
import sys
import numpy as np
from tfdist.state.store import Snapshot, Store

def commit_for_ever(directory):
    store = Store(directory, keep=2)
    store.acquire()
    found = store.read_latest()
    step = found[1].step if found else 0
    print(os.getpid(), step, flush=True)
    while True:
        step += 1
        array = np.full(1 << 18, step, "float32")
        arrays = {"a": array, "b": array[: step % 9]}
        store.write(Snapshot(step, {"step": step}, arrays, {"c": b"x"}))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        commit_for_ever(line.rstrip())
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_after_a_kill_at_any_moment_the_newest_commit_is_whole(tmp_path):
    chance = random.Random(5)
    directory = tmp_path / "run"
    before = 0
    # Each child is forked from a process that has imported all.
    with subprocess.Popen(
        [sys.executable, "-c", COMMITTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for _ in range(30):
            print(directory, file=parent.stdin, flush=True)
            child, began_at = map(int, parent.stdout.readline().split())
            time.sleep(chance.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            assert began_at == before
            found = Store(directory).read_latest()
            if found is not None:
                commit, snapshot = found
                assert commit == Store(directory).commits()[0], "the newest is damaged"
                before = snapshot.step
                assert snapshot.facts == {"step": before}
                assert snapshot.arrays["a"].tolist() == [before] * (1 << 18)
            names = os.listdir(directory)
            # Three commits, one on its way in, one out, and two tickets, each with one on its way.
            assert len(names) <= 3 + 1 + 1 + 4, names
        parent.stdin.close()
    assert before > 30
    store = Store(directory)
    store.acquire()
    assert not any(name.startswith(".") for name in os.listdir(directory))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs privileges")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_named_and_leaves_the_commits_before_it(small_disk):
    store = Store(small_disk, keep=2)
    store.write(Snapshot(1, {}, {"w": np.ones(1 << 16)}))
    with pytest.raises(StoreError, match="space to write the commit of step 2") as error:
        store.write(Snapshot(2, {}, {"w": np.ones(1 << 20)}))
    assert "No space left" in str(error.value)
    assert not any(name.startswith(".") for name in os.listdir(small_disk))
    latest = Store(small_disk).latest()
    assert latest is not None and latest.step == 1
    store.write(Snapshot(3, {}, {"w": np.ones(1 << 16)}))
    assert [commit.step for commit in store.commits()] == [3, 1]


def test_a_disk_that_cannot_be_written_is_named(small_disk):
    Store(small_disk).write(sample(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert Store(small_disk).latest() is not None
    with pytest.raises(StoreError, match="permission to") as error:
        Store(small_disk).write(sample(2))
    assert str(small_disk) in str(error.value)


def test_mounted_buckets_are_known_by_their_mount():
    mounts = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 22 0:20 / /gcs rw - fuse.gcsfuse gcsfuse rw\n"
        "31 22 0:21 / /mnt/my\\040bucket rw shared:1 - fuse gcsfuse rw\n"
        "32 22 0:22 / /mnt rw - nfs4 server:/x rw\n"
    )
    assert mount_type(mounts, "/gcs/bucket/run") == "fuse.gcsfuse"
    assert mount_type(mounts, "/gcsx") == "ext4"
    assert mount_type(mounts, "/mnt/my bucket") == "fuse"
    assert mount_type(mounts, "/mnt/other") == "nfs4"
    assert mount_type("", "/x") == ""


def test_a_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for call in (Store(tmp_path / "file").acquire, Store(tmp_path / "file").latest):
        with pytest.raises(StoreError, match="a directory at"):
            call()
