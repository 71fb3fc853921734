"""Makes the gradient that is applied the one of the global batch.

The order of one device, with the sum over replicas in its place: accumulate over steps, sum over
replicas once an update, divide, check that all is finite, clip, weight decay, apply, average
(DESIGN.md section 4). Keras clips and checks what one replica has, which is a part of the sum: with
`clipnorm` two replicas may move twice as far as one device (tensorflow issue 33929), and an
overflow on any replica but the first goes unseen. And it puts what replicas do together inside a
condition of the graph, where TensorFlow cannot have them meet: accumulation and
`ema_overwrite_frequency` stop with "merge_call called while defining a new graph". Here replicas
meet first and the condition comes inside.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine import allreduce
from tfdist.engine import current_step
from tfdist.engine import slices
from tfdist.engine.replicas import is_synchronous
from tfdist.engine.servers import server_step
from tfdist.engine.servers import updates

_local = threading.local()  # Whether the gradients in this thread's hands are sums over replicas.


def apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `_backend_apply_gradients` in the right order."""

    @functools.wraps(original)
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        on_server = server_step.current()
        if on_server is not None:
            updates.apply(self, list(grads), list(trainable_variables), on_server)
            return
        if not _in_replica():
            original(self, grads, trainable_variables)
            return
        variables = list(trainable_variables)
        summed = getattr(_local, "summed", False)
        gradients = list(grads) if summed else _parts(grads, variables)
        if self.gradient_accumulation_steps:
            _accumulate_or_update(self, gradients, variables, summed)
        else:
            _update(self, gradients, variables, summed)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
            if self.ema_overwrite_frequency:
                _overwrite_with_average(self)

    return _backend_apply_gradients


def build_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `apply` that builds outside of a step what a step begins to use."""

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        if server_step.current() is not None and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                server_step.outside(lambda: self.build(trainable_variables))
        original(self, grads, trainable_variables)

    return apply


def update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `_backend_update_step` that runs where the variables are."""

    @functools.wraps(original)
    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, rate: Any) -> None:
        if server_step.current() is None:
            original(self, grads, trainable_variables, rate)
        else:
            updates.update_on_servers(self, list(grads), list(trainable_variables), rate)

    return _backend_update_step


def key_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `_var_key` that knows a variable whose value is a step's copy."""

    @functools.wraps(original)
    def _var_key(self: Any, variable: Any) -> Any:
        if server_step.current() is not None and isinstance(variable, keras.Variable):
            variable = variable._value
        return original(self, variable)

    return _var_key


def sum_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `_all_reduce_sum_gradients` that leaves alone what is summed."""

    @functools.wraps(original)
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        if getattr(_local, "summed", False):
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return _all_reduce_sum_gradients


def apply_scaled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `LossScaleOptimizer._tf_apply` in which all replicas skip the same steps."""

    @functools.wraps(original)
    def _tf_apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        if not _in_replica():
            original(self, grads, trainable_variables)
            return
        variables = trainable_variables or self._trainable_variables
        gradients = _parts(grads, variables)
        # With accumulation the gradients themselves travel once an update, their state every step.
        accumulates = bool(self.inner_optimizer.gradient_accumulation_steps)
        if not accumulates:
            gradients = allreduce.total(gradients, self.inner_optimizer, compress=True)
        finite = _all_finite(gradients)
        if accumulates:
            bad = tf.cast(tf.logical_not(finite), tf.float32)
            finite = tf.equal(allreduce.scalar_total(bad), 0.0)

        def use(*gradients: Any) -> None:
            with _summed(not accumulates), current_step.tracing(None):
                self._stateful_handle_finite_grads(list(gradients), trainable_variables)

        def meet(strategy: Any, finite: Any, *gradients: Any) -> None:
            _choose(
                strategy.experimental_local_results(finite)[0],
                _on_replicas(strategy, use, gradients),
                _on_replicas(strategy, self._stateful_handle_non_finite_grads, ()),
            )

        _meet(meet, finite, *gradients)

    return _tf_apply


def _update(optimizer: Any, gradients: list[Any], variables: list[Any], summed: bool) -> None:
    if not summed:
        gradients = allreduce.total(gradients, optimizer, compress=True)
    with _summed(True):
        gradients = optimizer._clip_gradients(gradients)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)


