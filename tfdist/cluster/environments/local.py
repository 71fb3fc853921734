"""No environment at all: one process on this machine."""

from __future__ import annotations

from tfdist.cluster.environments.base import Environ
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task


def detect(environ: Environ) -> Cluster:
    """Returns the cluster of one."""
    return Cluster(
        environment="local",
        task=Task(WORKER, 0),
        source="No variable describes a cluster; this is one process.",
    )
