"""Synchronous replicas in several processes.

TensorFlow builds a MultiWorkerMirroredStrategy from `TF_CONFIG` alone, understands few of the
shapes it has in the field, and waits for ever for a task that does not come. `guard` puts tfdist's
detection and start barrier in front of the constructor, so that a script that calls
`tf.distribute.MultiWorkerMirroredStrategy()` itself has them too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from typing import Any

from tfdist import logs
from tfdist.cluster import current
from tfdist.cluster.detect import detect
from tfdist.cluster.group import Group
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import StrategyError
from tfdist.strategies import communication
from tfdist.strategies import sigterm
from tfdist.strategies.communication import CommunicationOptions
from tfdist.strategies.registry import Options

log = logging.getLogger("absl")

_MARK = "_tfdist_original"


def build(cluster: Cluster, options: Options) -> Any:
    """Joins the other workers and returns a MultiWorkerMirroredStrategy.

    Raises:
        RendezvousError: Not all workers came in time.
        StrategyError: TensorFlow had already started.
    """
    # Before TensorFlow is imported: who is missing is known some seconds sooner.
    current.join_once(cluster, options.rendezvous_timeout)
    import tensorflow as tf

    guard()
    asked = options.communication or CommunicationOptions.from_environ()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=resolver(cluster), communication_options=asked.to_tensorflow()
    )
    communication.remember(strategy, asked)
    return strategy


def resolver(cluster: Cluster) -> Any:
    """Returns the `tf.distribute` cluster resolver that describes `cluster`."""
    import tensorflow as tf

    class Resolver(tf.distribute.cluster_resolver.SimpleClusterResolver):  # type: ignore[misc]
        # The one of TensorFlow lists logical devices, which starts the runtime too early.
        def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
            gpus = len(tf.config.list_physical_devices("GPU"))
            return {"GPU": gpus} if gpus else {}

    alone = cluster.num_workers < 2 and not cluster.has_parameter_servers
    if alone or cluster.is_evaluator:
        return Resolver(tf.train.ClusterSpec({}))
    return Resolver(
        tf.train.ClusterSpec({role: list(cluster.addresses[role]) for role in cluster.roles}),
        task_type=cluster.task.type,
        task_id=cluster.task.index,
        rpc_layer="grpc",
    )


def guard() -> None:
    """Puts detection and the start barrier before every MultiWorkerMirroredStrategy, once."""
    import tensorflow as tf

    cls = tf.distribute.MultiWorkerMirroredStrategy
    original = cls.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def __init__(
        self: Any, cluster_resolver: Any = None, communication_options: Any = None
    ) -> None:
        if cluster_resolver is not None:
            _join_described(cluster_resolver)
        else:
            cluster = detect(os.environ)
            _refuse_servers(cluster)
            logs.install(cluster)
            log.info("%s: %s", cluster.task, cluster.source)
            current.join_once(cluster)
            cluster_resolver = resolver(cluster)
        if communication_options is None:
            communication_options = CommunicationOptions.from_environ().to_tensorflow()
        try:
            with sigterm.kept() if current.group() is not None else contextlib.nullcontext():
                original(self, cluster_resolver, communication_options)
        except RuntimeError as error:
            if "program startup" not in str(error):
                raise
            raise StrategyError(
                "the strategy to be built before TensorFlow starts",
                "an operation, a variable or a list of logical devices came first",
                "build the strategy at the top of the script, right after the imports",
            ) from error

    original_scope = cls.scope

    @functools.wraps(original_scope)
    def scope(self: Any) -> Any:
        group = current.group()
        inner = original_scope(self)
        return inner if group is None else _Together(inner, group)

    setattr(__init__, _MARK, original)
    setattr(scope, _MARK, original_scope)
    cls.__init__, cls.scope = __init__, scope


def unguard() -> None:
    """Takes `guard` out again."""
    import tensorflow as tf

    cls = tf.distribute.MultiWorkerMirroredStrategy
    cls.__init__ = getattr(cls.__init__, _MARK, cls.__init__)
    cls.scope = getattr(cls.scope, _MARK, cls.scope)


class _Together:
    """A strategy's scope in which no worker waits for one that is gone.

    Variables are made in a collective: each worker waits there for the chief.
    """

    def __init__(self, inner: Any, group: Group):
        self._inner = inner
        self._together = group.together("strategy.scope()")

    def __enter__(self) -> Any:
        self._together.__enter__()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        swallowed = self._inner.__exit__(*error)
        return self._together.__exit__(*((None, None, None) if swallowed else error))


def _join_described(resolver: Any) -> None:
    """Joins the cluster that a resolver describes, if it names several workers."""
    spec = resolver.cluster_spec().as_dict()
    if sum(len(spec.get(role, ())) for role in (CHIEF, WORKER)) < 2 or resolver.task_type is None:
        return
    current.join_once(
        Cluster(
            environment="resolver",
            task=Task(str(resolver.task_type), int(resolver.task_id or 0)),
            addresses={role: tuple(spec[role]) for role in (CHIEF, WORKER) if spec.get(role)},
        )
    )


def _refuse_servers(cluster: Cluster) -> None:
    if cluster.has_parameter_servers:
        raise StrategyError(
            "a cluster of chief and workers only for MultiWorkerMirroredStrategy",
            f"a cluster with parameter servers {list(cluster.addresses['ps'])}",
            "start the job without parameter servers, or use tfdist.strategy(), which picks "
            "ParameterServerStrategy for this cluster",
        )
