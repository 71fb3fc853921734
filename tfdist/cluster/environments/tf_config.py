"""`TF_CONFIG`: TensorFlow's own variable, also set by Kubeflow TFJob, Ray and SageMaker.

`cluster_from` turns any document of that shape into a `Cluster`; Vertex AI's `CLUSTER_SPEC` and
`TFDIST_CLUSTER` use it too.
"""

from __future__ import annotations

import dataclasses

from tfdist.cluster.environments import vertex_job
from tfdist.cluster.environments.base import Environ
from tfdist.cluster.environments.base import count
from tfdist.cluster.environments.base import head
from tfdist.cluster.environments.base import text
from tfdist.cluster.environments.spec import Spec
from tfdist.cluster.environments.spec import parse
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.errors import ClusterError

VARIABLE = "TF_CONFIG"
THIRD_POOL = "TFDIST_POOL2"

_POOL_OF_ROLE = {CHIEF: 0, WORKER: 1, PS: 2, EVALUATOR: 3}


def detect(environ: Environ) -> Cluster | None:
    """Reads `TF_CONFIG`."""
    spec = parse(VARIABLE, text(environ, VARIABLE))
    return None if spec is None else cluster_from(spec, "tf_config", environ)


def cluster_from(spec: Spec, environment: str, environ: Environ) -> Cluster:
    """Returns the cluster that `spec` describes.

    Args:
        spec: The document.
        environment: Name of the environment it was found in.
        environ: For `TFDIST_POOL2`, which says what the third worker pool is.

    Raises:
        ClusterError: This process is a Reduction Server, or nothing in the cluster trains.
    """
    addresses = {role: spec.addresses.get(role, ()) for role in (CHIEF, WORKER, PS)}
    reducers, warnings = _reduction_servers(spec, environ)
    if reducers:
        addresses[PS] = ()
        if spec.task.type == PS:
            raise ClusterError(
                "tasks of the Reduction Server pool to run Google's reductionserver image",
                f"this program in {spec}",
                "set that image on the third worker pool, or TFDIST_POOL2=ps if the pool holds "
                "parameter servers",
            )
    if addresses[PS] and not addresses[WORKER] and not spec.dynamic:
        raise ClusterError(
            "at least one worker beside the parameter servers (ps) of a cluster",
            str(spec),
            "add a worker, because the chief of such a cluster does not train",
        )
    if addresses[PS] and not addresses[CHIEF] and not spec.dynamic:
        headless = (
            f"{spec.variable} lists parameter servers but no chief; TensorFlow needs a chief to "
            "coordinate them."
        )
        warnings += (headless,)
    pool = _POOL_OF_ROLE[spec.task.type]
    tpu = vertex_job.has_tpu(spec.job, pool)
    cluster = Cluster(
        environment=environment,
        task=spec.task,
        addresses={role: tasks for role, tasks in addresses.items() if tasks},
        evaluators=spec.addresses.get(EVALUATOR, ()),
        reduction_servers=reducers,
        accelerators=None if tpu else vertex_job.accelerators(spec.job, pool),
        tpu="local" if tpu else None,
        warnings=spec.warnings + warnings,
    )
    return dataclasses.replace(cluster, source=_describe(spec.variable, cluster))


def _reduction_servers(spec: Spec, environ: Environ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the addresses of a Reduction Server, and warnings where it had to be guessed.

    To TensorFlow such an address is a parameter server that never answers: it waits for ever.
    """
    third = spec.addresses.get(PS, ())
    override = text(environ, THIRD_POOL).lower().replace("-", "_")
    if override not in ("", PS, "reduction_server"):
        raise ClusterError(
            f"{THIRD_POOL} to be ps or reduction_server", head(override), f"correct {THIRD_POOL}"
        )
    if not third or override == PS:
        return (), ()
    if override == "reduction_server":
        return third, ()
    known = vertex_job.is_reduction_server(spec.job)
    if known is not None:
        return (third if known else ()), ()
    if not spec.pools:
        return (), ()
    silent = f"{spec.variable} does not say what the third worker pool runs"
    if not spec.addresses.get(WORKER):
        guess = "without workers it is taken for a Reduction Server"
        return third, (f"{silent}; {guess}. Set {THIRD_POOL}=ps if that is wrong.",)
    guess = "it is taken for parameter servers"
    return (), (f"{silent}; {guess}. Set {THIRD_POOL}=reduction_server if that is wrong.",)


def _describe(variable: str, cluster: Cluster) -> str:
    names = {CHIEF: "chief", WORKER: "worker", PS: "parameter server"}
    parts = [count(sum(map(bool, cluster.addresses[role])), names[role]) for role in cluster.roles]
    if cluster.evaluators:
        parts.append(count(len(cluster.evaluators), "evaluator"))
    if cluster.reduction_servers:
        parts.append(count(len(cluster.reduction_servers), "Reduction Server"))
    named = ", ".join(parts) or "no cluster, so one process"
    return f"{variable} names {named}; this process is {cluster.task}."
