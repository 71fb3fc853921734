"""Slurm: the tasks of one job step, as `srun` starts them.

A step id is required. In the shell of `salloc` and in a batch script the other variables are set
too, but there is one process only. Variables of the step go before those of the job, which may be
larger.

Every task listens on a port that all tasks derive alike: a base that follows from job and step,
plus its rank, so that two nodes may also be one machine; in steps of more than 64 tasks plus the
number of the task on its host. `TFDIST_PORT_BASE` chooses another base.
"""

from __future__ import annotations

import collections

from tfdist.cluster.environments.base import Environ
from tfdist.cluster.environments.base import count
from tfdist.cluster.environments.base import first
from tfdist.cluster.environments.base import head
from tfdist.cluster.environments.base import port_base
from tfdist.cluster.environments.base import text
from tfdist.cluster.environments.base import whole_number
from tfdist.cluster.environments.hostlist import expand
from tfdist.cluster.environments.hostlist import expand_counts
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import ClusterError

#: Slurm numbers its own steps (batch, extern, interactive, pending) down from the largest id.
_FIRST_OWN_STEP = 0xFFFFFFF0

#: Ports from 12000 to 30000, below those that Linux hands out by itself, 64 for each step.
_PORT_FIRST = 12_000
_PORT_STEP = 64
_PORT_SLOTS = 281


def detect(environ: Environ) -> Cluster | None:
    """Reads the variables of a job step."""
    step = _step(environ)
    rank_value = text(environ, "SLURM_PROCID")
    if step is None or not rank_value:
        return None
    rank = whole_number("SLURM_PROCID", rank_value, "the index of this task in its step")
    hosts, source = _hosts(environ)
    if rank >= len(hosts):
        raise ClusterError(
            "SLURM_PROCID to be the index of one of the tasks of the step",
            f"SLURM_PROCID={rank} with {count(len(hosts), 'task')} ({source})",
            "start the program with srun",
        )
    _check_place(environ, hosts, rank)
    task = Task(WORKER, rank)
    return Cluster(
        environment="slurm",
        task=task,
        addresses={WORKER: _addresses(environ, hosts, step)},
        accelerators=_accelerators(environ, hosts.count(hosts[rank])),
        hosts=hosts,
        job_name=text(environ, "SLURM_JOB_NAME"),
        source=(
            f"Slurm step {step} has {count(len(hosts), 'task')} ({source}); this process is {task}."
        ),
    )


