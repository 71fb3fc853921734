"""One plan of a job for every scheduler: which tasks, with what, running which command.

    plan = load("configs/flights-slurm.yaml", "slurm")
    [(task.role, task.count) for task in plan.tasks]     # [("chief", 1), ("worker", 2), ("ps", 1)]

The trainer's config travels by value, as one argument, so that neither images nor nodes need the
file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import ROLES
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import ConfigError
from tfdist.schedulers import sections
from tfdist.strategies import registry
from tfdist.strategies.choose import choose

#: What a scheduler is called and the class of its section.
SCHEDULERS: Mapping[str, type] = {
    "kubernetes": sections.Kubernetes,
    "slurm": sections.Slurm,
    "ray": sections.Ray,
}

#: They would describe another cluster to a task.
_RESERVED = ("TF_CONFIG", "CLUSTER_SPEC", "TFDIST_CLUSTER")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_TASKS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The tasks of one role.

    Attributes:
        role: One of `tfdist.cluster.topology.ROLES`.
        count: How many, one process each.
        cpus: Processors of each, None where nothing is asked for.
        memory: Memory of each as the scheduler writes it, or None.
        gpus: GPUs of each.
    """

    role: str
    count: int
    cpus: int | float | None = None
    memory: str | None = None
    gpus: int = 0

    @property
    def resources(self) -> tuple[int | float | None, str | None, int]:
        return self.cpus, self.memory, self.gpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A job that any scheduler can run.

    Attributes:
        name: Name of the job.
        tasks: Roles that are there, in the order of `ROLES`.
        strategy: Name of the strategy that the tasks that train will use.
        command: Program and its arguments, each one word whatever it contains.
        env: Environment variables of every task.
        image: Container image, or None.
        restarts: Starts after a failure. After a preemption, exit code 143, there is no limit.
        outputs: Directories that the config has results go to.
    """

    name: str
    tasks: tuple[RolePlan, ...]
    strategy: str
    command: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    image: str | None = None
    restarts: int = 3
    outputs: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(tasks.role for tasks in self.tasks)

    @property
    def has_parameter_servers(self) -> bool:
        return PS in self.roles

    @property
    def main_role(self) -> str:
        """The role whose task 0 is chief: its end is the end of the job."""
        return CHIEF if CHIEF in self.roles else WORKER

    @property
    def size(self) -> int:
        """Number of tasks."""
        return sum(tasks.count for tasks in self.tasks)


def load(path: str, scheduler: str, overrides: Sequence[str] = ()) -> tuple[Plan, Any]:
    """Reads the job that a config describes for one scheduler.

    Args:
        path: The YAML file.
        scheduler: A name of `SCHEDULERS`.
        overrides: `key.path=value` texts, the value in YAML; later ones win.

    Returns:
        The plan and the section of the scheduler, at its defaults where the config has none.

    Raises:
        ConfigError: The config is not valid, or describes no possible job.
    """
    from trainer import config

    loaded = config.load(path, overrides)
    section = getattr(loaded, scheduler) or SCHEDULERS[scheduler]()
    output = loaded.output
    directory = output.directory or f"runs/{loaded.experiment.name}"
    places = (output.model_dir, output.checkpoint_dir, output.log_dir)
    plan = make(
        section,
        scheduler,
        default_name=_stem(path) or loaded.experiment.name,
        arguments=("--config", config.as_argument(path, overrides)),
        strategy=loaded.strategy.name,
        replicas=loaded.strategy.replicas,
        vertex=loaded.vertex,
        outputs=tuple(dict.fromkeys(place or directory for place in places)),
    )
    return plan, section


def make(
    section: Any,
    scheduler: str,
    *,
    default_name: str,
    arguments: Sequence[str],
    strategy: str | None = None,
    replicas: int | None = None,
    vertex: Any = None,
    outputs: Sequence[str] = (),
) -> Plan:
    """Makes the plan of a job.

    Args:
        section: A `Kubernetes`, `Slurm` or `Ray`.
        scheduler: Its name, for messages.
        default_name: Name of the job where the section has none.
        arguments: Arguments of the program where the section has none.
        strategy: The strategy that the config asks for, or None.
        replicas: Local replicas that the config asks for, or None.
        vertex: A `tfdist.vertex.JobSpec` whose roles and image serve where the section has none.
        outputs: Directories that the config has results go to.

    Raises:
        ConfigError: No such job is possible.
    """
    pools = getattr(vertex, "pools", None)
    default_role = WORKER if scheduler == "ray" else CHIEF
    if section.roles is not None and tuple(section.roles):
        roles, source = section.roles, f"{scheduler}.roles"
    elif pools is not None:
        roles, source = _roles_of(pools), "vertex.pools"
    else:
        roles, source = sections.Roles(**{default_role: sections.Role()}), f"{scheduler}.roles"
    _check_counts(roles, source, scheduler)
    counts = {name: role.count for name, role in roles}
    trains = {WORKER} if PS in counts else {CHIEF, WORKER}
    tasks = tuple(
        RolePlan(
            role=name,
            count=role.count,
            cpus=section.cpus if role.cpus is None else role.cpus,
            memory=section.memory if role.memory is None else role.memory,
            gpus=(section.gpus if name in trains else 0) if role.gpus is None else role.gpus,
        )
        for name, role in roles
    )
    for task in tasks:
        _check_resources(task, scheduler)
    if section.max_restarts < 0:
        raise ConfigError(
            f"{scheduler}.max_restarts to be 0 or more", f"{section.max_restarts}", "correct it"
        )
    if not section.command or not all(section.command):
        raise ConfigError(
            f"{scheduler}.command to name a program", repr(list(section.command)), "leave it out"
        )
    return Plan(
        name=section.name or default_name,
        tasks=tasks,
        strategy=_strategy(counts, tasks, strategy, replicas),
        command=(*section.command, *(section.args or arguments)),
        env=_environment(section.env, scheduler),
        image=getattr(section, "image", None) or getattr(vertex, "image", None),
        restarts=section.max_restarts,
        outputs=tuple(outputs),
    )


def _stem(path: str) -> str:
    """Returns the name of the file in characters that every scheduler allows."""
    if path.lstrip().startswith("{"):
        return ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", pathlib.PurePath(path).stem).strip("-_.")


def _roles_of(pools: Any) -> sections.Roles:
    """Returns counts and GPUs of the pools of a custom job; a Reduction Server has no role here."""
    found = {}
    for role in ROLES:
        pool = getattr(pools, role)
        if pool is not None:
            has_gpus = pool.accelerator is not None and pool.accelerator.type.startswith("NVIDIA")
            gpus = pool.accelerator.count if has_gpus else None
            found[role] = sections.Role(count=pool.replicas, gpus=gpus)
    return sections.Roles(**found)


def _check_counts(roles: sections.Roles, source: str, scheduler: str) -> None:
    counts = {name: role.count for name, role in roles}
    shown = ", ".join(f"{name} {count}" for name, count in counts.items())
    for name, count in counts.items():
        if not 1 <= count <= _MOST_TASKS:
            raise ConfigError(
                f"{source}.{name}.count to be between 1 and {_MOST_TASKS}",
                f"{count}",
                f"leave {name} out where there is none",
            )
    if counts.get(CHIEF, 1) != 1:
        raise ConfigError(
            f"one chief in {source}", shown, "keep one and count the others as worker"
        )
    if counts.get(PS) and not counts.get(CHIEF):
        raise ConfigError(
            f"a chief beside parameter servers in {source}: it coordinates",
            shown,
            f"--set {scheduler}.roles.chief.count=1",
        )
    if counts.get(PS) and not counts.get(WORKER):
        raise ConfigError(
            f"a worker beside parameter servers in {source}: the chief does not train",
            shown,
            f"--set {scheduler}.roles.worker.count=1",
        )
    if not counts.get(CHIEF) and not counts.get(WORKER):
        raise ConfigError(f"a chief or workers in {source}", shown, "add who trains")


def _check_resources(task: RolePlan, scheduler: str) -> None:
    where = f"{scheduler}.roles.{task.role}"
    if task.cpus is not None and not task.cpus > 0:
        raise ConfigError(f"{where}.cpus to be above 0", f"{task.cpus}", "correct it")
    if task.gpus < 0:
        raise ConfigError(f"{where}.gpus to be 0 or more", f"{task.gpus}", "correct it")


def _environment(env: Mapping[str, str], scheduler: str) -> dict[str, str]:
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"names of letters, digits and _ in {scheduler}.env", repr(name), "correct it"
            )
        if name in _RESERVED:
            raise ConfigError(
                f"{scheduler}.env without {name}, which is set for each task",
                f"{name}={env[name]!r}",
                f"leave {name} out",
            )
    return dict(env)


def _strategy(
    counts: Mapping[str, int],
    tasks: Sequence[RolePlan],
    asked: str | None,
    replicas: int | None,
) -> str:
    """Returns what the tasks that train will use; refuses what would fail or wait for ever."""
    first = CHIEF if CHIEF in counts else WORKER
    cluster = Cluster(
        environment="plan",
        task=Task(first, 0),
        addresses={
            role: tuple(f"{role}-{index}:1" for index in range(count))
            for role, count in counts.items()
            if role != EVALUATOR
        },
        accelerators=next(task.gpus for task in tasks if task.role == first),
    )
    return choose(cluster, name=asked, replicas=replicas, known=registry.names()).name
