"""One device, one process: TensorFlow's default strategy."""

from __future__ import annotations

from typing import Any

from tfdist.cluster.topology import Cluster
from tfdist.strategies.registry import Options


def build(cluster: Cluster, options: Options) -> Any:
    """Returns the default strategy, under which Keras runs as it does without tfdist."""
    import tensorflow as tf

    return tf.distribute.get_strategy()