def _step(environ: Environ) -> int | None:
    """Returns the step id, or None outside of a step that srun started."""
    name, value = first(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if not value or value.lower() in ("batch", "extern", "interactive"):
        return None
    step = whole_number(name, value, "the id of a job step")
    return None if step >= _FIRST_OWN_STEP else step


def _hosts(environ: Environ) -> tuple[tuple[str, ...], str]:
    """Returns the host of every task in the order of ranks, and where it was read."""
    name, value = first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if not value:
        raise ClusterError(
            "the hosts of the step in SLURM_STEP_NODELIST",
            "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST",
            "start the program with srun and keep its environment",
        )
    try:
        nodes = expand(value)
    except ValueError as error:
        raise ClusterError(
            f"a list of hosts such as node[01-04,7] in {name}",
            f"{head(value)} ({error})",
            f"correct {name}",
        ) from None
    counts = _counts(environ, name, nodes)
    hosts = tuple(nodes[node] for node in _distribute(environ, counts))
    return hosts, f"{name}={head(value)}"


def _counts(environ: Environ, nodelist: str, nodes: tuple[str, ...]) -> tuple[int, ...]:
    """Returns how many tasks each node runs, checked against the number of tasks."""
    total_name, total_value = first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    total = None
    if total_value:
        total = whole_number(total_name, total_value, "the number of tasks", minimum=1)
    name, value = first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if value:
        try:
            counts = expand_counts(value)
        except ValueError as error:
            raise ClusterError(
                f"tasks of each node, such as 2(x3),1, in {name}",
                f"{head(value)} ({error})",
                f"correct {name}",
            ) from None
        tasks = sum(counts)
        if tasks and len(counts) == len(nodes) and (total is None or total == tasks):
            return counts
        if name == "SLURM_STEP_TASKS_PER_NODE" or total is None:
            raise ClusterError(
                f"{name}, {nodelist} and {total_name} to fit together",
                f"{name}={head(value)} ({count(tasks, 'task')} on "
                f"{count(len(counts), 'node')}), {count(len(nodes), 'node')} in {nodelist}, "
                f"{total_name}={total_value or 'not set'}",
                "start the program with srun and keep its environment",
            )
    # The job's count does not describe this step; an even number on each node is what is left.
    if total is None or total % len(nodes):
        raise ClusterError(
            f"SLURM_STEP_TASKS_PER_NODE, to know how {total_name} is spread over {nodelist}",
            f"{total_name}={total_value or 'not set'} on {count(len(nodes), 'node')}",
            "start the program with srun and keep its environment",
        )
    return (total // len(nodes),) * len(nodes)


def _distribute(environ: Environ, counts: tuple[int, ...]) -> list[int]:
    """Returns the number of the node of each rank.

    `srun --distribution` decides: block fills one node after the other, cyclic deals single
    tasks, plane deals groups of tasks.
    """
    way = text(environ, "SLURM_DISTRIBUTION").lower().partition(":")[0].partition(",")[0]
    size = max(counts)
    if way == "cyclic":
        size = 1
    elif way.startswith("plane"):
        value = way.partition("=")[2] or text(environ, "SLURM_DIST_PLANESIZE")
        size = whole_number("SLURM_DIST_PLANESIZE", value, "the size of a plane", minimum=1)
    left = list(counts)
    order: list[int] = []
    while any(left):
        for node, remaining in enumerate(left):
            taken = min(size, remaining)
            order += [node] * taken
            left[node] -= taken
    return order


def _check_place(environ: Environ, hosts: tuple[str, ...], rank: int) -> None:
    """Raises where Slurm says that this task runs on another host than its rank has here.

    Its address would then be wrong, and the others would wait for it until their deadline.
    """
    name = "SLURMD_NODENAME"
    actual = text(environ, name)
    if not actual:
        name = "SLURM_NODEID"
        value = text(environ, name)
        if not value:
            return
        node = whole_number(name, value, "the number of this node in the step")
        nodes = tuple(dict.fromkeys(hosts))
        if node >= len(nodes) or "SLURM_HET_SIZE" in environ:
            return
        # Under cyclic and plane distribution nodes also come in order, each at its first task.
        actual = nodes[node]
    if actual in hosts and actual != hosts[rank]:
        raise ClusterError(
            f"task {rank} to run on {hosts[rank]}, as SLURM_DISTRIBUTION="
            f"{text(environ, 'SLURM_DISTRIBUTION') or 'block'} places it",
            f"{name}={text(environ, name)}, which is {actual}",
            "use srun --distribution=block, or set TFDIST_CLUSTER",
        )


def _addresses(environ: Environ, hosts: tuple[str, ...], step: int) -> tuple[str, ...]:
    name, value = first(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    job = whole_number(name, value, "the id of the job") if value else 0
    # Steps of one job may run at the same time on the same nodes: 97 slots apart.
    slot = (job + 97 * step) % _PORT_SLOTS
    base = port_base(environ, _PORT_FIRST + _PORT_STEP * slot)
    on_host: collections.Counter[str] = collections.Counter()
    addresses = []
    last = base
    for rank, host in enumerate(hosts):
        port = base + (rank if len(hosts) <= _PORT_STEP else on_host[host])
        addresses.append(f"{host}:{port}")
        on_host[host] += 1
        last = max(last, port)
    if last > 65535:
        raise ClusterError(
            "ports up to 65535 for all tasks",
            f"ports from {base} to {last} for {count(len(hosts), 'task')}",
            "lower TFDIST_PORT_BASE",
        )
    return tuple(addresses)


def _accelerators(environ: Environ, tasks_on_host: int) -> int | None:
    """Returns the GPUs that Slurm promises to this task, None where it does not say."""
    per_task = text(environ, "SLURM_GPUS_PER_TASK").rpartition(":")[2]
    if per_task.isdecimal():
        return int(per_task)
    on_node = text(environ, "SLURM_GPUS_ON_NODE").rpartition(":")[2]
    return int(on_node) if on_node.isdecimal() and tasks_on_host == 1 else None
