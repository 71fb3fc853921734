"""Who may write: the newest start of the program, and what of the older ones counts.

Each start (incarnation) of a program that writes commits takes a number of its own, larger than all
before, by a file `incarnation-NUMBER-TOKEN.json` in the directory. Then it lists the commits that
are there and notes their names in its file: it *adopts* them. From there on

- a writer that sees a file with a larger number than its own is stale and stops;
- of older incarnations only the adopted commits count.

A process may be stopped between its look at the files and the moment its commit appears, and wake
up later. Such a commit is not adopted, so readers pass over it, and the newest incarnation removes
it. A writer looks again after its commit has appeared: if no newer file is there by then, whoever
comes later will list the commit.

This needs no locks and no atomic creation, only that a process that has created a file and then
lists the directory finds all files that others had created by then. Local disks, NFS (its own new
file makes a client forget an old listing) and Cloud Storage promise that.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any

from tfdist.errors import StaleWriterError
from tfdist.errors import StoreError
from tfdist.state.filesystem import HIDDEN
from tfdist.state.filesystem import FileSystem
from tfdist.state.manifest import MANIFEST

log = logging.getLogger("absl")

FINISHED = "finished.json"
_TICKET = re.compile(r"incarnation-(\d{1,18})-([0-9a-f]+)\.json")
_TICKET_ASIDE = re.compile(rf"{re.escape(HIDDEN)}incarnation-(\d{{1,18}})-.*\.tmp")
_COMMIT = re.compile(r"step-(\d{1,18})-i(\d{1,18})-c(\d{1,18})")
_TRIES = 50


@dataclasses.dataclass(frozen=True, order=True)
class CommitName:
    """The name of a commit; the order is that of writing.

    Attributes:
        incarnation: Number of the start that wrote it.
        number: Commits of that incarnation are counted from 1.
        step: Number of training steps that are in it.
    """

    incarnation: int
    number: int
    step: int

    @property
    def text(self) -> str:
        """The name of the directory."""
        return f"step-{self.step:09d}-i{self.incarnation}-c{self.number}"

    @classmethod
    def parse(cls, text: str) -> CommitName | None:
        """Returns the name that `text` is, or None."""
        match = _COMMIT.fullmatch(text)
        if match is None:
            return None
        step, incarnation, number = (int(group) for group in match.groups())
        name = cls(incarnation, number, step)
        return name if name.text == text else None


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is in the directory.

    Attributes:
        names: All names.
        commits: The commits that count, oldest first.
        strays: Commits that do not: they appeared after a newer incarnation had begun.
        finished: The contents of `finished.json`, where the run has ended.
        newest: The largest number of an incarnation that is known.
    """

    names: tuple[str, ...]
    commits: tuple[CommitName, ...]
    strays: tuple[CommitName, ...]
    finished: dict[str, Any] | None
    newest: int


def survey(files: FileSystem, directory: str) -> Survey:
    """Looks into the directory.

    Raises:
        OSError: It cannot be read.
    """
    for _ in range(_TRIES):
        try:
            return _survey(files, directory)
        except FileNotFoundError:
            # A newer incarnation has removed the record of an older one: look again.
            continue
    raise OSError(errno.EAGAIN, "other programs begin to write here all the time", directory)


def _survey(files: FileSystem, directory: str) -> Survey:
    names = tuple(files.names(directory))
    tickets = sorted(_tickets(names), reverse=True)
    end = _read(files, directory, FINISHED) if FINISHED in names else None
    ended = end["incarnation"] if end else 0
    verdict: dict[str, Any] | None = None
    seen_end = True
    for number, name in tickets:
        if verdict is not None and number <= ended:
            break
        record = _read(files, directory, name)
        if record is None or record["adopted"] is None:
            continue  # Taken a moment ago, or by a process that died at once.
        if verdict is None:
            verdict = record
        if end and number > ended and record.get("finished") != end.get("token"):
            seen_end = False
    is_end_verdict = end is not None and (verdict is None or verdict["incarnation"] <= ended)
    if is_end_verdict:
        verdict = end
    parsed = sorted(commit for name in names if (commit := CommitName.parse(name)))
    commits = tuple(c for c in parsed if _counts(c, verdict, is_end_verdict))
    if end and (not seen_end or any(c.incarnation > ended for c in commits)):
        end = None
    return Survey(
        names,
        commits,
        tuple(c for c in parsed if c not in commits),
        end,
        max([number for number, _ in tickets] + [ended] + [c.incarnation for c in commits]),
    )


