"""Rules of a Reduction Server."""

from __future__ import annotations

import math
import re

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import plural
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.facts import GPU
from tfdist.vertex.spec import Pool

_VENDOR = re.compile(r"reduction[-_]?server")


def _trainers(job: Job) -> list[tuple[str, Pool]]:
    """Returns the pools whose gradients are summed up."""
    pools = job.spec.pools
    return [(role, pool) for role, pool in pools if role in ("chief", "worker")]


def _has_gpus(job: Job, pool: Pool) -> bool:
    known = job.facts.accelerators.get(pool.accelerator.type) if pool.accelerator else None
    return known is not None and known.kind == GPU


@rule("reduction-server-needs-gpus")
def needs_gpus(job: Job) -> Findings:
    """A Reduction Server is for workers with GPUs."""
    if job.spec.pools.reduction_server is None:
        return
    without = [role for role, pool in _trainers(job) if not _has_gpus(job, pool)]
    if without:
        yield problem(
            "GPUs in chief and worker for a Reduction Server",
            f"none in {' and '.join(without)}",
            "add accelerators, or leave vertex.pools.reduction_server out",
        )


@rule("reduction-server-needs-nccl")
def needs_nccl(job: Job) -> Findings:
    """The image has NCCL and the package of the Reduction Server."""
    if job.spec.pools.reduction_server is None:
        return
    facts = job.facts.raw["reduction_server"]
    found = job.facts.prebuilt_image(job.spec.image)
    needs = f"NCCL {facts['nccl']} or later and the package {facts['package']} in the image"
    if found is None:
        yield doubt(
            needs,
            f"{job.spec.image}, which nobody looked into",
            f"install {facts['package']} in its Dockerfile as docs/vertex.md shows",
        )
        return
    name, known = found
    version = tuple(map(int, (known.tensorflow or "0").split("."))) if known else None
    oldest = tuple(map(int, facts["oldest_tensorflow"].split(".")))
    if "-gpu." not in name or (version and version != (0,) and version < oldest):
        yield problem(
            needs,
            f"{name}, which has no NCCL" if "-gpu." not in name else name,
            "use an image for GPUs, or leave vertex.pools.reduction_server out",
        )


@rule("reduction-server-image")
def vendor_image(job: Job) -> Findings:
    """Its pool runs the vendor's image."""
    pool = job.spec.pools.reduction_server
    if pool and pool.image and not _VENDOR.search(pool.image.lower()):
        yield problem(
            "the vendor's image in the pool of a Reduction Server",
            f"reduction_server.image={pool.image!r}",
            "leave vertex.pools.reduction_server.image out",
        )


@rule("reduction-server-flex-start")
def flex_start(job: Job) -> Findings:
    """A Reduction Server and flex-start exclude each other."""
    if job.spec.pools.reduction_server and job.spec.scheduling.strategy == "flex_start":
        yield problem(
            "no Reduction Server with flex_start, which wants the same machines in all pools",
            "vertex.pools.reduction_server with scheduling.strategy: flex_start",
            "leave one of them out",
        )


@rule("reduction-server-own-fabric")
def own_fabric(job: Job) -> Findings:
    """The machines have no faster network of their own."""
    if job.spec.pools.reduction_server is None:
        return
    for role, pool in _trainers(job):
        machine = job.facts.machine(pool.machine_type)
        if machine and machine.own_fabric:
            yield problem(
                f"no Reduction Server for {machine.type}, whose GPUs are joined by "
                f"{machine.own_fabric}",
                f"vertex.pools.reduction_server with {machine.type} in {role}",
                "leave vertex.pools.reduction_server out",
            )


@rule("reduction-server-gpus")
def no_gpus(job: Job) -> Findings:
    """Its own machines need no GPUs."""
    pool = job.spec.pools.reduction_server
    if pool and pool.accelerator:
        yield problem(
            "no accelerators in the machines of a Reduction Server, which does not use them",
            plural(pool.accelerator.count, pool.accelerator.type),
            "leave vertex.pools.reduction_server.accelerator out",
        )


def reducers_needed(job: Job) -> tuple[int, float, float] | None:
    """Returns how many reducers match the workers, and the egress of all workers and of one.

    None where an egress is not known. Egress is in gigabits per second.
    """
    pool = job.spec.pools.reduction_server
    machine = job.facts.machine(pool.machine_type) if pool else None
    if machine is None or not machine.egress:
        return None
    total = 0.0
    for _, trainer in _trainers(job):
        kind = job.facts.machine(trainer.machine_type)
        given = trainer.accelerator
        egress = kind.egress_of(given.type, given.count) if kind and given else None
        if egress is None or trainer.replicas < 1:
            return None
        total += egress * trainer.replicas
    return math.ceil(total / machine.egress), total, machine.egress


@rule("reduction-server-size")
def size(job: Job) -> Findings:
    """Reducers send as much as workers: ceil(total / egress of one)."""
    pool = job.spec.pools.reduction_server
    if pool is None or pool.replicas < 1 or not job.spec.pools.worker:
        return
    if any(not _has_gpus(job, trainer) for _, trainer in _trainers(job)):
        return
    needed = reducers_needed(job)
    if needed is None:
        yield doubt(
            "as many reducers as send what the workers send",
            "a machine type whose egress is not known here",
            f"use {job.facts.raw['reduction_server']['machine_type']}, and count: "
            "ceil(total worker egress / egress of one reducer)",
        )
        return
    count, total, one = needed
    rule_ = f"{count} reducers: ceil({total:g} Gbps of all workers / {one:g} Gbps of one reducer)"
    if pool.replicas < count:
        yield problem(
            rule_,
            f"reduction_server.replicas={pool.replicas}",
            f"set vertex.pools.reduction_server.replicas to {count}",
        )
    elif pool.replicas > count:
        yield doubt(
            rule_,
            f"reduction_server.replicas={pool.replicas}, of which some will wait",
            f"set vertex.pools.reduction_server.replicas to {count}",
        )
