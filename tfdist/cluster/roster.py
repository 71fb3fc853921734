"""What one task knows of the others: who is there, who is silent, lost, or has left.

In a cluster with parameter servers a worker can be lost and come back: it holds nothing that the
others need. Everybody else's loss is final.
"""

from __future__ import annotations

import collections
import logging
import os
from typing import Any
from typing import Literal

from tfdist.cluster import notice
from tfdist.cluster import words
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task

log = logging.getLogger("absl")

State = Literal["alive", "silent", "lost", "left"]


def is_replaceable(cluster: Cluster, task: Task) -> bool:
    """Whether the others can go on without `task`, and take it back when it comes again."""
    return cluster.has_parameter_servers and task.type == WORKER and task != cluster.chief


class Roster:
    """The tasks of a group as one of them sees them. Its owner holds a lock.

    Args:
        cluster: The cluster.

    Attributes:
        lost: Tasks that are lost for good, with what was seen.
        left: Tasks that have ended in order, with what went wrong there or None.
        gone: Tasks whose processes have ended.
        absent: Workers that the others go on without, with what was seen.
        silent: Workers that say nothing although nobody has seen their end.
    """

    def __init__(self, cluster: Cluster):
        self.lost: dict[Task, str] = {}
        self.left: dict[Task, str | None] = {}
        self.gone: set[Task] = set()
        self.absent: dict[Task, str] = {}
        self.silent: set[Task] = set()
        self._cluster = cluster
        self._me = cluster.task
        self._returns: collections.Counter[Task] = collections.Counter()

    @property
    def missed(self) -> set[Task]:
        """Other tasks that have ended although the rest cannot go on without them."""
        return {t for t in self.left if t != self._me and not is_replaceable(self._cluster, t)}

    @property
    def failed(self) -> set[Task]:
        """Tasks that have left because something went wrong, which ends the others."""
        return {t for t in self.left if self.left[t] and not is_replaceable(self._cluster, t)}

    @property
    def present(self) -> set[Task]:
        """Tasks from which something can be expected."""
        away = {*self.left, *self.lost, *self.absent, *self.silent}
        return set(self._cluster.tasks) - away

    @property
    def has_missed_any(self) -> bool:
        """Whether some task does not answer or did not for a while, without having left."""
        return bool(self.lost or self.absent or self.silent or self._returns)

    def state_of(self, task: Task) -> State:
        """Returns what is known of `task`."""
        if task in self.lost or task in self.absent:
            return "lost"
        if task in self.left:
            return "left"
        return "silent" if task in self.silent else "alive"

    def starts_of(self, task: Task) -> int:
        """Returns how often `task` has come into the group, 1 if it has been here all along."""
        return 1 + self._returns[task]

    def hear(self, message: dict[str, Any]) -> bool:
        """Takes the hub's news of a task; returns whether this task cannot go on without it."""
        task, kind, reason = Task(*message["task"]), message["t"], message.get("reason")
        if kind == "lost":
            return self.note_loss(task, str(reason))
        if kind == "left":
            self.left[task] = reason
            if reason and task != self._me:
                return self._note_failure(task, reason)
        elif kind == "gone":
            self.gone.add(task)
        elif kind == "silent":
            self.silent.add(task)
            self._say(task, "says nothing")
            if self._me == self._cluster.chief:
                notice.report_silence(os.environ, task)
        elif kind == "heard":
            self.silent.discard(task)
            self._say(task, "can be heard again")
        elif kind == "back":
            self._note_return(task)
        return False

    def note_loss(self, task: Task, reason: str) -> bool:
        """Notes that `task` has ended without a word; returns whether that is final."""
        if task == self._me or task in self.lost:
            return False
        if is_replaceable(self._cluster, task):
            self._note_absence(task, reason)
            return False
        self.lost[task] = reason
        log.error("%s is gone: %s", words.name_of(self._cluster, task), reason)
        return True

    def _note_failure(self, task: Task, reason: str) -> bool:
        if is_replaceable(self._cluster, task):
            self._note_absence(task, reason)
            return False
        log.error("%s failed: %s", words.name_of(self._cluster, task), reason)
        return True

    def _note_absence(self, task: Task, reason: str) -> None:
        self.absent[task] = reason
        self.silent.discard(task)
        self._say(task, f"is gone: {reason}; going on without it")

    def _note_return(self, task: Task) -> None:
        self._returns[task] += 1
        for known in (self.absent, self.left):
            known.pop(task, None)
        self.silent.discard(task)
        self.gone.discard(task)
        self._say(task, "is back")

    def _say(self, task: Task, what: str) -> None:
        # One line is enough, and the chief is whom it concerns.
        if self._me == self._cluster.chief:
            log.warning("%s %s", words.name_of(self._cluster, task), what)
