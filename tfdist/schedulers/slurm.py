"""A batch script for Slurm: `sbatch` runs it as it is.

    script = render(*tfdist.schedulers.plan.load("configs/digits-slurm.yaml", "slurm"))

Tasks that need the same are one component of the job; where roles differ in processors, memory or
GPUs the job is heterogeneous, with a component for each kind. The script asks Slurm where each
task will run, gives every task its `TF_CONFIG`, and watches:

| what happens | what the script does |
|---|---|
| the time limit is near | SIGTERM to the tasks: they save; the job is queued again |
| Slurm preempts or requeues it | nothing: tasks got SIGTERM and save, Slurm queues it again |
| `scancel` | the tasks save; nothing is queued |
| a task fails | the others have `stop_seconds`; queued again, `max_restarts` times |
| a task ends with 2 | the same, but the job fails: the next time would be no better |

Source: https://slurm.schedmd.com/sbatch.html, srun.html, heterogeneous_jobs.html. Tested with a
real Slurm 22.05 of two nodes (tests/schedulers/test_slurm_cluster.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from collections.abc import Sequence

from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.errors import ConfigError
from tfdist.schedulers.plan import Plan
from tfdist.schedulers.plan import RolePlan
from tfdist.schedulers.sections import Slurm
from tfdist.schedulers.slurm_script import BODY
from tfdist.schedulers.slurm_script import TASK

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_MEMORY = re.compile(r"([0-9]+)([KMGT]?)")
_TIME = re.compile(
    r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.I
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LEAST_SAVE_SECONDS = 10


def render(plan: Plan, section: Slurm) -> str:
    """Returns the batch script.

    Args:
        plan: The job.
        section: What Slurm has to know.

    Raises:
        ConfigError: Slurm would refuse it, or it would do something else than was meant.
    """
    _check(plan, section)
    components = _components(plan.tasks)
    lines = ["#!/bin/bash", f"# {plan.name}: {_summary(plan)}. Submit with sbatch.", "#"]
    lines += ["# Written by: tfdist render --for slurm", ""]
    lines += _options(plan, section, components)
    lines += ["", *_settings(plan, section, components), ""]
    if section.setup:
        lines += ["# Set-up of the config.", *section.setup, ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.env.items()]
    lines.append(f"program=({' '.join(shlex.quote(word) for word in plan.command)})")
    if not section.container_image:
        lines += [
            'if ! command -v "${program[0]}" >/dev/null; then',
            '  echo "no program ${program[0]} here: see slurm.setup and slurm.command" >&2',
            "  exit 2",
            "fi",
        ]
    return "\n".join(lines) + "\n\n" + TASK + "\n" + BODY


def _components(tasks: Sequence[RolePlan]) -> list[list[RolePlan]]:
    """Returns runs of roles that need the same: more components are more to wait for."""
    found: list[list[RolePlan]] = []
    for task in tasks:
        if found and found[-1][0].resources == task.resources:
            found[-1].append(task)
        else:
            found.append([task])
    return found


def _options(plan: Plan, section: Slurm, components: Sequence[Sequence[RolePlan]]) -> list[str]:
    lines = [f"#SBATCH {option}" for option in _job_options(plan, section)]
    for number, component in enumerate(components):
        if number:
            lines.append("#SBATCH hetjob")
            lines += [f"#SBATCH {option}" for option in _placement(section)]
        lines += [f"#SBATCH {option}" for option in _size(component, section)]
    return lines


def _job_options(plan: Plan, section: Slurm) -> Iterator[str]:
    yield f"--job-name={plan.name}"
    yield f"--output={_word(section.output, 'output')}"
    # The log of the starts before stays; tfdist goes on from the last commit.
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{section.save_seconds}"
    if section.time_limit is not None:
        yield f"--time={_time(section.time_limit)}"
    if section.working_directory:
        yield f"--chdir={_word(section.working_directory, 'working_directory')}"
    yield from _placement(section)
    yield from section.options


def _placement(section: Slurm) -> Iterator[str]:
    """Yields what every component needs."""
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        value = getattr(section, name)
        if value:
            yield f"--{name}={_word(value, name)}"
    if section.exclusive:
        yield "--exclusive"


def _layout(component: Sequence[RolePlan], section: Slurm) -> tuple[int, int, int]:
    """Returns how many nodes, tasks, and tasks of a node at most."""
    count = sum(tasks.count for tasks in component)
    per_node = min(section.tasks_per_node, count)
    return -(-count // per_node), count, per_node


def _size(component: Sequence[RolePlan], section: Slurm) -> Iterator[str]:
    nodes, count, per_node = _layout(component, section)
    yield f"--nodes={nodes}"
    yield f"--ntasks={count}"
    if per_node > 1 and count % per_node == 0:  # Else srun cannot keep it, and says so.
        yield f"--ntasks-per-node={per_node}"
    cpus, memory, gpus = component[0].resources
    if cpus is not None:
        yield f"--cpus-per-task={cpus}"
    if memory is not None:
        match = _MEMORY.fullmatch(memory)
        assert match
        yield f"--mem={int(match[1]) * per_node}{match[2] or 'M'}"
    if gpus:
        yield f"--gpus-per-task={gpus}"


def _settings(plan: Plan, section: Slurm, components: Sequence[Sequence[RolePlan]]) -> list[str]:
    """Returns the variables that the body of the script reads."""
    # Servers and the workers that use them end when the coordinator has saved, not before.
    deaf = [role for role in (PS, WORKER) if plan.has_parameter_servers]
    counts = [sum(tasks.count for tasks in component) for component in components]
    steps = [
        f"step_options_{number}=({' '.join(map(shlex.quote, _srun(component, section)))})"
        for number, component in enumerate(components)
    ]
    roles = [task.role for task in plan.tasks for _ in range(task.count)]
    return [
        f"roles=({' '.join(roles)})  # in the order of their numbers",
        f"counts=({' '.join(map(str, counts))})  # tasks of each component of the job",
        *steps,
        f"container_options=({' '.join(_container(section))})",
        f"export TFDIST_KEEP_ON_TERM={shlex.quote(' '.join(deaf))}",
        f"max_restarts={plan.restarts} stop_seconds={section.stop_seconds} "
        f"save_seconds={section.save_seconds}",
    ]


def _srun(component: Sequence[RolePlan], section: Slurm) -> Iterator[str]:
    """Yields the options of a step."""
    yield "--export=ALL"  # Also where sbatch was told otherwise.
    yield "--kill-on-bad-exit=0"  # The script stops the others, later: they may be saving.
    yield "--wait=0"
    # Said again, because variables of sbatch are those of the first component.
    nodes, count, _ = _layout(component, section)
    yield f"--nodes={nodes}"
    yield f"--ntasks={count}"
    cpus, _, gpus = component[0].resources
    if cpus is not None:
        yield f"--cpus-per-task={cpus}"
    if gpus:
        yield f"--gpus-per-task={gpus}"
    yield from section.srun_options


def _container(section: Slurm) -> Iterator[str]:
    if section.container_image:
        yield f"--container-image={shlex.quote(section.container_image)}"
        mounts = ",".join(section.container_mounts)
        yield '--container-mounts="$PWD:$PWD"' + (f",{shlex.quote(mounts)}" if mounts else "")
        yield '--container-workdir="$PWD"'


def _check(plan: Plan, section: Slurm) -> None:
    if not _NAME.fullmatch(plan.name):
        raise ConfigError(
            "a name of at most 64 letters, digits, and - _ . + for a job of Slurm",
            repr(plan.name),
            "--set slurm.name=NAME",
        )
    if section.tasks_per_node < 1:
        raise ConfigError(
            "slurm.tasks_per_node to be 1 or more", f"{section.tasks_per_node}", "correct it"
        )
    if section.time_limit is not None:
        _time(section.time_limit)
    if not _LEAST_SAVE_SECONDS <= section.save_seconds <= 65535:
        raise ConfigError(
            f"slurm.save_seconds to be between {_LEAST_SAVE_SECONDS} and 65535",
            f"{section.save_seconds}",
            "leave tasks the time that they need to save",
        )
    if section.stop_seconds < 0:
        raise ConfigError("slurm.stop_seconds to be 0 or more", f"{section.stop_seconds}")
    for task in plan.tasks:
        if task.memory is not None and not _MEMORY.fullmatch(task.memory):
            raise ConfigError(
                f"memory of {task.role} as Slurm writes it: a whole number and K, M, G or T",
                repr(task.memory),
                'write for example "16G"',
            )
        if task.cpus is not None and task.cpus != int(task.cpus):
            raise ConfigError(
                f"a whole number of processors for {task.role}", f"{task.cpus}", "round it"
            )
    if section.container_mounts and not section.container_image:
        raise ConfigError(
            "slurm.container_image with slurm.container_mounts",
            "no image",
            "name the image or leave the mounts out",
        )
    for option in section.options:
        if not option.startswith("-") or "\n" in option:
            raise ConfigError(
                "each of slurm.options to be one option of sbatch",
                repr(option),
                'write for example "--mail-type=END"',
            )
    for line in section.setup:
        if "#SBATCH" in line:
            raise ConfigError(
                "slurm.setup without #SBATCH lines, which sbatch reads only at the top",
                repr(line),
                "move it to slurm.options",
            )


def _time(limit: str) -> str:
    """Returns a time limit as sbatch takes it."""
    if match := re.fullmatch(r"([0-9]+)([smhd])", limit):
        minutes, seconds = divmod(int(match[1]) * _SECONDS[match[2]], 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{seconds:02}"
    if not _TIME.fullmatch(limit):
        raise ConfigError(
            "slurm.time_limit as a number with s, m, h or d, or as sbatch takes it: minutes, "
            "hours:minutes:seconds, days-hours and so on",
            repr(limit),
            'write for example "2h"',
        )
    return limit


def _word(value: str, name: str) -> str:
    """Returns a value of an option as sbatch reads it from a comment, quoted where it must be."""
    if "\n" in value or '"' in value:
        raise ConfigError(
            f"slurm.{name} without quotes and line ends", repr(value), "choose another one"
        )
    return value if re.fullmatch(r"[^\s'\\#]+", value) else f'"{value}"'


def _summary(plan: Plan) -> str:
    return f"{', '.join(f'{t.count} {t.role}' for t in plan.tasks)}, strategy {plan.strategy}"


def warnings(plan: Plan, section: Slurm) -> tuple[str, ...]:
    """Returns what looks wrong without being an error, one sentence each."""
    found = []
    if plan.size > 1 and section.time_limit is None:
        found.append(
            "slurm.time_limit is not set: the partition's limit holds, and without one no task is "
            "told to save before the end."
        )
    return tuple(found)
