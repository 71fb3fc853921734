"""Small questions about a strategy and the values of its replicas."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def is_synchronous(strategy: Any) -> bool:
    """Whether `strategy` is one whose training the engine repairs."""
    return isinstance(
        strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    )


def is_several_workers(strategy: Any) -> bool:
    """Whether `strategy` spans processes."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and bool(
        strategy.extended._in_multi_worker_mode()
    )


def strategy_name(strategy: Any) -> str:
    """Returns the name that users know a strategy by."""
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return "MultiWorkerMirroredStrategy" if several else type(strategy).__name__


def local_mean(strategy: Any, value: Any) -> Any:
    """Returns the mean over this process's replicas, of values that have a mean."""
    values = strategy.experimental_local_results(value)
    first = values[0]
    if len(values) == 1 or not tf.is_tensor(first) or not first.dtype.is_floating:
        return first
    return tf.reduce_mean(tf.stack(values), axis=0)


def none_if_optional(leaf: Any) -> Any:
    """Returns None for an Optional: how a generator's missing weights come through tf.data."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def quiet(function: Any) -> Any:
    """Returns a `tf.function` that does not warn of retracing: every model has its own."""
    if hasattr(function, "_omit_frequent_tracing_warning"):
        function._omit_frequent_tracing_warning = True
    return function
