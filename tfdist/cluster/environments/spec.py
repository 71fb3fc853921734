"""The JSON document that names a cluster: `TF_CONFIG`, `CLUSTER_SPEC`, `TFDIST_CLUSTER`.

They share one shape, with liberties that platforms take:

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}

Accepted: role names in any case; `master` for chief; `workerpool0` to `workerpool3` (Vertex AI);
tasks as a dict of index to address; `sparseCluster` (Kubeflow with dynamic workers: each task is
told the parameter servers and itself only); an index written as a string; an evaluator inside or
outside the cluster; roles of helpers such as tensorboard, which are left out with a warning.
Everything else that is wrong raises one `ClusterError` that names the variable.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.environments.addresses import check_address
from tfdist.cluster.environments.addresses import check_distinct
from tfdist.cluster.environments.base import head
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import ROLES
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Task
from tfdist.errors import ClusterError

#: Every accepted name of a role, in lower case. The position of a pool carries its meaning.
ROLE_NAMES = {
    **{role: role for role in ROLES},
    "master": CHIEF,
    "workerpool0": CHIEF,
    "workerpool1": WORKER,
    "workerpool2": PS,
    "workerpool3": EVALUATOR,
}

_INDEX = re.compile(r"[0-9]{1,9}")
_MAX_TASKS = 100_000


@dataclasses.dataclass(frozen=True)
class Spec:
    """A document that was read and whose parts fit together.

    Attributes:
        variable: The variable it comes from.
        addresses: Role to the addresses of its tasks, evaluators included. "" stands for an
            address that a dynamic cluster does not tell.
        task: This process.
        index_given: Whether the document says the index of the task: for an evaluator Vertex AI
            leaves it out.
        dynamic: Whether it is a `sparseCluster`, which tells a task only what it must know.
        pools: Whether roles are given as worker pools.
        job: The platform's description of the whole job, or empty.
        warnings: What was tolerated, one sentence each.
    """

    variable: str
    addresses: Mapping[str, tuple[str, ...]]
    task: Task
    index_given: bool = True
    dynamic: bool = False
    pools: bool = False
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        cluster = {role: list(self.addresses[role]) for role in ROLES if self.addresses.get(role)}
        return f"{self.variable} with task {self.task} of {json.dumps(cluster)}"


def parse(variable: str, value: str) -> Spec | None:
    """Reads the document in `value`.

    Args:
        variable: The variable it comes from, for messages.
        value: The document, without surrounding blanks.

    Returns:
        The document, or None where it says neither a cluster nor a task.

    Raises:
        ClusterError: If it cannot be right.
    """
    if not value:
        return None
    data = _load(variable, value)
    dynamic = data.get("cluster") is None and data.get("sparseCluster") is not None
    cluster = data.get("sparseCluster" if dynamic else "cluster")
    if cluster is not None and not isinstance(cluster, dict):
        raise ClusterError(
            f"cluster in {variable} to be an object of role to addresses",
            f"cluster={head(cluster)}",
            'write {"worker": ["host:port", ...]}',
        )
    if not cluster and data.get("task") is None:
        return None
    warnings: list[str] = []
    addresses, pools = _read_cluster(variable, cluster or {}, warnings)
    task, index_given = _read_task(variable, data.get("task"), cluster or {}, warnings)
    if dynamic:
        addresses = _place_own_address(addresses, task)
    _check_gaps(variable, addresses)
    alone = not any((cluster or {}).values())
    _check_member(variable, addresses, task, alone=alone, dynamic=dynamic)
    return Spec(
        variable=variable,
        addresses=addresses,
        task=task,
        index_given=index_given,
        dynamic=dynamic,
        pools=pools,
        job=_read_job(data.get("job"), variable, warnings),
        warnings=tuple(dict.fromkeys(warnings)),
    )


class _Object(dict[str, Any]):
    """A JSON object that remembers a key that it was given twice."""

    repeated: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        made.repeated = next(key for key in keys if keys.count(key) > 1)
    return made


def _load(variable: str, value: str) -> _Object:
    try:
        data = json.loads(value, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        fix = "correct the JSON at that position"
        if "'" in value and '"' not in value:
            fix = "write JSON with double quotes, as json.dumps does"
        raise ClusterError(
            f"{variable} to be JSON",
            f"{error.msg} at line {error.lineno} column {error.colno} (char {error.pos}) of "
            f"{head(value)}",
            fix,
        ) from None
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"{variable} to be JSON", f"{head(value)} ({error})", "correct the JSON"
        ) from None
    if not isinstance(data, _Object):
        fix = 'write {"cluster": {...}, "task": {...}}'
        if isinstance(data, str):
            fix = f"{fix}; the value is quoted twice"
        raise ClusterError(f"{variable} to be a JSON object", head(value), fix)
    _check_repeated(variable, data, "the document")
    return data


def _check_repeated(variable: str, data: object, where: str) -> None:
    if isinstance(data, _Object) and data.repeated is not None:
        raise ClusterError(
            f"each key once in {where} of {variable}",
            f"the duplicate key {head(data.repeated)}",
            "write each key once",
        )


def _read_cluster(
    variable: str, cluster: Mapping[str, Any], warnings: list[str]
) -> tuple[dict[str, tuple[str, ...]], bool]:
    _check_repeated(variable, cluster, "cluster")
    named: dict[str, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name, value in cluster.items():
        role = _role(name)
        if role is None:
            _check_spelling(variable, name)
            warnings.append(
                f"{variable} lists tasks of role {head(name)}, which TensorFlow does not know; "
                "they are left out of the cluster."
            )
            continue
        tasks = _read_tasks(variable, role, name, value)
        if not tasks:
            continue
        if role in found:
            raise ClusterError(
                f"each role once in cluster of {variable}",
                f"the duplicate role {role}, given as {head(named[role])} and {head(name)}",
                "keep one of them",
            )
        named[role] = name
        found[role] = tasks
        if name.strip().lower() == "master":
            warnings.append(f"{variable} says master; it is taken as chief.")
    if len(found.get(CHIEF, ())) > 1:
        raise ClusterError(
            f"one address for the chief in {variable}",
            f"{named[CHIEF]}={head(list(found[CHIEF]))}",
            "keep one chief and list the others as worker",
        )
    check_distinct(
        (
            (f"{role} {index}", address)
            for role, tasks in found.items()
            for index, address in enumerate(tasks)
            if address
        ),
        variable,
    )
    pools = any(name.strip().lower().startswith("workerpool") for name in named.values())
    return found, pools


def _role(name: str) -> str | None:
    return ROLE_NAMES.get(name.strip().lower())


def _check_spelling(variable: str, name: str) -> None:
    """Refuses a misspelt role: left out with a warning, its tasks would wait for ever."""
    import difflib  # Only here: most clusters never need it.

    close = difflib.get_close_matches(name.strip().lower(), ROLES, n=1, cutoff=0.83)
    if close:
        raise ClusterError(
            f"roles of cluster in {variable} to be among {', '.join(ROLES)}",
            f"the role {head(name)}",
            f"did you mean {close[0]}",
        )


def _read_tasks(variable: str, role: str, name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(
            check_address(address, f"{variable}, {role} {index}")
            for index, address in enumerate(value)
        )
    if not isinstance(value, dict):
        raise ClusterError(
            f"a list of addresses for each role of cluster in {variable}",
            f"{name}={head(value)}",
            f'write "{name}": ["host:port", ...]',
        )
    _check_repeated(variable, value, f"cluster.{name}")
    known: dict[int, str] = {}
    for key, address in value.items():
        index = _index(key)
        if index is None or index in known or index >= _MAX_TASKS:
            raise ClusterError(
                f"each key of cluster.{name} in {variable} to be the index of one task",
                f"the key {head(key)}",
                'write {"0": "host:port", "1": "host:port"}',
            )
        known[index] = check_address(address, f"{variable}, {role} {index}")
    return tuple(known.get(index, "") for index in range(max(known, default=-1) + 1))


def _read_task(
    variable: str, task: object, cluster: Mapping[str, Any], warnings: list[str]
) -> tuple[Task, bool]:
    if not isinstance(task, dict):
        raise ClusterError(
            f"a task in {variable} that says which process this is",
            "no task" if task is None else f"task={head(task)}",
            'add "task": {"type": "worker", "index": 0}',
        )
    _check_repeated(variable, task, "task")
    name = task.get("type")
    if not isinstance(name, str) or not name.strip():
        raise ClusterError(
            f"the type of the task in {variable}, one of {', '.join(ROLES)}",
            f"task={head(task)}",
            'add "type" to the task',
        )
    role = _role(name)
    if role is None:
        raise ClusterError(
            f"the type of the task in {variable} to be one of {', '.join(ROLES)}",
            f"task type {head(name)} with cluster={head(cluster)}",
            "run this program only in tasks of these types",
        )
    if name.strip().lower() == "master":
        warnings.append(f"{variable} says master; it is taken as chief.")
    given = task.get("index") is not None
    if not given and role == EVALUATOR:
        return Task(EVALUATOR, 0), False
    index = _index(task.get("index"))
    if index is None:
        raise ClusterError(
            f"a whole number, 0 or more, as the index of the task in {variable}",
            f"index={head(task.get('index'))}" if given else f"no index in task={head(task)}",
            'write "index": 0 for the first task of its type',
        )
    return Task(role, index), True


def _index(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    if isinstance(value, str) and _INDEX.fullmatch(value.strip()):
        return int(value)
    return None


def _place_own_address(
    addresses: dict[str, tuple[str, ...]], task: Task
) -> dict[str, tuple[str, ...]]:
    """Moves the only address of a `sparseCluster` to the index of its task.

    Kubeflow tells a parameter server its own address alone, as a list of one at any index.
    """
    known = addresses.get(task.type, ())
    if task.type != PS or len(known) != 1 or not 0 < task.index < _MAX_TASKS:
        return addresses
    return {**addresses, PS: ("",) * task.index + known}


def _check_gaps(variable: str, addresses: Mapping[str, tuple[str, ...]]) -> None:
    if addresses.get(PS):
        return  # The tasks of a parameter-server cluster may come and go.
    for role, tasks in addresses.items():
        if "" in tasks:
            raise ClusterError(
                f"the address of every {role} in {variable}, because the cluster has no ps",
                f"no address for {role} of index {tasks.index('')}",
                "list every task from index 0 on",
            )


def _check_member(
    variable: str,
    addresses: Mapping[str, tuple[str, ...]],
    task: Task,
    *,
    alone: bool,
    dynamic: bool,
) -> None:
    if task.type == EVALUATOR and not addresses.get(EVALUATOR):
        return
    shown = f"task {task} with cluster={head({role: list(addresses[role]) for role in addresses})}"
    if alone and (dynamic or task.type == PS):
        raise ClusterError(
            f"the addresses of the other tasks in {variable}", shown, "add the cluster"
        )
    if alone and task.index:
        raise ClusterError(
            f"index 0 for the only task in {variable}", shown, "add the cluster or use index 0"
        )
    if alone:
        return
    if dynamic and not addresses.get(PS):
        raise ClusterError(
            f"parameter servers (ps) in sparseCluster of {variable}",
            shown,
            "add ps, or switch dynamic workers off so that every worker knows its peers",
        )
    known = addresses.get(task.type, ())
    if not known:
        raise ClusterError(
            f"the task to be part of the cluster in {variable}",
            shown,
            f"add {task.type} to the cluster, or correct the type of the task",
        )
    if task.index >= len(known) or not known[task.index]:
        raise ClusterError(
            f"the index of the task in {variable} to be one of those that cluster.{task.type} "
            f"lists ({len(known)})",
            shown,
            f"use an index from 0 to {len(known) - 1}, or list the missing address",
        )


def _read_job(job: object, variable: str, warnings: list[str]) -> Mapping[str, Any]:
    """Returns the description of the job; some samples carry it as JSON inside a string."""
    if isinstance(job, str) and job.strip():
        try:
            job = json.loads(job)
        except (ValueError, RecursionError):
            warnings.append(f"job in {variable} is not JSON; it is ignored.")
            return {}
    return job if isinstance(job, dict) else {}
