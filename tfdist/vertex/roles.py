"""What each role of a job will find itself in: the cluster as the service describes it.

Addresses are made up; who is there is what counts. A local run with real addresses is the work of
`tfdist.vertex.local`.
"""

from __future__ import annotations

import functools
import json

from tfdist.cluster.detect import detect
from tfdist.cluster.topology import Cluster
from tfdist.strategies import registry
from tfdist.strategies.choose import VARIABLE
from tfdist.strategies.choose import Choice
from tfdist.strategies.choose import choose
from tfdist.strategies.choose import requested
from tfdist.vertex.render import pools
from tfdist.vertex.spec import POOL_INDEX
from tfdist.vertex.spec import REDUCTION_SERVER
from tfdist.vertex.spec import JobSpec

PORT = 2222
#: Replicas of a pool that are looked at: to reason about more takes long and teaches nothing.
MOST = 1000

#: Variables that tell a replica who it is.
WHO_AM_I = ("CLUSTER_SPEC", "TF_CONFIG", "TFDIST_CLUSTER")


def cluster_of(spec: JobSpec, role: str) -> Cluster:
    """Returns the cluster as the first replica of a role sees it.

    Args:
        spec: The job.
        role: One of its roles, but not a Reduction Server, which runs the vendor's program.

    Raises:
        ClusterError: The pools make no cluster.
    """
    description = {
        "cluster": {
            f"workerpool{POOL_INDEX[each]}": [
                f"workerpool{POOL_INDEX[each]}-{index}:{PORT}"
                for index in range(min(pool.replicas, MOST))
            ]
            for each, pool in spec.pools
        },
        "environment": "cloud",
        "task": {"type": f"workerpool{POOL_INDEX[role]}", "index": 0},
        "job": {"workerPoolSpecs": pools(spec)},
    }
    # What the job sets for every replica, not what this machine has set for itself.
    given = {name: value for name, value in spec.env.items() if name not in WHO_AM_I}
    return detect({**given, "CLUSTER_SPEC": json.dumps(description)})


def choice_of(spec: JobSpec, role: str) -> Choice:
    """Returns the strategy that a role will run, and why.

    Raises:
        ClusterError: The pools make no cluster.
        StrategyError: The strategy that the job asks for cannot run there.
    """
    return choose(
        cluster_of(spec, role),
        name=spec.strategy or requested({VARIABLE: spec.env.get(VARIABLE, "")}),
        replicas=spec.strategy_replicas,
        known=_known(),
    )


def programs(spec: JobSpec) -> tuple[str, ...]:
    """Returns the roles that run the user's program."""
    return tuple(role for role, _ in spec.pools if role != REDUCTION_SERVER)


@functools.cache
def _known() -> tuple[str, ...]:
    """Returns the names of strategies; to look for plug-ins reads the files of every package."""
    return registry.names()
