"""What a job will be, before it is submitted: machines, roles, strategies, restarts.

    made = plan(spec)
    made.pools[0].strategy                  # "multi_worker", and in .reasons why

Pure and quick: it asks nobody, and imports neither TensorFlow nor Google's client. The strategies
are those that the processes themselves will choose, from the cluster that the service describes.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from tfdist.vertex import roles
from tfdist.vertex.checks import check
from tfdist.vertex.checks.finding import Finding
from tfdist.vertex.duration import seconds
from tfdist.vertex.duration import shown
from tfdist.vertex.facts import facts
from tfdist.vertex.render import disk_type
from tfdist.vertex.render import image
from tfdist.vertex.render import restarts_job
from tfdist.vertex.spec import POOL_INDEX
from tfdist.vertex.spec import REDUCTION_SERVER
from tfdist.vertex.spec import JobSpec
from tfdist.vertex.spec import Pool

_WIDEST_PROGRAM = 100


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """One worker pool.

    Attributes:
        position: In `workerPoolSpecs`.
        role: What its replicas are.
        replicas: How many.
        machine_type: Of each.
        accelerator: Of each, as "8 x NVIDIA_L4", or "".
        disk: Of each, as "100 GB pd-ssd".
        image: What each runs.
        strategy: What the program will run with, or "" in a Reduction Server.
        reasons: Why, one sentence each.
    """

    position: int
    role: str
    replicas: int
    machine_type: str
    accelerator: str
    disk: str
    image: str
    strategy: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job that was checked.

    Attributes:
        display_name: Its name.
        parent: Project and region, as the service names them.
        program: What runs, as a command line.
        pools: By position.
        restarts: What happens when a replica fails.
        scheduling: How machines are got, and for how long.
        billed: Machines, accelerators and disks that are paid for while the job runs, each with
            its number.
        output: Where results go, or "".
        warnings: Doubts that the rules have.
    """

    display_name: str
    parent: str
    program: str
    pools: tuple[PoolPlan, ...]
    restarts: str
    scheduling: str
    billed: Mapping[str, int]
    output: str
    warnings: tuple[Finding, ...]


def plan(spec: JobSpec) -> Plan:
    """Checks a job and says what it will be.

    Args:
        spec: The job.

    Raises:
        JobError: The job breaks rules; all are listed.
    """
    warnings = check(spec)
    return Plan(
        display_name=spec.display_name,
        parent=spec.parent,
        program=_program(spec),
        pools=tuple(
            sorted(
                (_pool(spec, role, pool) for role, pool in spec.pools),
                key=lambda each: each.position,
            )
        ),
        restarts=_restarts(spec),
        scheduling=_scheduling(spec),
        billed=_billed(spec),
        output=spec.base_output_directory or "",
        warnings=warnings,
    )


def as_json(made: Plan) -> dict[str, Any]:
    """Returns a plan as `tfdist vertex plan --json` prints it."""
    content = dataclasses.asdict(made)
    content["warnings"] = [
        {name: value for name, value in dataclasses.asdict(finding).items() if name != "is_error"}
        for finding in made.warnings
    ]
    return content


def _pool(spec: JobSpec, role: str, pool: Pool) -> PoolPlan:
    strategy = ""
    reasons: tuple[str, ...] = ("The vendor's program adds up gradients.",)
    if role != REDUCTION_SERVER:
        choice = roles.choice_of(spec, role)
        cluster = roles.cluster_of(spec, role)
        strategy = choice.name
        reasons = (*choice.reasons, *choice.warnings, *cluster.warnings)
    return PoolPlan(
        position=POOL_INDEX[role],
        role=role,
        replicas=pool.replicas,
        machine_type=pool.machine_type + (f" {pool.tpu_topology}" if pool.tpu_topology else ""),
        accelerator=f"{pool.accelerator.count} x {pool.accelerator.type}"
        if pool.accelerator
        else "",
        disk=f"{pool.disk.size_gb} GB {disk_type(pool)}",
        image=image(spec, role),
        strategy=strategy,
        reasons=reasons,
    )


