"""Old writers that are stopped anywhere and wake up later."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.support.states import assert_same
from tests.support.states import sample
from tfdist.errors import StaleWriterError
from tfdist.errors import StoreError
from tfdist.errors import TfdistError
from tfdist.state.filesystem import LocalFiles
from tfdist.state.store import Store


class StoppedFiles(LocalFiles):
    """Local files of a process that stops before its n-th call, until `go_on`."""

    def __init__(self, stop_before: int, renames: bool):
        super().__init__(renames=renames)
        self.calls = 0
        self.stop_before = stop_before
        self.has_stopped = threading.Event()
        self.go_on = threading.Event()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self.stop_before:
                self.has_stopped.set()
                assert self.go_on.wait(30)
            return found(*args, **kwargs)

        return call


def stopped(
    directory, number: int, renames: bool, act: Callable[[Store], object], meanwhile: Callable
) -> BaseException | str | None:
    """Stops `act` of a store before its `number`-th call, and lets `meanwhile` happen.

    Returns:
        What `act` raised, None if nothing, "too late" where it has fewer calls.
    """
    store = open_store(directory, renames)
    store.write(sample(1))
    store.write(sample(2))
    files = StoppedFiles(number, renames)
    store._files = files
    assert store._fence is not None
    store._fence._files = files
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            act(store)
            raised.append(None)
        except TfdistError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not files.has_stopped.wait(0.002):
        if not thread.is_alive():
            thread.join()
            return "too late"
    meanwhile()
    files.go_on.set()
    thread.join(30)
    return raised[0]


def open_store(directory, renames: bool) -> Store:
    store = Store(directory)
    store._files = LocalFiles(renames=renames)
    return store


def each_moment(tmp_path, renames, act, meanwhile) -> list[BaseException | None]:
    """Does it once for each call at which the old writer can be stopped."""
    results = []
    for number in itertools.count(1):
        directory = tmp_path / f"run-{number}"
        result = stopped(directory, number, renames, act, lambda d=directory: meanwhile(d))
        if result == "too late":
            return results
        results.append(result)
    raise AssertionError


@pytest.mark.parametrize("renames", [True, False])
def test_a_writer_stopped_at_any_moment_cannot_change_what_a_newer_one_sees(tmp_path, renames):
    seen = {}

    def go_on_from_there(directory):
        store = open_store(directory, renames)
        store.acquire()
        found = store.read_latest()
        assert found is not None
        seen[directory] = found[0]
        assert_same(found[1], sample(found[0].step))
        # Nothing is written yet: the old one wakes up before.

    results = each_moment(tmp_path, renames, lambda store: store.write(sample(3)), go_on_from_there)
    assert len(results) > 15
    for number, result in enumerate(results, 1):
        directory = tmp_path / f"run-{number}"
        reader = open_store(directory, renames)
        assert reader.latest() == seen[directory], f"stopped before call {number}: {result!r}"
        if seen[directory].step == 2:
            # Its commit came too late, and it was told so.
            assert isinstance(result, StaleWriterError), f"call {number}: {result!r}"
    assert [commit.step for commit in seen.values()] == sorted(c.step for c in seen.values())
    assert {commit.step for commit in seen.values()} == {2, 3}


@pytest.mark.parametrize("renames", [True, False])
def test_a_writer_stopped_at_any_moment_leaves_nothing_to_a_newer_one_that_commits(
    tmp_path, renames
):
    def commit_anew(directory):
        store = open_store(directory, renames)
        store.acquire()
        found = store.read_latest()
        assert found is not None
        store.write(sample(found[1].step + 100))

    results = each_moment(tmp_path, renames, lambda store: store.write(sample(3)), commit_anew)
    for number in range(1, len(results) + 1):
        directory = tmp_path / f"run-{number}"
        found = open_store(directory, renames).read_latest()
        assert found is not None and found[1].step in (102, 103)
        assert_same(found[1], sample(found[1].step))
        last = open_store(directory, renames)
        last.write(sample(200))
        assert [c.step for c in last.commits()] == [200, found[1].step]
        assert len(os.listdir(directory)) == 3, os.listdir(directory)


@pytest.mark.parametrize("renames", [True, False])
def test_a_writer_stopped_while_it_finishes_cannot_take_a_newer_ones_commits(tmp_path, renames):
    found = {}

    def go_on(directory):
        store = open_store(directory, renames)
        finished = store.finished()
        if finished is None:
            store.acquire()
            finished = store.finished()
        found[directory] = finished
        if finished is None:
            latest = store.read_latest()
            assert latest is not None and latest[1].step == 2
            store.write(sample(3))

    results = each_moment(tmp_path, renames, lambda store: store.finish({"epochs": 1}), go_on)
    for number, result in enumerate(results, 1):
        directory = tmp_path / f"run-{number}"
        reader = open_store(directory, renames)
        if found[directory] is None:
            assert isinstance(result, StaleWriterError), f"call {number}: {result!r}"
            latest = reader.latest()
            assert latest is not None and latest.step == 3
            assert reader.finished() is None
        else:
            assert result is None
            assert reader.finished() == {"epochs": 1}
    assert {value is None for value in found.values()} == {True, False}


def test_incarnations_that_begin_together_have_numbers_of_their_own(tmp_path):
    numbers, errors = [], []
    gate = threading.Barrier(8)

    def begin() -> None:
        gate.wait()
        for _ in range(5):
            try:
                numbers.append(Store(tmp_path).acquire())
            except StoreError as error:
                errors.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(numbers) == len(set(numbers))
    assert len(numbers) + len(errors) == 40
    assert len(numbers) >= 8


OLD = """
import os, signal, sys
from tfdist.state.filesystem import LocalFiles
from tfdist.state.store import Snapshot, Store

store = Store(sys.argv[1])
store.write(Snapshot(1, {"by": "old"}))
rename = LocalFiles.rename

def late(self, source, target):
    print("about to rename", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    rename(self, source, target)

LocalFiles.rename = late
store.write(Snapshot(2, {"by": "old"}))
"""


def test_a_process_that_was_stopped_before_its_rename_ends_as_stale(tmp_path):
    old = subprocess.Popen(
        [sys.executable, "-c", OLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert old.stdout is not None
        assert old.stdout.readline() == "about to rename\n"
        deadline = time.monotonic() + 20
        while _state(old.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        new = Store(tmp_path)
        new.acquire()
        assert [commit.step for commit in new.commits()] == [1]
        os.kill(old.pid, signal.SIGCONT)
        _, errors = old.communicate(timeout=20)
    finally:
        old.kill()
    assert old.returncode == 1
    assert "StaleWriterError" in errors.splitlines()[-1]
    assert [commit.step for commit in Store(tmp_path).commits()] == [1]


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("act", ["write", "finish", "acquire"])
def test_a_stale_store_stays_stale(tmp_path, act):
    old = Store(tmp_path)
    old.write(sample(1))
    Store(tmp_path).acquire()
    for _ in range(2):
        if act == "write":
            with pytest.raises(StaleWriterError, match="incarnation 2 has begun"):
                old.write(sample(2))
        elif act == "finish":
            with pytest.raises(StaleWriterError, match="incarnation 2 has begun"):
                old.finish()
        else:
            assert old.acquire() == 1
    assert [commit.step for commit in Store(tmp_path).commits()] == [1]
