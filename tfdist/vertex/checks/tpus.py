"""Rules of TPU machines."""

from __future__ import annotations

import re

from tfdist.cluster.topology import CHIEF
from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import plural
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.facts import TPU
from tfdist.vertex.facts import TpuGeneration
from tfdist.vertex.spec import Pool

_MACHINE = re.compile(r"cloud-tpu|ct[0-9]|tpu[0-9]")


def is_tpu(job: Job, pool: Pool) -> bool:
    """Whether the machines of a pool are TPU machines, of known generations or not."""
    known = job.facts.accelerators.get(pool.accelerator.type) if pool.accelerator else None
    return bool(_MACHINE.match(pool.machine_type)) or (known is not None and known.kind == TPU)


def generation(job: Job, pool: Pool) -> TpuGeneration | None:
    """Returns the generation of the TPUs of a pool, if it is known."""
    return job.facts.tpu(pool.machine_type, pool.accelerator.type if pool.accelerator else None)


def machines(job: Job, pool: Pool) -> int:
    """Returns how many machines a TPU of this topology spans, 1 where that is not known."""
    known = generation(job, pool)
    if known is None:
        single = job.facts.raw["cloud_tpu_count"]["single"]
        return max(1, pool.accelerator.count // single) if pool.accelerator else 1
    spans = known.topologies.get(pool.machine_type, {})
    if pool.tpu_topology is not None and pool.tpu_topology in spans:
        return spans[pool.tpu_topology]
    if pool.accelerator and known.accelerator == pool.accelerator.type:
        return max(1, pool.accelerator.count // int(job.facts.raw["cloud_tpu_count"]["single"]))
    return 1


@rule("tpu-one-pool")
def tpu_one_pool(job: Job) -> Findings:
    """A TPU job is one pool of one replica."""
    pools = dict(job.spec.pools)
    used = [role for role, pool in pools.items() if is_tpu(job, pool)]
    if not used:
        return
    others = [role for role in pools if role != CHIEF]
    if others:
        yield problem(
            "one pool, the chief's, for a TPU",
            f"pools {', '.join(pools)}, TPUs in {', '.join(used)}",
            f"leave {' and '.join(f'vertex.pools.{role}' for role in others)} out; a larger "
            "tpu_topology is how a TPU gets more chips",
        )
    if pools[CHIEF].replicas > 1:
        yield problem(
            "one replica for a TPU, also where its topology spans several machines",
            plural(pools[CHIEF].replicas, "replica"),
            "set vertex.pools.chief.replicas to 1, and tpu_topology to what is needed",
        )


@rule("tpu-topology")
def tpu_topology(job: Job) -> Findings:
    """A TPU machine has a topology that it can have."""
    for role, pool in job.spec.pools:
        where = f"vertex.pools.{role}.tpu_topology"
        if not is_tpu(job, pool):
            if pool.tpu_topology is not None:
                yield problem(
                    "tpu_topology on TPU machines only",
                    f"tpu_topology={pool.tpu_topology!r} on {pool.machine_type} in {role}",
                    f"leave {where} out, or name a machine such as ct5lp-hightpu-4t",
                )
            continue
        if pool.machine_type == "cloud-tpu":
            yield from _cloud_tpu(job, role, pool)
            continue
        known = generation(job, pool)
        spans = known.topologies.get(pool.machine_type, {}) if known else {}
        if not spans:
            continue
        if pool.tpu_topology not in spans:
            yield problem(
                f"a topology of {pool.machine_type}: {', '.join(spans)}",
                f"tpu_topology={pool.tpu_topology!r} in {role}",
                f"set {where} to {next(iter(spans))!r}",
            )
        if known and pool.accelerator and pool.accelerator.type != known.accelerator:
            yield problem(
                f"no accelerator beside the TPUs of {pool.machine_type}",
                f"{role}.accelerator.type={pool.accelerator.type!r}",
                f"leave vertex.pools.{role}.accelerator out",
            )


def _cloud_tpu(job: Job, role: str, pool: Pool) -> Findings:
    numbers = job.facts.raw["cloud_tpu_count"]
    single, pod = numbers["single"], numbers["pod"]
    names = [each.accelerator for each in job.facts.tpus.values() if "cloud-tpu" in each.types]
    if pool.accelerator is None or pool.accelerator.type not in names:
        given = pool.accelerator.type if pool.accelerator else "none"
        yield problem(
            f"{' or '.join(map(str, names))} on cloud-tpu",
            f"accelerator {given} in {role}",
            f"set vertex.pools.{role}.accelerator to {{type: {names[-1]}, count: {single}}}",
        )
    elif pool.accelerator.count != single and pool.accelerator.count % pod:
        yield problem(
            f"{single} cores for one TPU, or a multiple of {pod} for a pod",
            f"{role}.accelerator.count={pool.accelerator.count}",
            f"set vertex.pools.{role}.accelerator.count to {single}",
        )


@rule("tpu-tensorflow")
def tpu_tensorflow(job: Job) -> Findings:
    """The TPU is of a generation that runs TensorFlow."""
    for role, pool in job.spec.pools:
        known = generation(job, pool)
        if known is None or known.tensorflow:
            continue
        able = [each.name for each in job.facts.tpus.values() if each.tensorflow]
        yield (doubt if job.spec.command else problem)(
            f"a TPU that runs TensorFlow: {', '.join(able)}",
            f"{pool.machine_type} ({known.name}) in {role}",
            "name a machine such as ct5lp-hightpu-4t",
        )


@rule("tpu-slice")
def tpu_slice(job: Job) -> Findings:
    """TensorFlow finds the machines of a TPU slice by its name."""
    pool = job.spec.pools.chief
    if is_tpu(job, pool) and machines(job, pool) > 1 and "TPU_NAME" not in job.spec.env:
        yield doubt(
            "a TPU on one machine: TensorFlow needs the name of one that spans several",
            f"{pool.tpu_topology or (pool.accelerator and pool.accelerator.count)} on "
            f"{plural(machines(job, pool), 'machine')}",
            "choose a smaller topology, or set TPU_NAME in vertex.env",
        )
