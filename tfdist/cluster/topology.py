"""Who is in the cluster, and which of them is this process.

`Cluster` and `Task` are plain frozen values. They know the roles of the field (chief, worker,
parameter server, evaluator), which of them count as replicas, and who is chief. Reading them from
an environment is the work of `tfdist.cluster.detect`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from collections.abc import Mapping

CHIEF = "chief"
WORKER = "worker"
PS = "ps"
EVALUATOR = "evaluator"

#: Makes batches for the others, beside the cluster; only the launcher knows it.
DATA = "data"

#: Roles in the order in which they are shown, and in which TensorFlow numbers the first two.
ROLES = (CHIEF, WORKER, PS, EVALUATOR)


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One process of the cluster.

    Attributes:
        type: One of `ROLES`, or `DATA`.
        index: Position among the tasks of that type, from 0.
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The cluster as one process sees it.

    Attributes:
        environment: Name of the environment it was read from, for example "tf_config".
        task: This process.
        addresses: Role to the addresses (`host:port`) of its tasks, only roles that TensorFlow
            may contact: an evaluator is never in it, nor are the addresses of a Reduction Server.
            An address may be "" where a dynamic cluster does not tell it. Empty for one process.
        evaluators: Addresses of evaluators, for display; TensorFlow never contacts them.
        reduction_servers: Addresses of Reduction Server replicas.
        accelerators: Accelerators that the environment promises to this process, or None where
            it does not say.
        tpu: Name or address of a TPU, or None.
        hosts: Host of each worker in rank order, where the environment gives hosts. The hosts of
            a TPU slice are workers without addresses.
        job_name: Name the environment gives to the job or "".
        warnings: What was tolerated while reading, one sentence each.
        source: Which variables were read and what they say, one sentence.
    """

    environment: str
    task: Task
    addresses: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    evaluators: tuple[str, ...] = ()
    reduction_servers: tuple[str, ...] = ()
    accelerators: int | None = None
    tpu: str | None = None
    hosts: tuple[str, ...] = ()
    job_name: str = ""
    warnings: tuple[str, ...] = ()
    source: str = ""

    @property
    def has_parameter_servers(self) -> bool:
        return bool(self.addresses.get(PS))

    @property
    def replicas(self) -> tuple[Task, ...]:
        """The tasks that train, in TensorFlow's order: chief first, then workers by index.

        Under parameter servers the chief coordinates and does not train, so it is left out.
        """
        tasks = [] if self.has_parameter_servers else list(self._tasks(CHIEF))
        tasks += self._tasks(WORKER)
        if not tasks and not self.has_parameter_servers:
            tasks += (Task(WORKER, index) for index in range(len(self.hosts)))
        return tuple(tasks) or (Task(WORKER, 0),)

    @property
    def num_workers(self) -> int:
        return len(self.replicas)

    @property
    def chief(self) -> Task:
        """The chief: the task of that role, else worker 0."""
        return Task(CHIEF, 0) if self.addresses.get(CHIEF) else Task(WORKER, 0)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what only one may write; an evaluator never does."""
        if self.is_evaluator:
            return False
        return self.task == self.chief or (self.tasks == (self.task,) and self.num_workers == 1)

    @property
    def is_evaluator(self) -> bool:
        return self.task.type == EVALUATOR

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task that TensorFlow may contact, chief first."""
        found = tuple(task for role in ROLES for task in self._tasks(role))
        return found or (self.task,)

    def address(self, task: Task) -> str:
        """Returns the address of `task`, or "" where it is not known."""
        known = self.addresses.get(task.type, ())
        return known[task.index] if task.index < len(known) else ""

    def to_tf_config(self) -> str:
        """Returns the `TF_CONFIG` value that describes this cluster to TensorFlow."""
        return json.dumps(
            {
                "cluster": {role: self._listed(role) for role in self.roles},
                "task": {"type": self.task.type, "index": self.task.index},
            }
        )

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in ROLES if self.addresses.get(role))

    def _listed(self, role: str) -> list[str] | dict[str, str]:
        """Returns the addresses of a role as JSON has them: a dict where some are not known."""
        tasks = self.addresses[role]
        if all(tasks):
            return list(tasks)
        return {str(index): address for index, address in enumerate(tasks) if address}

    def _tasks(self, role: str) -> Iterator[Task]:
        return (Task(role, index) for index in range(len(self.addresses.get(role, ()))))
