"""Commits: a training state in a directory, whole or not at all.

    store = Store("backup", keep=2)
    found = store.read_latest()                      # (Commit, Snapshot), or None
    store.write(Snapshot(step=12, facts={"epoch": 1}, arrays={"w": w}))
    store.finish(facts={"epochs": 3})

| name in the directory | is |
|---|---|
| `step-000000012-i3-c7/` | the state after 12 steps, commit 7 of incarnation 3 |
| `incarnation-3-1f2e3d4c.json` | who writes, and which commits of older ones count (`fence.py`) |
| `finished.json` | the run has ended; nothing is left to do |
| `.writing-...`, `.removing-...` | on its way in or out; swept by the next who writes |

A commit is written under a hidden name, made durable and renamed. Object stores rename nothing,
mounted ones neither: there the manifest, which a commit must have to count, is written last. Many
may read while one writes. All but `latest`, `read` and `check` are quick.

Values that live on other hosts are written there, straight into the commit:

    with store.open_commit(step=12) as commit:       # the chief
        parts = tell_all(commit.directory)           # each: write_part(directory, "ps-0", arrays)
        for part in parts:
            commit.add_part(part)
        commit.add_file("table.index")               # what others wrote to commit.path(name)
        commit.write(facts={"epoch": 1}, arrays={"w": w})
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.errors import ConfigError
from tfdist.errors import DamagedCommitError
from tfdist.errors import TfdistError
from tfdist.state import facts as plain_facts
from tfdist.state import reading
from tfdist.state.commit import Commit
from tfdist.state.commit import OpenCommit
from tfdist.state.commit import Snapshot
from tfdist.state.commit import write_part
from tfdist.state.fence import CommitName
from tfdist.state.fence import Fence
from tfdist.state.fence import Survey
from tfdist.state.fence import explained
from tfdist.state.fence import survey
from tfdist.state.filesystem import HIDDEN
from tfdist.state.filesystem import file_system
from tfdist.state.manifest import MANIFEST

__all__ = ["Commit", "OpenCommit", "Snapshot", "Store", "write_part"]

log = logging.getLogger("absl")

#: What says that a file is not what was written; others say that it cannot be read now.
_DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ESTALE,
    errno.EIO,
}

_WRITING = f"{HIDDEN}writing-"
_REMOVING = f"{HIDDEN}removing-"


class Store:
    """The commits of one run.

    Making one touches nothing. The first commit, or `acquire`, makes this process the one that
    writes, and fences off all that wrote before.

    Args:
        directory: Where they are: a local path, or a URL such as `gs://bucket/run`.
        keep: How many of the newest stay when a new one is complete.

    Raises:
        ConfigError: `keep` is less than 1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2):
        if keep < 1:
            raise ConfigError("keep to be 1 or more", f"keep={keep}", "keep at least one commit")
        path = os.fspath(directory)
        self.directory = path.rstrip("/") if "://" in path else os.path.abspath(path)
        self._keep = keep
        self._files = file_system(self.directory)
        self._fence: Fence | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._open: set[str] = set()
        self._damaged: dict[str, str] = {}

    @property
    def incarnation(self) -> int:
        """The number of this writer; 0 while it has not written and not acquired."""
        return self._fence.number if self._fence else 0

    def acquire(self) -> int:
        """Becomes the one that writes; the commits that are there now are those to go on from.

        Call it before reading what to go on from. A second call does nothing.

        Returns:
            The number of this incarnation, larger than all before.

        Raises:
            StoreError: The directory cannot be written.
        """
        with self._lock, self._explained("take over the directory of the commits"):
            if self._fence is None:
                self._files.make_directory(self.directory)
                fence = Fence(self._files, self.directory)
                found = fence.take()
                self._fence = fence
                self._sweep(found, thin=False)
            return self._fence.number

    def confirm(self) -> None:
        """Makes sure that this process still is the one that writes.

        Raises:
            StaleWriterError: A newer incarnation writes here.
            StoreError: The directory cannot be read.
        """
        self.acquire()
        assert self._fence is not None
        with self._explained("look who writes the commits"):
            self._fence.check()

    def write(self, snapshot: Snapshot, *, pace: Callable[[], None] | None = None) -> Commit:
        """Commits `snapshot`, and removes commits that need not be kept.

        Args:
            snapshot: The state.
            pace: Called now and then, to write no faster than it returns.

        Raises:
            StaleWriterError: A newer incarnation writes here.
            StoreError: It cannot be written. The commits before it are as they were.
        """
        with self.open_commit(snapshot.step) as commit:
            commit.write(snapshot.facts, snapshot.arrays, snapshot.blobs, pace=pace)
        return commit.result

    @contextlib.contextmanager
    def open_commit(self, step: int) -> Iterator[OpenCommit]:
        """Opens a commit to write into; it appears when the context ends without an exception.

        Args:
            step: Number of training steps that are in it.

        Raises:
            StaleWriterError: A newer incarnation writes here.
            StoreError: It cannot be written. The commits before it are as they were.
        """
        self.acquire()
        assert self._fence is not None
        with self._explained(f"write the commit of step {step}"):
            self._fence.check()
            with self._lock:
                self._count += 1
                name = CommitName(self._fence.number, self._count, step)
            # Nothing is renamed on object stores.
            prefix = _WRITING if self._files.renames else ""
            aside = os.path.join(self.directory, prefix + name.text)
            self._open.add(os.path.basename(aside))
            try:
                self._files.make_directory(aside)
                commit = OpenCommit(self._files, aside, self._commit(name))
                yield commit
                self._seal(commit)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self._files.remove_directory(aside)
                if isinstance(error, OSError) and error.errno == errno.ENOENT:
                    # A newer incarnation sweeps what older ones were writing.
                    self._fence.check()
                raise
            finally:
                self._open.discard(os.path.basename(aside))
            # What the commit needs is done. Whoever begins from here on, finds it.
            self._damaged.pop(name.text, None)
            self._sweep(self._fence.check(), thin=True)

    def commits(self) -> list[Commit]:
        """Returns the commits that count, newest first; whether they are sound is not looked at.

        Raises:
            StoreError: The directory cannot be read.
        """
        with self._explained("list the commits"):
            found = survey(self._files, self.directory)
        return [self._commit(name) for name in reversed(found.commits)]

    def latest(self) -> Commit | None:
        """Returns the newest commit that is as it was written, None where there is none.

        All of it is read to compare checksums. A damaged one is passed over with a message.

        Raises:
            StoreError: The directory cannot be read.
        """
        return next((commit for commit in self._candidates() if self._is_sound(commit)), None)

    def check(self, commit: Commit) -> None:
        """Compares all files of a commit with their checksums.

        Raises:
            DamagedCommitError: One differs.
        """
        for _ in self._verified(commit, mapped=None):
            pass

    def read(self, commit: Commit, *, mapped: bool = False) -> Snapshot:
        """Returns what was committed, compared with its checksums.

        Args:
            commit: One of `commits()`, or one that another process named: see `commit`.
            mapped: Whether arrays are views of the file, which cannot be written to, instead of
                memory of this process. Local files only; others are read.

        Raises:
            DamagedCommitError: A file is missing, too short, or not as it was written.
            StoreError: A file cannot be read.
        """
        arrays: dict[str, np.ndarray] = {}
        blobs: dict[str, bytes] = {}
        told: dict[str, Any] = {}
        for part in self._verified(commit, mapped=mapped):
            arrays.update(part.arrays)
            blobs.update(part.blobs)
            told.update(part.facts)
        return Snapshot(commit.step, told, arrays, blobs)

    def read_latest(self, *, mapped: bool = False) -> tuple[Commit, Snapshot] | None:
        """Returns the newest sound commit and what is in it, None where there is none.

        Damaged ones are passed over, with one message each that says what is wrong.

        Raises:
            StoreError: The directory cannot be read.
        """
        count = 0
        for commit in self._candidates():
            try:
                return commit, self.read(commit, mapped=mapped)
            except DamagedCommitError as error:
                self._note_damage(commit, error)
                count += 1
        if count:
            log.error("none of the %d commits in %s is sound", count, self.directory)
        return None

    def commit(self, name: str) -> Commit:
        """Returns the commit that has the name `name` in this directory.

        For tasks that read what the chief chose: they get `Commit.name` from it.

        Raises:
            ConfigError: It is not the name of a commit.
        """
        parsed = CommitName.parse(name)
        if parsed is None:
            raise ConfigError("the name of a commit", repr(name), "pass Commit.name")
        return self._commit(parsed)

    def finish(self, facts: Mapping[str, Any] | None = None, *, keep: bool = False) -> None:
        """Notes that the run has ended, and removes its commits.

        A store that writes again after that is another incarnation.

        Args:
            facts: What `finished` returns from now on.
            keep: Whether the commits stay.

        Raises:
            StaleWriterError: A newer incarnation writes here.
            StoreError: The directory cannot be written.
        """
        self.acquire()
        assert self._fence is not None
        with self._explained("note the end of the run"):
            found = self._fence.check()
            kept = found.commits if keep else ()
            self._fence.finish(kept, plain_facts.plain(facts or {}))
            # Whoever begins from here on, finds the run finished, and goes on from no commit.
            self._sweep(self._fence.check(), thin=False)
            # `finished.json` says all that the record of this incarnation did.
            self._fence.resign()
            self._fence, self._count = None, 0

    def finished(self) -> dict[str, Any] | None:
        """Returns the facts of a run that has ended, None while it has not.

        A run is open again as soon as a later incarnation has committed something.

        Raises:
            StoreError: The directory cannot be read.
        """
        with self._explained("look whether the run has ended"):
            end = survey(self._files, self.directory).finished
        return None if end is None else dict(end["facts"])

    def _seal(self, commit: OpenCommit) -> None:
        assert self._fence is not None
        if not self._files.renames:
            self._fence.check()
            commit.seal()
            return
        commit.seal()
        self._fence.check()
        self._files.rename(commit.directory, commit.result.directory)

    def _sweep(self, found: Survey, thin: bool) -> None:
        """Removes what nobody needs; what is left behind in vain is left to the next time."""
        assert self._fence is not None
        sound = [name for name in found.commits if name.text not in self._damaged]
        goes = set(found.strays)
        if thin:
            goes |= set(found.commits) - set(sound[-self._keep :])
        for name in sorted(goes):
            if name.text not in self._open and name.incarnation <= self._fence.number:
                self._remove(name.text)
        for text in found.names:
            written = CommitName.parse(text.removeprefix(_WRITING))
            is_old = written is not None and written.incarnation <= self._fence.number
            if text.startswith(_REMOVING) or (
                text.startswith(_WRITING) and is_old and text not in self._open
            ):
                self._try(self._files.remove_directory, text)
            elif self._fence.is_old(text):
                self._try(self._files.remove, text)

    def _remove(self, text: str) -> None:
        path = os.path.join(self.directory, text)
        if self._files.renames:
            gone = os.path.join(self.directory, _REMOVING + text)
            with contextlib.suppress(OSError):
                os.rename(path, gone)
                path = gone
        else:
            # Without it the rest does not count.
            self._try(self._files.remove, f"{text}/{MANIFEST}")
        self._try(self._files.remove_directory, os.path.basename(path))

    def _try(self, remove: Any, text: str) -> None:
        try:
            remove(os.path.join(self.directory, text))
        except OSError as error:
            log.info("%s is left behind: %s", os.path.join(self.directory, text), error)

    def _verified(self, commit: Commit, mapped: bool | None) -> Iterator[reading.Part]:
        name = CommitName(commit.incarnation, commit.number, commit.step)
        try:
            yield from reading.verified(self._files, commit.directory, name, mapped)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _DAMAGE:
                doing = f"read the commit {commit.name}"
                raise explained(error, doing, commit.directory) from error
            raise DamagedCommitError(
                f"the commit {commit.name} in {self.directory} as it was written", str(error)
            ) from error

    def _candidates(self) -> Iterator[Commit]:
        """Gives the commits, newest first; then those that came while these were looked at."""
        seen: set[str] = set()
        while fresh := [commit for commit in self.commits() if commit.name not in seen]:
            for commit in fresh:
                seen.add(commit.name)
                yield commit

    def _is_sound(self, commit: Commit) -> bool:
        try:
            self.check(commit)
        except DamagedCommitError as error:
            self._note_damage(commit, error)
            return False
        return True

    def _note_damage(self, commit: Commit, error: DamagedCommitError) -> None:
        with contextlib.suppress(NotADirectoryError):
            if not self._files.names(commit.directory):
                return  # Removed, as newer ones are complete.
        if commit.name not in self._damaged:
            self._damaged[commit.name] = str(error)
            log.warning("the commit %s is passed over: %s", commit.directory, error.received)

    def _commit(self, name: CommitName) -> Commit:
        directory = os.path.join(self.directory, name.text)
        return Commit(name.step, name.incarnation, name.number, directory)

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except TfdistError:
            raise
        except OSError as error:
            raise explained(error, doing, self.directory) from error
