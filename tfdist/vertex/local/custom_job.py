"""What a CustomJob says that matters on this machine: replicas, programs, rules, directories.

A job comes as the service's own JSON (`customJobs.create`), in camel case or in the snake case of
the Python client, or as the `CustomJobSpec` alone that `gcloud ai custom-jobs create --config`
takes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdist.cluster.environments import vertex_job
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Task
from tfdist.errors import ConfigError

#: Role of each worker pool, by its position.
POOL_ROLES = (CHIEF, WORKER, PS, EVALUATOR)

#: The service's own limit of a job's run, in seconds.
DEFAULT_TIMEOUT = 7 * 24 * 3600.0

_NUMBER = re.compile(r"projects/(\d+)/")
_SNAKE = re.compile(r"_([a-z0-9])")
#: Fields whose keys belong to the user.
_OPEN_FIELDS = ("labels",)


@dataclasses.dataclass(frozen=True)
class Program:
    """What the container of a pool runs.

    Attributes:
        image: The container image.
        command: In place of the image's entry point; empty keeps that.
        args: Arguments.
        module: What a Python package spec runs, or "".
        package_uris: Its distributions.
        env: Name and value of the user's variables, in their order.
    """

    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    module: str
    package_uris: tuple[str, ...]
    env: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Replica:
    """One machine of the job.

    Attributes:
        pool: Position of its worker pool.
        index: Position in the pool.
        program: What it runs.
        runs_here: Whether it is started; a Reduction Server's image is the vendor's own.
    """

    pool: int
    index: int
    program: Program
    runs_here: bool = True

    @property
    def task(self) -> Task:
        """Its role and position, as TensorFlow counts."""
        return Task(POOL_ROLES[self.pool], self.index)

    @property
    def pool_name(self) -> str:
        """For example "workerpool1"."""
        return f"workerpool{self.pool}"

    @property
    def name(self) -> str:
        """As the service calls it, for example "workerpool1-0"."""
        return f"{self.pool_name}-{self.index}"

    def __str__(self) -> str:
        return self.task.type if self.pool == 0 else str(self.task)


@dataclasses.dataclass(frozen=True)
class ReceivedJob:
    """A custom job as it was received.

    Attributes:
        name: Resource name, or "".
        display_name: Name shown.
        spec: The `CustomJobSpec` in camel case, as the service shows it to each replica.
        replicas: All replicas, the primary first.
        timeout: Longest run in seconds.
        strategy: How machines are got, for example "SPOT", or "".
        restart_job_on_worker_restart: Whether all replicas restart when one does.
        disable_retries: Whether a failed job is not started again.
        base_output_directory: `gs://...` or a local path without a slash at its end, or "".
        tensorboard: Resource name, or "".
        project_number: Number of the project where any of the resource names tells it, or "".
    """

    name: str
    display_name: str
    spec: Mapping[str, Any]
    replicas: tuple[Replica, ...]
    timeout: float
    strategy: str
    restart_job_on_worker_restart: bool
    disable_retries: bool
    base_output_directory: str
    tensorboard: str
    project_number: str


def read_job(custom_job: Mapping[str, Any]) -> ReceivedJob:
    """Reads a CustomJob.

    Args:
        custom_job: The job as JSON gives it, or its spec alone.

    Raises:
        ConfigError: The service would refuse it, or it cannot be read.
    """
    if not isinstance(custom_job, Mapping):
        raise _wrong("a CustomJob", custom_job, "give the JSON object that a Create call carries")
    job = _camel(custom_job)
    spec = job.get("jobSpec", job if "workerPoolSpecs" in job else None)
    if not isinstance(spec, Mapping):
        raise _wrong(
            "a CustomJob with jobSpec",
            sorted(job),
            "give the body of a Create call, as `tfdist vertex render` prints it",
        )
    scheduling = _mapping(spec, "scheduling")
    base = str(_mapping(spec, "baseOutputDirectory").get("outputUriPrefix") or "")
    named = [job.get("name"), *(spec.get(key) for key in ("tensorboard", "network"))]
    numbers = [_NUMBER.match(name) for name in named if isinstance(name, str)]
    return ReceivedJob(
        name=str(job.get("name") or ""),
        display_name=str(job.get("displayName") or ""),
        spec=spec,
        replicas=_replicas(spec),
        timeout=_seconds(scheduling.get("timeout")) or DEFAULT_TIMEOUT,
        strategy=str(scheduling.get("strategy") or "").upper(),
        restart_job_on_worker_restart=bool(scheduling.get("restartJobOnWorkerRestart")),
        disable_retries=bool(scheduling.get("disableRetries")),
        base_output_directory=base.rstrip("/"),
        tensorboard=str(spec.get("tensorboard") or ""),
        project_number=next((match[1] for match in numbers if match), ""),
    )


def _replicas(spec: Mapping[str, Any]) -> tuple[Replica, ...]:
    pools = spec.get("workerPoolSpecs")
    if not isinstance(pools, Sequence) or isinstance(pools, str) or not pools:
        raise _wrong("jobSpec.workerPoolSpecs with a primary pool", pools, "add one")
    if len(pools) > len(POOL_ROLES):
        raise _wrong(
            f"at most {len(POOL_ROLES)} worker pools",
            len(pools),
            "0 is the primary, 1 workers, 2 parameter servers or a Reduction Server, 3 evaluators",
        )
    found: list[Replica] = []
    for position, pool in enumerate(pools):
        if not isinstance(pool, Mapping):
            raise _wrong(f"workerPoolSpecs[{position}] to be an object", pool, "write {} to skip")
        count = _count(pool, position)
        if position == 0 and count != 1:
            raise _wrong("one replica in the primary pool", count, "set replicaCount to 1 there")
        if not count:
            continue
        program = _program(pool, position)
        vendors = position == 2 and vertex_job.is_reduction_server(spec) is True
        found += [Replica(position, index, program, not vendors) for index in range(count)]
    return tuple(found)


def _count(pool: Mapping[str, Any], position: int) -> int:
    value = pool.get("replicaCount", 1 if pool.get("machineSpec") or _specs(pool) else 0)
    if isinstance(value, str) and value.isdecimal():  # how JSON carries 64 bits
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(f"workerPoolSpecs[{position}].replicaCount to be a number", value, "write 1")
    return value


def _specs(pool: Mapping[str, Any]) -> list[str]:
    return [name for name in ("containerSpec", "pythonPackageSpec") if pool.get(name)]


def _program(pool: Mapping[str, Any], position: int) -> Program:
    given = _specs(pool)
    if len(given) != 1:
        raise _wrong(
            f"workerPoolSpecs[{position}] with a containerSpec or a pythonPackageSpec",
            " and ".join(given) or "neither",
            "say what the pool runs",
        )
    spec = _mapping(pool, given[0])
    module = str(spec.get("pythonModule") or "")
    if given[0] == "pythonPackageSpec" and not module:
        raise _wrong(f"workerPoolSpecs[{position}] with a pythonModule", None, "name it")
    return Program(
        image=str(spec.get("imageUri") or spec.get("executorImageUri") or ""),
        command=_words(spec, "command"),
        args=_words(spec, "args"),
        module=module,
        package_uris=_words(spec, "packageUris"),
        env=tuple(
            (str(entry["name"]), str(entry.get("value") or ""))
            for entry in spec.get("env") or ()
            if isinstance(entry, Mapping) and entry.get("name")
        ),
    )


def _words(spec: Mapping[str, Any], field: str) -> tuple[str, ...]:
    words = spec.get(field) or ()
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise _wrong(f"{field} to be a list of texts", words, "write one entry for each word")
    return tuple(str(word) for word in words)


def _mapping(value: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = value.get(field) or {}
    if not isinstance(found, Mapping):
        raise _wrong(f"{field} to be an object", found, "see the reference of CustomJobSpec")
    return found


def _seconds(value: object) -> float:
    """Returns a duration as JSON writes it ("3600s"), as an object or as a number of seconds."""
    if value is None or value == "":
        return 0.0
    if isinstance(value, Mapping):
        return float(value.get("seconds") or 0) + float(value.get("nanos") or 0) / 1e9
    try:
        seconds = float(str(value).removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise _wrong("scheduling.timeout as seconds", value, 'write for example "3600s"')
    return seconds


def _camel(value: Any) -> Any:
    if isinstance(value, Mapping):
        renamed = {}
        for key, inner in value.items():
            name = _SNAKE.sub(lambda match: match[1].upper(), str(key))
            renamed[name] = dict(inner or {}) if name in _OPEN_FIELDS else _camel(inner)
        return renamed
    if isinstance(value, list | tuple):
        return [_camel(entry) for entry in value]
    return value


def _wrong(expected: str, received: object, fix: str) -> ConfigError:
    return ConfigError(expected, repr(received), fix)
