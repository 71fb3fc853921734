"""The service's rules of life: states, what follows when a replica fails, how a job ends.

| what happens | what follows |
|---|---|
| a replica exits with anything but 0 | it is started again at once, same name, 5 times |
| the same, with `restartJobOnWorkerRestart` | all replicas are stopped and started again |
| it fails once more | the job is tried again from its start, 3 times (Spot: 6) |
| the same, with `disableRetries` | the job has failed; nor do all restart when one does |
| all tries are used | the job has failed, with the replica and its exit code |
| the primary exits with 0 | the job has succeeded; the others are stopped |
| another replica exits with 0 | nothing |
| `scheduling.timeout` is over | the job has expired; all are stopped |

Source: "Understand the custom training service" and the reference of `Scheduling`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from tfdist.vertex.local.custom_job import ReceivedJob
from tfdist.vertex.local.custom_job import Replica


class JobState(str, enum.Enum):
    """States of a job, by the names of the service's API."""

    QUEUED = "JOB_STATE_QUEUED"
    PENDING = "JOB_STATE_PENDING"
    RUNNING = "JOB_STATE_RUNNING"
    SUCCEEDED = "JOB_STATE_SUCCEEDED"
    FAILED = "JOB_STATE_FAILED"
    CANCELLING = "JOB_STATE_CANCELLING"
    CANCELLED = "JOB_STATE_CANCELLED"
    EXPIRED = "JOB_STATE_EXPIRED"

    def __str__(self) -> str:
        return self.value

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self in (
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.EXPIRED,
        )


@dataclasses.dataclass(frozen=True)
class ErrorStatus:
    """Why a job failed, as the service's `error` field says it.

    Attributes:
        code: Number of `google.rpc.Code`.
        message: For people.
    """

    code: int
    message: str


#: Numbers of `google.rpc.Code`.
CANCELLED = 1
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
INTERNAL = 13


class Reaction(enum.Enum):
    """What follows when a replica has failed."""

    RESTART_REPLICA = enum.auto()
    RESTART_ALL = enum.auto()
    RETRY_JOB = enum.auto()
    FAIL = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """How often what is started again.

    Attributes:
        replica_restarts: Restarts of each replica before the job is tried again.
        job_retries: Further tries of the whole job.
        restart_all: Whether all replicas start again when one does.
    """

    replica_restarts: int = 5
    job_retries: int = 3
    restart_all: bool = False

    @classmethod
    def of(cls, job: ReceivedJob) -> Rules:
        """Returns the rules that the service follows for `job`."""
        retries = 6 if job.strategy == "SPOT" else 3
        return cls(
            job_retries=0 if job.disable_retries else retries,
            restart_all=job.restart_job_on_worker_restart and not job.disable_retries,
        )


class Lives:
    """Counts the lives of the replicas of one job.

    Args:
        rules: How many there are.
    """

    def __init__(self, rules: Rules):
        self.rules = rules
        #: Tries of the whole job that have begun after the first.
        self.retries = 0
        self._restarts: collections.Counter[Replica] = collections.Counter()

    def on_failure(self, replica: Replica) -> Reaction:
        """Returns what follows, and counts it."""
        if self._restarts[replica] < self.rules.replica_restarts:
            self._restarts[replica] += 1
            return Reaction.RESTART_ALL if self.rules.restart_all else Reaction.RESTART_REPLICA
        if self.retries < self.rules.job_retries:
            self.retries += 1
            self._restarts.clear()
            return Reaction.RETRY_JOB
        return Reaction.FAIL

    def restarts(self, replica: Replica) -> int:
        """Returns how often `replica` has failed and been started again in this try."""
        return self._restarts[replica]
