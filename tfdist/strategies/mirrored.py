"""Several replicas in one process, one for each device."""

from __future__ import annotations

from typing import Any

from tfdist.cluster.topology import Cluster
from tfdist.errors import StrategyError
from tfdist.strategies.registry import Options


def build(cluster: Cluster, options: Options) -> Any:
    """Returns a MirroredStrategy over the local accelerators, or over logical CPU devices.

    Raises:
        StrategyError: More replicas are asked for than there are devices, or TensorFlow has
            started with fewer logical CPU devices than are needed now.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    wanted = options.replicas or max(1, len(gpus))
    if gpus:
        if wanted > len(gpus):
            raise StrategyError(
                f"at most {len(gpus)} replicas, one for each visible GPU",
                f"replicas={wanted}",
                "ask for fewer replicas, or make more GPUs visible (CUDA_VISIBLE_DEVICES)",
            )
        return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(wanted)])
    _split_cpu(wanted)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(wanted)])


def _split_cpu(count: int) -> None:
    import tensorflow as tf

    if count == 1:
        return
    [cpu] = tf.config.list_physical_devices("CPU")[:1]
    try:
        known = tf.config.get_logical_device_configuration(cpu) or []
        if len(known) < count:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * count
            )
    except RuntimeError as error:
        raise StrategyError(
            f"to split the CPU into {count} logical devices before TensorFlow starts",
            f"TensorFlow has started with {len(tf.config.list_logical_devices('CPU'))}",
            "call tfdist.strategy() before the first TensorFlow operation",
        ) from error
