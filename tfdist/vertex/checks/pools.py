"""Rules of worker pools and of the roles in them."""

from __future__ import annotations

import dataclasses

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import PS
from tfdist.errors import ClusterError
from tfdist.errors import StrategyError
from tfdist.vertex import roles
from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import plural
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.spec import POOL_INDEX
from tfdist.vertex.spec import REDUCTION_SERVER
from tfdist.vertex.spec import JobSpec

#: Whoever writes so many replicas has slipped.
_IMPOSSIBLE = 1_000_000


@rule("one-primary")
def one_primary(job: Job) -> Findings:
    """The chief, in pool 0, is exactly one machine."""
    replicas = job.spec.pools.chief.replicas
    if replicas == 1:
        return
    fix = "set vertex.pools.chief.replicas to 1"
    if replicas > 1:
        worker = job.spec.pools.worker
        workers = replicas - 1 + (max(worker.replicas, 0) if worker else 0)
        fix += f" and vertex.pools.worker.replicas to {workers}"
    yield problem("exactly one primary, the chief", f"chief.replicas={replicas}", fix)


@rule("empty-pool-between")
def empty_pool_between(job: Job) -> Findings:
    """No pool without replicas stands before one that is used."""
    used = {role: pool.replicas for role, pool in job.spec.pools}
    for role, replicas in used.items():
        later = [each for each in used if POOL_INDEX[each] > POOL_INDEX[role] and used[each] > 0]
        if replicas < 1 and role != CHIEF and later:
            yield problem(
                f"replicas in pool {POOL_INDEX[role]} ({role}), because {' and '.join(later)} "
                "behind it is used",
                f"{role}.replicas={replicas}",
                f"give {role} machines, or leave vertex.pools.{role} out: a pool that is not used "
                "is then rendered as the service expects",
            )
    pools = job.spec.pools
    if pools.worker is None and pools.ps:
        yield problem(
            "workers in pool 1 beside the parameter servers in pool 2: the chief only coordinates, "
            "so that nobody would train",
            "vertex.pools.ps without vertex.pools.worker",
            "add vertex.pools.worker, or leave vertex.pools.ps out",
        )
    elif pools.worker is None and pools.reduction_server:
        yield problem(
            "workers in pool 1 for the Reduction Server in pool 2: one machine has nobody to "
            "exchange gradients with",
            "vertex.pools.reduction_server without vertex.pools.worker",
            "add vertex.pools.worker, or leave vertex.pools.reduction_server out",
        )


@rule("pool-replicas")
def pool_replicas(job: Job) -> Findings:
    """Every pool that is named has at least one replica."""
    used = {role: pool.replicas for role, pool in job.spec.pools}
    for role, replicas in used.items():
        later = any(POOL_INDEX[each] > POOL_INDEX[role] and used[each] > 0 for each in used)
        if replicas < 1 and role != CHIEF and not later:
            yield problem(
                f"at least one replica of {role}",
                f"{role}.replicas={replicas}",
                f"leave vertex.pools.{role} out, or give it machines",
            )
        if replicas > roles.MOST:
            yield (doubt if replicas < _IMPOSSIBLE else problem)(
                "a number of machines that the project's quota has",
                f"{role}.replicas={replicas}",
                f"check vertex.pools.{role}.replicas",
            )


@rule("ps-with-reduction-server")
def ps_with_reduction_server(job: Job) -> Findings:
    """Pool 2 holds parameter servers or a Reduction Server."""
    if job.spec.pools.ps and job.spec.pools.reduction_server:
        yield problem(
            "parameter servers or a Reduction Server, which share pool 2",
            "vertex.pools.ps and vertex.pools.reduction_server",
            "leave one of them out: a Reduction Server is for workers that train in step",
        )


@rule("evaluators")
def evaluators(job: Job) -> Findings:
    """One evaluator is enough."""
    pool = job.spec.pools.evaluator
    if pool and pool.replicas > 1:
        yield doubt(
            "one evaluator: TensorFlow expects no more, and each evaluates every checkpoint",
            f"evaluator.replicas={pool.replicas}",
            "set vertex.pools.evaluator.replicas to 1",
        )


