"""The values of metrics over all replicas of all workers, in the middle of an epoch.

A metric keeps sums, each replica its own. What a replica computes from its own is no part of the
whole: the mean of two AUCs is not the AUC, and of two counts half the count. So the sums are added
over replicas first, in one message however many metrics there are.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend


def metrics_over_all(model: Any, logs: dict[str, Any]) -> dict[str, Any]:
    """Returns those of `logs` that are metrics of `model`, over all replicas.

    Called in cross-replica context, in the graph of a step, by all workers.

    Args:
        model: A Keras model.
        logs: What its step returned.
    """
    variables = [v for metric in model.metrics for v in metric.variables]
    if not variables:
        return {}
    sums = _sums(model.distribute_strategy, variables)
    with keras_backend.StatelessScope(state_mapping=list(zip(variables, sums, strict=True))):
        results = model.get_metrics_result()
    totals = dict(zip(map(id, variables), sums, strict=True))
    unused = {
        metric.name: tf.equal(totals[id(metric.count)], 0)
        for metric in model.metrics
        if isinstance(getattr(metric, "count", None), keras.Variable)
    }

    def value(name: str) -> Any:
        # A loss tracker that the step does not use says 0, which is not what the step reports.
        if name not in unused or isinstance(results[name], dict):
            return results[name]
        result = tf.convert_to_tensor(results[name])
        return tf.where(unused[name], tf.cast(logs[name], result.dtype), result)

    return {name: value(name) for name in logs if name in results}


def _sums(strategy: Any, variables: list[Any]) -> list[Any]:
    """Returns each variable's sum over replicas; one message for each type of number."""
    sums: dict[int, Any] = {}
    for dtype in dict.fromkeys(tf.as_dtype(v.dtype) for v in variables):
        group = [v for v in variables if tf.as_dtype(v.dtype) == dtype]
        # The collectives know few types; these hold all others.
        wide = dtype if dtype in (tf.float32, tf.float64) else tf.int64
        if dtype.is_floating and wide == tf.int64:
            wide = tf.float32

        def local(group: list[Any] = group, wide: Any = wide) -> Any:
            return tf.concat([tf.reshape(tf.cast(v.value, wide), [-1]) for v in group], axis=0)

        flat = strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(local), axis=None)
        parts = tf.split(flat, [int(tf.TensorShape(v.shape).num_elements()) for v in group])
        for variable, part in zip(group, parts, strict=True):
            if variable.aggregation != "sum":
                part = (
                    part // strategy.num_replicas_in_sync
                    if wide == tf.int64
                    else (part / strategy.num_replicas_in_sync)
                )
            sums[id(variable)] = tf.cast(tf.reshape(part, variable.shape), dtype)
    return [sums[id(v)] for v in variables]
