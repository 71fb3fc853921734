"""What the launcher and the tasks tell each other beside the job, in files.

The evaluator, which meets none of the tasks that train, must learn that they have ended. The
launcher names a file in its environment and writes it when the tasks that train have ended with 0.
The evaluator answers with a second file, and is then given all the time that it needs for the last
checkpoints; one that does not know the file is stopped after a while.

The launcher, which sees its processes but not what they do, must learn which of them is stuck. It
names a file in the environment of the chief, who hears its workers; the chief adds the names of
those that have fallen silent.

Whether a job makes progress, only the tasks know. The chief adds to a third file what is committed
when training begins, each commit that is complete, and where a preemption has ended it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tfdist.cluster.topology import Task

#: The variable that holds the path of the first file.
TRAINING_ENDED = "TFDIST_TRAINING_ENDED"
#: What the path of the answer has more.
HEARD = ".heard"
#: The variable that holds the path of the list of silent tasks.
SILENT_TASKS = "TFDIST_SILENT_TASKS"
#: The variable that holds the path of the list of commits.
PROGRESS = "TFDIST_PROGRESS"


@dataclasses.dataclass(frozen=True)
class Preempted:
    """A training that a preemption has ended.

    Attributes:
        step: Steps that were done.
        saved: Steps that are in the newest commit; None where there is none.
        directory: Where it is.
    """

    step: int
    saved: int | None
    directory: str

    def __str__(self) -> str:
        where = f"which is saved in {self.directory}"
        if self.saved != self.step:
            where = f"the newest commit in {self.directory} is that of step {self.saved}"
        return f"preempted at step {self.step}, {where}"


class Notices:
    """The files of one start of a job, in a directory of their own that ends with the context.

    Attributes:
        training_ended: The file that appears when training has ended.
        silent_tasks: The list of tasks that have fallen silent.
        progress: The list of commits.
    """

    def __init__(self) -> None:
        self._directory = ""
        self._read = 0
        self.training_ended = ""
        self.silent_tasks = ""
        self.progress = ""

    def __enter__(self) -> Notices:
        self._directory = tempfile.mkdtemp(prefix="tfdist-run-")
        self.training_ended = os.path.join(self._directory, "training-ended")
        self.silent_tasks = os.path.join(self._directory, "silent-tasks")
        self.progress = os.path.join(self._directory, "progress")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def tell_end(self) -> None:
        """Says that training has ended."""
        with open(self.training_ended, "a", encoding="utf-8"):
            pass

    @property
    def end_was_heard(self) -> bool:
        """Whether the evaluator has answered."""
        return os.path.exists(self.training_ended + HEARD)

    def fallen_silent(self) -> list[Task]:
        """Returns the tasks that were reported since the last call."""
        try:
            with open(self.silent_tasks, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except OSError:
            return []
        new, self._read = lines[self._read :], len(lines)
        return [Task(kind, int(index)) for kind, index in map(str.split, new)]

    def committed(self) -> dict[str, int]:
        """Returns how many steps are in the newest commit, for each directory of commits."""
        found: dict[str, int] = {}
        for told in self._progress():
            if told["saved"] is not None:
                found[told["directory"]] = told["saved"]
        return found

    def preempted(self) -> Preempted | None:
        """Returns where a preemption has ended training, if it has."""
        ends = [told for told in self._progress() if "step" in told]
        return Preempted(**ends[-1]) if ends else None

    def _progress(self) -> list[dict[str, Any]]:
        try:
            with open(self.progress, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # Its writer was killed.
                found.append(json.loads(line))
        return found


def report_silence(environ: Mapping[str, str], task: Task) -> None:
    """Tells the launcher, if there is one, that `task` says nothing any more.

    Args:
        environ: The environment of the chief.
        task: The task.
    """
    if path := environ.get(SILENT_TASKS):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"{task.type} {task.index}\n")


def report_progress(environ: Mapping[str, str], directory: str, saved: int | None) -> None:
    """Tells the launcher, if there is one, how far the newest commit is.

    Args:
        environ: The environment of the chief.
        directory: Where commits are.
        saved: Steps that are in the newest one; None where that is not known.
    """
    _report(environ, {"directory": directory, "saved": saved})


def report_preemption(environ: Mapping[str, str], preempted: Preempted) -> None:
    """Tells the launcher, if there is one, where a preemption has ended training.

    Args:
        environ: The environment of the chief.
        preempted: Where.
    """
    _report(environ, dataclasses.asdict(preempted))


def _report(environ: Mapping[str, str], told: Mapping[str, Any]) -> None:
    if path := environ.get(PROGRESS):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(told)}\n")
