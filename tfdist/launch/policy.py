"""What a failed task means for the job: the end of it, a new start of the task, or nothing.

| the cluster | who failed | what follows |
|---|---|---|
| workers alone | anybody | the job has failed: they train together |
| with parameter servers | `chief`, `ps` | the job has failed: all variables or all plans are gone |
| | `worker` | it is started again alone, `max_restarts` times each; then the others go on |
| | the last `worker` | the job has failed |
| | a server, after the chief has ended with 0 | nothing: the work is done |
| any | `evaluator` | it is started again alone, `max_restarts` times; then the job has failed |
| any | `data` | it is started again alone, many times; then the others go on |
| any | a task that was used wrongly (exit code 2) | the job has failed, and is not tried again |

A job that has failed is started again as a whole, `max_restarts` times, unless only the
evaluator could not follow.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Collection

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import DATA
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Task
from tfdist.errors import EXIT_USAGE

#: How often a process that makes batches is started again: without one the others cannot go on,
#: and those that read from it say so themselves.
_DATA_RESTARTS = 100


class Reaction(enum.Enum):
    """What to do about a task that has failed."""

    #: The job has failed: stop the other tasks.
    FAIL = enum.auto()
    #: Start this task again and leave the others alone.
    REPLACE = enum.auto()
    #: Go on without it.
    CARRY_ON = enum.auto()


class Policy:
    """Decides for one job, over all its starts.

    Args:
        tasks: The tasks of the job.
        max_restarts: How often the whole job may be started again, and alone the evaluator and each
            worker of a cluster with parameter servers.
    """

    def __init__(self, tasks: Collection[Task], max_restarts: int):
        self.max_restarts = max_restarts
        self._has_servers = any(task.type == PS for task in tasks)
        self._replaced: collections.Counter[Task] = collections.Counter()
        self._restarts = 0

    def on_failure(self, failed: Task, code: int, others: Collection[Task]) -> Reaction:
        """Returns what to do about a task that ended with `code`, not 0.

        Args:
            failed: The task.
            code: Its exit code.
            others: Tasks that run, or are about to be started again.
        """
        if failed.type == DATA:
            if self._replaced[failed] >= _DATA_RESTARTS:
                return Reaction.CARRY_ON
            self._replaced[failed] += 1
            return Reaction.REPLACE
        serves = self._has_servers and failed.type in (WORKER, PS)
        if serves and all(task.type != CHIEF for task in others):
            return Reaction.CARRY_ON
        alone = failed.type == EVALUATOR or (serves and failed.type == WORKER)
        if not alone or code == EXIT_USAGE:
            return Reaction.FAIL
        if self._replaced[failed] < self.max_restarts:
            self._replaced[failed] += 1
            return Reaction.REPLACE
        if failed.type == EVALUATOR:
            return Reaction.FAIL
        left = any(task.type == WORKER for task in others)
        return Reaction.CARRY_ON if left else Reaction.FAIL

    def replacements(self, task: Task) -> int:
        """Returns how often `task` has been started again alone."""
        return self._replaced[task]

    def most_replacements(self, task: Task) -> int:
        """Returns how often `task` may be started again alone."""
        return _DATA_RESTARTS if task.type == DATA else self.max_restarts

    def start_again(self, failed: Task, code: int) -> int | None:
        """Returns the number of the next restart of a job that has failed, if there is one.

        Args:
            failed: The task that failed first.
            code: Its exit code.
        """
        if failed.type == EVALUATOR or code == EXIT_USAGE or self._restarts >= self.max_restarts:
            return None
        self._restarts += 1
        return self._restarts
