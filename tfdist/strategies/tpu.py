"""TPU cores of one machine or slice. Not exercised on hardware."""

from __future__ import annotations

from typing import Any

from tfdist.cluster.topology import Cluster
from tfdist.errors import StrategyError
from tfdist.strategies.registry import Options


def build(cluster: Cluster, options: Options) -> Any:
    """Connects to the TPU and returns a TPUStrategy; never falls back to another device.

    Raises:
        StrategyError: No TPU answers. The message lists what was tried.
    """
    import tensorflow as tf

    name = cluster.tpu or ""
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name or "local")
        if name not in ("", "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:
        raise StrategyError(
            f"a TPU that answers to the name {name or 'local'!r}",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "check TPU_NAME and that this machine has a TPU, or choose another strategy by name",
        ) from error
    return tf.distribute.TPUStrategy(resolver)
