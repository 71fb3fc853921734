"""Metrics over all replicas of all workers.

A metric keeps sums, each replica its own. What a replica computes from its own is no part of the
whole: the mean of two AUCs is not the AUC, and of two counts half the count. So the sums are added
over replicas first, in one message however many metrics there are.

A metric of the user's own may keep something else, a maximum or the last value, which replicas
cannot add up. It is tried out on made-up batches; if its states do not add up, every replica
updates it with the whole global batch.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src import backend as keras_backend

from tfdist.engine import allreduce
from tfdist.engine import current_step
from tfdist.engine import made_up
from tfdist.engine.replicas import wide_enough
from tfdist.engine.servers import server_step

log = logging.getLogger("absl")


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


def was_updated(metric: Any) -> bool:
    """Whether an epoch's step has told `metric` anything, as far as can be seen.

    A loss tracker that the step does not use says 0, which is not what the step reports.
    """
    count = getattr(metric, "count", None)
    return not isinstance(count, keras.Variable) or float(count.value.numpy()) > 0


def adopt(model: Any) -> None:
    """Lets metrics of the user's own be updated right under several replicas."""
    for metric in _all_metrics(model):
        own = not type(metric).__module__.startswith("keras.")
        if own and "update_state" not in vars(metric):
            update = functools.partial(_update, metric, metric.update_state)
            object.__setattr__(metric, "update_state", update)


def _all_metrics(model: Any) -> list[Any]:
    compiled = getattr(model, "_compile_metrics", None)
    inner = list(getattr(compiled, "metrics", None) or [])
    return [*model.metrics, *inner]


_adds_up: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _update(metric: Any, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    step = current_step.current()
    if step is None:
        return _update_on_server(metric, update, args, kwargs)
    if metric not in _adds_up:
        _adds_up[metric] = _states_add_up(metric, update, args, kwargs)
        if not _adds_up[metric]:
            log.info("metric %s is no sum: replicas update it with whole batches", metric.name)
            for variable in metric.variables:
                _same_on_all(variable)
    if _adds_up[metric] or not step.can_communicate():
        return update(*args, **kwargs)
    context = tf.distribute.get_replica_context()

    def whole(value: Any) -> Any:
        return context.all_gather(value, axis=0) if made_up.is_batch(value) else value

    args, kwargs = tree.map_structure(whole, (args, kwargs))
    return update(*args, **kwargs)


def _update_on_server(metric: Any, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    step = server_step.current()
    if step is None:
        return update(*args, **kwargs)
    if metric not in _adds_up:
        _adds_up[metric] = _states_add_up(metric, update, args, kwargs)
        if not _adds_up[metric]:
            log.info("metric %s is no sum: the coordinator updates it", metric.name)
    if _adds_up[metric]:
        return update(*args, **kwargs)
    step.observed.append((metric, (args, kwargs)))
    return None


def _states_add_up(metric: Any, update: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Tries whether the state after two batches is that after one plus that after the other."""
    variables = metric.variables

    def after(states: list[Any], seed: int) -> list[Any]:
        tried = made_up.batch_like((args, kwargs), seed)
        mapping = list(zip(variables, states, strict=True))
        with keras_backend.StatelessScope(state_mapping=mapping) as scope:
            update(*tried[0], **tried[1])
        return [tf.convert_to_tensor(scope.get_current_value(v)) for v in variables]

    try:
        with tf.init_scope(), current_step.tracing(None):
            start = [tf.zeros(v.shape, v.dtype) for v in variables]
            one, other, both = after(start, 1), after(start, 2), after(after(start, 1), 2)
            return all(
                np.allclose(a.numpy() + b.numpy(), c.numpy(), rtol=1e-4, atol=1e-5)
                for a, b, c in zip(one, other, both, strict=True)
            )
    except Exception as error:  # Of the user's metric, on made-up data: anything.
        log.debug("could not try metric %s: %s", metric.name, error)
        return True


def _same_on_all(variable: Any) -> None:
    # Every replica has the whole; what is read is one of them, not their sum.
    variable._aggregation = "only_first_replica"
    value = variable._value
    for each in [value, *getattr(value, "_values", ())]:
        if hasattr(each, "_aggregation"):
            each._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def _sums(strategy: Any, variables: list[Any]) -> list[Any]:
    """Returns each variable's sum over replicas; one message for each type of number."""
    sums: dict[int, Any] = {}
    for dtype in dict.fromkeys(tf.as_dtype(v.dtype) for v in variables):
        group = [v for v in variables if tf.as_dtype(v.dtype) == dtype]
        wide = tf.as_dtype(wide_enough(dtype.as_numpy_dtype))

        def local(group: list[Any] = group, wide: Any = wide) -> Any:
            flat = [tf.reshape(tf.cast(v.value, wide), [-1]) for v in group]
            return allreduce.total([tf.concat(flat, axis=0)])[0]

        flat = strategy.experimental_local_results(strategy.run(local))[0]
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