def _accumulate_or_update(
    optimizer: Any, gradients: list[Any], variables: list[Any], summed: bool
) -> None:
    steps = optimizer.gradient_accumulation_steps
    accumulators = [
        optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
        for variable in variables
    ]

    def update(*gradients: Any) -> None:
        total = [g + a.value for g, a in zip(gradients, accumulators, strict=True)]
        if not summed:
            # Keras accumulates in variables as large as the table; what travels is still rows.
            sent = [
                slices.rows_of(t) if isinstance(g, tf.IndexedSlices) else t
                for g, t in zip(gradients, total, strict=True)
            ]
            total = [
                slices.dense(t, variable.shape) if isinstance(t, tf.IndexedSlices) else t
                for t, variable in zip(
                    allreduce.total(sent, optimizer, compress=True), variables, strict=True
                )
            ]
        _update(optimizer, [g / steps for g in total], variables, summed=True)
        optimizer._backend_reset_gradient_accumulators()

    def accumulate(*gradients: Any) -> None:
        # Each replica has a sum of its own in its copy of the variable.
        for gradient, accumulator in zip(gradients, accumulators, strict=True):
            optimizer.assign_add(accumulator, gradient)

    def meet(strategy: Any, *gradients: Any) -> None:
        _choose(
            tf.equal((optimizer._iterations.value + 1) % steps, 0),
            _on_replicas(strategy, update, gradients),
            _on_replicas(strategy, accumulate, gradients),
        )

    _meet(meet, *gradients)


def _overwrite_with_average(optimizer: Any) -> None:
    every = optimizer.ema_overwrite_frequency

    def overwrite() -> None:
        for variable, average in zip(
            optimizer._trainable_variables,
            optimizer._model_variables_moving_average,
            strict=True,
        ):
            if average is not None:
                optimizer.assign(variable, average.value)

    def meet(strategy: Any) -> None:
        _choose(
            tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % every, 0),
            _on_replicas(strategy, overwrite, ()),
            lambda: tf.constant(True),
        )

    _meet(meet)


def _meet(function: Callable[..., Any], *values: Any) -> None:
    tf.distribute.get_replica_context().merge_call(function, args=values)


def _choose(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
    allreduce.in_order(lambda: tf.cond(condition, then, otherwise))


def _on_replicas(
    strategy: Any, function: Callable[..., Any], values: tuple[Any, ...]
) -> Callable[[], Any]:
    """Returns a branch of a condition that runs `function` on every replica."""

    def branch() -> Any:
        strategy.extended.call_for_each_replica(function, args=values)
        return tf.constant(True)

    return branch


class _summed:
    """While it is open, the gradients in this thread's hands are sums over replicas, or not."""

    def __init__(self, value: bool):
        self._value = value

    def __enter__(self) -> None:
        self._outer = getattr(_local, "summed", False)
        _local.summed = self._value

    def __exit__(self, *unused: object) -> None:
        _local.summed = self._outer


def _parts(gradients: Any, variables: Any) -> list[Any]:
    """Returns this replica's gradients as parts of the sum over replicas."""
    gradients = list(gradients)
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)  # Some layers' graphs do not know it.
    step = current_step.current()
    if step is None:
        return gradients
    are_parts = step.has_gradients_of_parts
    if not are_parts:
        current_step.warn_of_own_loss(step.model)
    return [_part(gradient, step, are_parts) for gradient in gradients]


def _part(gradient: Any, step: current_step.ReplicaStep, is_part: bool) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _part(gradient.values, step, is_part)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if not is_part:
        gradient = gradient * tf.cast(step.share, gradient.dtype)
    return step.unless_empty(gradient)


def _all_finite(gradients: list[Any]) -> Any:
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    checks = [tf.reduce_all(tf.math.is_finite(v)) for v in values if v is not None]
    return tf.reduce_all(tf.stack(checks))


def _in_replica() -> bool:
    strategy = tf.distribute.get_strategy()
    return (
        tf.distribute.get_replica_context() is not None
        and strategy.num_replicas_in_sync > 1
        and is_synchronous(strategy)
    )