@rule("one-image")
def one_image(job: Job) -> Findings:
    """Every pool runs the same image, but for a Reduction Server's."""
    for role, pool in job.spec.pools:
        if pool.image and role != REDUCTION_SERVER and pool.image != job.spec.image:
            yield problem(
                f"the image of the job in every pool, so in {role} too",
                f"{role}.image={pool.image!r}",
                f"leave vertex.pools.{role}.image out; vertex.image is run in every pool",
            )


@rule("strategy-pools")
def strategy_pools(job: Job) -> Findings:
    """The strategy that is asked for can run in every pool."""
    if not _is_cluster(job.spec):
        return
    seen = set()
    for role in roles.programs(job.spec):
        try:
            roles.choice_of(job.spec, role)
        except ClusterError as error:
            yield problem(error.expected, error.received or "", error.fix or "correct the pools")
            return
        except StrategyError as error:
            if error.expected in seen:
                continue
            seen.add(error.expected)
            alone = dataclasses.replace(job.spec, strategy=None, strategy_replicas=None, env={})
            able = roles.choice_of(alone, role).name
            yield problem(
                error.expected,
                f"{error.received} ({role})",
                f"set strategy.name to {able}, or to null and tfdist chooses; or change the pools",
            )


def _is_cluster(spec: JobSpec) -> bool:
    """Whether the pools are right as far as the rules above go."""
    pools = spec.pools
    return (
        pools.chief.replicas == 1
        and all(pool.replicas > 0 for _, pool in pools)
        and not (pools.ps and pools.reduction_server)
        and not ((pools.ps or pools.reduction_server) and not pools.worker)
    )


@rule("ps-restart")
def ps_restart(job: Job) -> Findings:
    """A job with parameter servers does not restart as a whole."""
    if job.spec.pools.ps and job.spec.scheduling.restart_job_on_worker_restart:
        yield problem(
            "a job with parameter servers to go on when a worker restarts",
            "scheduling.restart_job_on_worker_restart: true",
            "leave it out, or set it to false",
        )


@rule("step-restart")
def step_restart(job: Job) -> Findings:
    """Workers that train in step restart together."""
    scheduling = job.spec.scheduling
    if job.spec.pools.worker is None or job.spec.pools.ps:
        return
    if scheduling.restart_job_on_worker_restart is False:
        yield doubt(
            "workers that train in step to restart together: one that comes back alone finds "
            "nobody at its step",
            "scheduling.restart_job_on_worker_restart: false",
            "leave it out",
        )
    if scheduling.disable_retries:
        yield doubt(
            "retries, which also carry the restart of workers that train in step",
            "scheduling.disable_retries: true",
            "leave it out unless a lost worker shall end the job",
        )


@rule("same-accelerators")
def same_accelerators(job: Job) -> Findings:
    """Workers that train in step have the same accelerators."""
    chief, worker = job.spec.pools.chief, job.spec.pools.worker
    if worker is None or job.spec.pools.ps:
        return
    if chief.accelerator != worker.accelerator:
        yield problem(
            "the same accelerators in chief and worker, which sum up gradients together",
            f"chief.accelerator={_shown(chief.accelerator)}, "
            f"worker.accelerator={_shown(worker.accelerator)}",
            "give both pools the same accelerator",
        )
    elif chief.machine_type != worker.machine_type:
        yield doubt(
            "the same machine in chief and worker: each step takes as long as on the slowest",
            f"{chief.machine_type} and {worker.machine_type}",
            "give both pools the same machine_type",
        )


def _shown(accelerator: object) -> str:
    if accelerator is None:
        return "none"
    return f"{getattr(accelerator, 'count', 0)} x {getattr(accelerator, 'type', '')}"


@rule("idle-accelerators")
def idle_accelerators(job: Job) -> Findings:
    """Accelerators are where something is computed."""
    spec = job.spec
    idle = [PS, CHIEF] if spec.pools.ps else []
    if spec.scheduling.strategy == "flex_start":
        return  # Asks for the same machine in all pools.
    for role, pool in spec.pools:
        if role in idle and pool.accelerator:
            what = "holds variables" if role == PS else "only coordinates"
            yield doubt(
                f"no accelerators in {role}, which {what}",
                plural(pool.accelerator.count, pool.accelerator.type),
                f"leave vertex.pools.{role}.accelerator out",
            )
