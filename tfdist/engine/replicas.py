"""Small questions about a strategy and the values of its replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def is_synchronous(strategy: Any) -> bool:
    """Whether `strategy` is one whose training the engine repairs."""
    return isinstance(
        strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    )


def is_asynchronous(strategy: Any) -> bool:
    """Whether `strategy` trains on parameter servers, whose workers do not wait for each other."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def is_several_workers(strategy: Any) -> bool:
    """Whether `strategy` spans processes."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and bool(
        strategy.extended._in_multi_worker_mode()
    )


def strategy_name(strategy: Any) -> str:
    """Returns the name that users know a strategy by."""
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return "MultiWorkerMirroredStrategy" if several else type(strategy).__name__


def is_on_cpu(strategy: Any) -> bool:
    """Whether all of this process's replicas are on CPU."""
    return all("CPU" in device.upper() for device in local_devices(strategy))


def local_devices(strategy: Any) -> tuple[str, ...]:
    """Returns the devices of this process's replicas; of the default strategy, the one it uses."""
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:
        gpus = tf.config.list_logical_devices("GPU")
        return (gpus[0].name if gpus else "/device:CPU:0",)


def is_composite(leaf: Any) -> bool:
    """Whether `leaf` is a ragged or sparse tensor."""
    return isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))


def wide_enough(dtype: Any) -> Any:
    """Returns the NumPy type that the collectives know and that holds `dtype` without loss."""
    if dtype == np.float64:
        return np.float64
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return np.int64
    return np.float32


def none_if_optional(leaf: Any) -> Any:
    """Returns None for an Optional: how a generator's missing weights come through tf.data."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def quiet(function: Any) -> Any:
    """Returns a `tf.function` that does not warn of retracing: every model has its own."""
    if hasattr(function, "_omit_frequent_tracing_warning"):
        function._omit_frequent_tracing_warning = True
    return function
