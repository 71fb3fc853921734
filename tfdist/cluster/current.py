"""The group of this process: joined at most once, since a process is in one job only."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdist.cluster import rendezvous
from tfdist.cluster.group import Group
from tfdist.cluster.topology import Cluster
from tfdist.errors import ClusterError

_group: Group | None = None


def group() -> Group | None:
    """Returns the group of this process, or None before the barrier and in a one-process world."""
    return _group


def join_once(
    cluster: Cluster,
    timeout: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Group | None:
    """Joins the group of `cluster`, or returns the one already joined.

    Returns None where there is nobody to meet: one process, an evaluator (it follows checkpoints
    and meets nobody), or a dynamic cluster that does not tell every address.

    Raises:
        RendezvousError: Tasks were missing at the deadline.
        ClusterError: This process has already joined another cluster.
    """
    global _group
    environ = os.environ if environ is None else environ
    if len(cluster.tasks) < 2 or cluster.is_evaluator:
        return None
    if not all(cluster.address(task) for task in cluster.tasks):
        return None
    if _group is not None:
        known = _group.cluster
        if dict(known.addresses) != dict(cluster.addresses) or known.task != cluster.task:
            raise ClusterError(
                "one cluster in the life of a process",
                f"{dict(cluster.addresses)} after {dict(known.addresses)}",
                "start a new process for the other cluster",
            )
        return _group
    limit = rendezvous.timeout_from(environ) if timeout is None else timeout
    _group = rendezvous.join(cluster, limit, rendezvous.job_name(environ))
    return _group
