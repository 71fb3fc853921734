"""What the tasks of a drill note: a file of lines for each task, to which its starts append.

A line is written with one call, so that it is there, whole, when the process is killed right after.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Names the folder of the run, in the environment of its tasks.
FOLDER = "TFDIST_DRILL"
#: Where `BackupAndRestore` writes under a drill, within that folder.
COMMITS = "commits"
PLAN = "plan.json"

_SUFFIX = ".notes.jsonl"


class Notes:
    """The notes of one start of one task.

    Args:
        folder: Of the run.
        task: For example "worker 0".
        incarnation: Which start of the task this is, from 0.
    """

    def __init__(self, folder: Path, task: str, incarnation: int):
        self._always = {"task": task, "incarnation": incarnation}
        path = folder / f"{task.replace(' ', '-')}{_SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def add(self, kind: str, **facts: Any) -> None:
        """Appends a line.

        Args:
            kind: What happened.
            **facts: What JSON can hold.
        """
        line = {"time": time.time(), "kind": kind, **self._always, **facts}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Reader:
    """Reads what tasks append, each line once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._places: dict[Path, int] = {}

    def fresh(self) -> list[dict[str, Any]]:
        """Returns the lines that are new, in the order of their times."""
        found: list[dict[str, Any]] = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with open(path, "rb") as file:
                file.seek(self._places.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            found += _parsed(whole.splitlines())
        return sorted(found, key=lambda line: float(line["time"]))


def strike_file(folder: Path, number: int) -> Path:
    """Returns the file that says that strike `number` is under way and tasks may go on."""
    return folder / f"strike-{number}"


def _parsed(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)
