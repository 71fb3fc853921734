"""Asynchronous workers that read and update variables on parameter servers.

One script serves every role: in a worker or parameter-server process `build` runs the TensorFlow
server and ends the process when the coordinator is done. A worker that was started again serves
in the place of the one that died.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from tfdist.cluster import current
from tfdist.cluster.group import Group
from tfdist.cluster.serving import Server
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import Cluster
from tfdist.errors import StrategyError
from tfdist.strategies.multi_worker import resolver
from tfdist.strategies.registry import Options

log = logging.getLogger("absl")


def build(cluster: Cluster, options: Options) -> Any:
    """Returns a ParameterServerStrategy in the coordinator; serves and exits in other roles.

    Raises:
        StrategyError: The cluster has no chief to coordinate, or does not tell every address.
        SystemExit: In a worker or parameter server: code 0 when the coordinator is done, 1 when
            it was lost, 143 when it was preempted.
    """
    if not cluster.addresses.get(CHIEF):
        raise StrategyError(
            "a chief in a cluster with parameter servers, to coordinate the workers",
            f"roles {', '.join(cluster.roles)}",
            'add one "chief" task to the cluster',
        )
    unknown = [str(task) for task in cluster.tasks if not cluster.address(task)]
    if unknown:
        raise StrategyError(
            "the address of every task of a cluster with parameter servers",
            f"none for {', '.join(unknown)}",
            "describe the whole cluster in TF_CONFIG",
        )
    group = current.join_once(cluster, options.rendezvous_timeout)
    assert group is not None
    if cluster.task.type != CHIEF:
        _serve(cluster, group)
    import tensorflow as tf

    return tf.distribute.ParameterServerStrategy(resolver(cluster))


def _serve(cluster: Cluster, group: Group) -> None:
    import tensorflow as tf

    server = tf.distribute.Server(
        tf.train.ClusterSpec({role: list(cluster.addresses[role]) for role in cluster.roles}),
        job_name=cluster.task.type,
        task_index=cluster.task.index,
        protocol="grpc",
        start=True,
    )
    log.info("%s serves at %s", cluster.task, server.target)
    code = Server(group).run()
    group.leave()
    sys.exit(code)
