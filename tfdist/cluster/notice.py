"""What the launcher and the tasks tell each other beside the job, in files.

The evaluator, which meets none of the tasks that train, must learn that they have ended. The
launcher names a file in its environment and writes it when the tasks that train have ended with 0.
The evaluator answers with a second file, and is then given all the time that it needs for the last
checkpoints; one that does not know the file is stopped after a while.

The launcher, which sees its processes but not what they do, must learn which of them is stuck. It
names a file in the environment of the chief, who hears its workers; the chief adds the names of
those that have fallen silent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from types import TracebackType

from tfdist.cluster.topology import Task

#: The variable that holds the path of the first file.
TRAINING_ENDED = "TFDIST_TRAINING_ENDED"
#: What the path of the answer has more.
HEARD = ".heard"
#: The variable that holds the path of the list of silent tasks.
SILENT_TASKS = "TFDIST_SILENT_TASKS"


class Notices:
    """The files of one start of a job, in a directory of their own that ends with the context.

    Attributes:
        training_ended: The file that appears when training has ended.
        silent_tasks: The list of tasks that have fallen silent.
    """

    def __init__(self) -> None:
        self._directory = ""
        self._read = 0
        self.training_ended = ""
        self.silent_tasks = ""

    def __enter__(self) -> Notices:
        self._directory = tempfile.mkdtemp(prefix="tfdist-run-")
        self.training_ended = os.path.join(self._directory, "training-ended")
        self.silent_tasks = os.path.join(self._directory, "silent-tasks")
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


def report_silence(environ: Mapping[str, str], task: Task) -> None:
    """Tells the launcher, if there is one, that `task` says nothing any more.

    Args:
        environ: The environment of the chief.
        task: The task.
    """
    if path := environ.get(SILENT_TASKS):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"{task.type} {task.index}\n")
