"""Vertex AI custom jobs: `CLUSTER_SPEC`, checked against `TF_CONFIG` where both are set.

The position of a worker pool carries its meaning: 0 the chief, 1 workers, 2 parameter servers or
a Reduction Server, 3 evaluators. `TF_CONFIG` of the same replica never lists evaluators, tells an
evaluator its type alone, and shows a Reduction Server as `ps`: that is no disagreement.
"""

from __future__ import annotations

import dataclasses

from tfdist.cluster.environments.addresses import same
from tfdist.cluster.environments.base import Environ
from tfdist.cluster.environments.base import text
from tfdist.cluster.environments.spec import Spec
from tfdist.cluster.environments.spec import parse
from tfdist.cluster.environments.tf_config import VARIABLE as TF_CONFIG
from tfdist.cluster.environments.tf_config import cluster_from
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.errors import ClusterError

VARIABLE = "CLUSTER_SPEC"


def detect(environ: Environ) -> Cluster | None:
    """Reads `CLUSTER_SPEC`, and `TF_CONFIG` to check it."""
    spec = parse(VARIABLE, text(environ, VARIABLE))
    if spec is None:
        return None
    other = parse(TF_CONFIG, text(environ, TF_CONFIG))
    if other is not None and not spec.job:
        spec = dataclasses.replace(spec, job=other.job)
    cluster = cluster_from(spec, "vertex", environ)
    if other is not None:
        _check_agreement(spec, other, cluster)
    return cluster


def _check_agreement(spec: Spec, other: Spec, cluster: Cluster) -> None:
    difference = _difference(spec, other, cluster)
    if difference:
        raise ClusterError(
            f"{VARIABLE} and {TF_CONFIG} to say the same",
            f"they disagree on {difference}: {spec}; {other}",
            "unset the wrong one",
        )


def _difference(spec: Spec, other: Spec, cluster: Cluster) -> str:
    if spec.task.type != other.task.type:
        return "the type of the task"
    if other.index_given and spec.index_given and spec.task.index != other.task.index:
        return "the index of the task"
    if not other.addresses:
        return ""
    for role in (CHIEF, WORKER, PS, EVALUATOR):
        ours = spec.addresses.get(role, ())
        theirs = other.addresses.get(role, ())
        optional = role == EVALUATOR or (role == PS and cluster.reduction_servers)
        if not same(ours, theirs) and not (optional and not theirs):
            return f"the addresses of {role}"
    return ""