class Fence:
    """The right of one incarnation to write.

    Args:
        files: The file system.
        directory: The directory of the commits.
    """

    def __init__(self, files: FileSystem, directory: str):
        self._files = files
        self._directory = directory
        self._token = secrets.token_hex(4)
        self._record: dict[str, Any] = {}

    @property
    def number(self) -> int:
        """The number of this incarnation; 0 before it is taken."""
        return int(self._record.get("incarnation", 0))

    def take(self) -> Survey:
        """Takes the next number and adopts the commits that are there.

        Returns:
            What is in the directory; its commits are those that were adopted.

        Raises:
            OSError: The directory cannot be written.
            StaleWriterError: Others took numbers all the time.
        """
        for _ in range(_TRIES):
            number = survey(self._files, self._directory).newest + 1
            record = {
                "incarnation": number,
                "token": self._token,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "adopted": None,
            }
            self._write(record)
            found = survey(self._files, self._directory)
            own = _ticket_name(record)
            if all(n < number or name == own for n, name in _tickets(found.names)):
                complete = tuple(c for c in found.commits if self._is_complete(c))
                record["adopted"] = [commit.text for commit in complete]
                record["finished"] = found.finished["token"] if found.finished else None
                self._write(record)
                self._record = record
                unfinished = tuple(c for c in found.commits if c not in complete)
                return dataclasses.replace(
                    found, commits=complete, strays=found.strays + unfinished, newest=number
                )
            self._files.remove(os.path.join(self._directory, own))
            time.sleep(random.uniform(0.0, 0.05))
        raise StaleWriterError(
            f"to be the only one that begins to write to {self._directory}",
            f"{_TRIES} others began at the same time",
            "start the program once",
        )

    def check(self) -> Survey:
        """Makes sure that nobody newer writes.

        Returns:
            What is in the directory.

        Raises:
            StaleWriterError: A newer incarnation has begun.
            OSError: The directory cannot be read.
        """
        found = survey(self._files, self._directory)
        if found.newest > self.number:
            raise StaleWriterError(
                f"incarnation {self.number} to be the newest that writes to {self._directory}",
                f"incarnation {found.newest} has begun",
                "end this process: the newer one goes on from the last commit that it found",
            )
        if _ticket_name(self._record) not in found.names:
            # Somebody emptied the directory.
            self._write(self._record)
        return found

    def is_old(self, name: str) -> bool:
        """Whether `name` is a file of an incarnation before this one, or on its way to be one."""
        match = _TICKET.fullmatch(name) or _TICKET_ASIDE.fullmatch(name)
        return match is not None and (
            int(match[1]) < self.number
            or (int(match[1]) == self.number and self._token not in name)
        )

    def finish(self, kept: Iterable[CommitName], facts: dict[str, Any]) -> None:
        """Writes `finished.json`.

        Args:
            kept: The commits that still count.
            facts: What to say about the run.
        """
        record = {
            "incarnation": self.number,
            "token": self._token,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "adopted": [commit.text for commit in kept],
            "facts": facts,
        }
        path = os.path.join(self._directory, FINISHED)
        self._files.replace(path, json.dumps(record, indent=1).encode())

    def resign(self) -> None:
        """Takes back the record of this incarnation, where `finished.json` stands for it."""
        self._files.remove(os.path.join(self._directory, _ticket_name(self._record)))

    def _write(self, record: dict[str, Any]) -> None:
        path = os.path.join(self._directory, _ticket_name(record))
        self._files.replace(path, json.dumps(record, indent=1).encode())

    def _is_complete(self, commit: CommitName) -> bool:
        """Whether it appeared: where nothing is renamed, its manifest is the sign."""
        if self._files.renames:
            return True
        return MANIFEST in self._files.names(os.path.join(self._directory, commit.text))


def explained(error: OSError, doing: str, directory: str) -> StoreError:
    """Returns the error to raise where `error` came up while `doing` something."""
    if isinstance(error, StoreError):
        return error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        expected, fix = f"space to {doing}", "free some, or choose another directory"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        expected, fix = f"permission to {doing}", "choose a directory that this user may write"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        expected, fix = f"a directory at {directory}, to {doing}", "choose another path"
    else:
        expected, fix = f"to {doing}", "look at the disk or the connection, and start again"
    result = StoreError(expected, f"{error} ({directory})", fix)
    result.errno = error.errno
    return result


def _ticket_name(record: dict[str, Any]) -> str:
    return f"incarnation-{record['incarnation']}-{record['token']}.json"


def _tickets(names: Iterable[str]) -> list[tuple[int, str]]:
    return [(int(match[1]), name) for name in names if (match := _TICKET.fullmatch(name))]


def _counts(commit: CommitName, verdict: dict[str, Any] | None, has_ended: bool) -> bool:
    if verdict is None or commit.incarnation > verdict["incarnation"]:
        return True
    if commit.incarnation == verdict["incarnation"] and not has_ended:
        return True
    return commit.text in verdict["adopted"]


def _read(files: FileSystem, directory: str, name: str) -> dict[str, Any] | None:
    """Returns the record of an incarnation or of the end, None where it is damaged.

    Raises:
        FileNotFoundError: It was removed meanwhile.
        OSError: It cannot be read.
    """
    try:
        record = json.loads(files.read(os.path.join(directory, name)))
        adopted = record["adopted"]
        if not isinstance(record["incarnation"], int) or not isinstance(adopted, list | None):
            raise ValueError("unknown contents")
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged and passed over: %s", os.path.join(directory, name), error)
        return None
    return dict(record)