def _program(spec: JobSpec) -> str:
    words = shlex.join(spec.args)
    if spec.code == "package":
        return f"python -m {spec.module} {words}".rstrip()
    if spec.command:
        return f"{shlex.join(spec.command)} {words}".rstrip()
    return f"the entry point of the image with {words}" if words else "the entry point of the image"


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDEST_PROGRAM else f"{text[: _WIDEST_PROGRAM - 3]}..."


def _restarts(spec: JobSpec) -> str:
    known = facts().raw["restarts"]
    if spec.scheduling.disable_retries:
        return "none: the first replica that fails ends the job"
    again = f"the job is then tried {known['job']} times"
    if spec.scheduling.strategy == "spot":
        again += f"; when machines are taken back, it starts again up to {known['spot']} times"
    one = f"a replica that fails starts again in place, up to {known['replica']} times"
    if restarts_job(spec):
        return f"{one}, and all others with it; {again}"
    if len(list(spec.pools)) > 1 or spec.pools.chief.replicas > 1:
        return f"{one}, while the others go on; {again}"
    return f"{one}; {again}"


def _scheduling(spec: JobSpec) -> str:
    given = spec.scheduling
    limit = seconds(given.timeout) if given.timeout is not None else None
    default = facts().raw["timeout"]["default"]
    parts: list[str] = [given.strategy]
    parts.append(f"at most {shown(limit or default)}" + ("" if limit else ", the service's own"))
    if given.strategy == "flex_start":
        wait = given.max_wait
        length = facts().raw["flex_start"]["default_wait"] if wait is None else seconds(wait)
        parts.append(f"waits {f'up to {shown(length)}' if length else 'for ever'} for machines")
    if spec.persistent_resource:
        parts.append(f"on the persistent resource {spec.persistent_resource}")
    if spec.reservation:
        named = f" {spec.reservation.name}" if spec.reservation.name else ""
        parts.append(f"reservation {spec.reservation.affinity}{named}")
    return "; ".join(parts)


def _billed(spec: JobSpec) -> dict[str, int]:
    """Counts what runs; on a persistent resource nothing is charged beside it."""
    if spec.persistent_resource:
        return {}
    counts: dict[str, int] = {}
    for _, pool in spec.pools:
        machine = pool.machine_type + (f" {pool.tpu_topology}" if pool.tpu_topology else "")
        counts[machine] = counts.get(machine, 0) + pool.replicas
    for _, pool in spec.pools:
        if pool.accelerator:
            name = pool.accelerator.type
            counts[name] = counts.get(name, 0) + pool.replicas * pool.accelerator.count
    for _, pool in spec.pools:
        disk = f"GB of {disk_type(pool)}"
        counts[disk] = counts.get(disk, 0) + pool.replicas * pool.disk.size_gb
    return counts


def lines(made: Plan) -> list[str]:
    """Returns a plan as `tfdist vertex plan` prints it."""
    header = ("pool", "role", "replicas", "machine", "accelerator", "disk", "image")
    rows = [
        (
            str(each.position),
            each.role,
            str(each.replicas),
            each.machine_type,
            each.accelerator or "-",
            each.disk,
            each.image,
        )
        for each in made.pools
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    written = [f"{made.display_name} in {made.parent}", f"runs {_shortened(made.program)}", ""]
    for row in (header, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        written.append("  ".join(cells).rstrip())
    written.append("")
    for each in made.pools:
        if each.strategy:
            written.append(f"{each.role:<11}{each.strategy}: {' '.join(each.reasons)}")
        else:
            written.append(f"{'reducers':<11}{' '.join(each.reasons)}")
    billed = ", ".join(f"{count} x {what}" for what, count in made.billed.items())
    written += [
        f"{'restarts':<11}{made.restarts}",
        f"{'scheduling':<11}{made.scheduling}",
        f"{'output':<11}{made.output or 'only what the program itself sends away'}",
        f"{'billed':<11}{billed or 'nothing beside the persistent resource'}",
    ]
    return written + [f"{'warning':<11}{finding}" for finding in made.warnings]
