"""A replica's loss as its part of the loss over the global batch.

Keras takes the mean of a loss over a replica's examples and divides it by the number of replicas.
The sum over replicas is the mean over the global batch only if all replicas have the same number
of examples, none of them is masked, and weights that the loss is divided by add up to the same.
Here a replica's mean is multiplied by what it stands for: its own divisor over that of all
replicas. The divisor is the number of examples, which is known before the step; the number of
unmasked values, or the sum of weights, which replicas ask each other for in the step.

So all parts of one loss add up to the loss of one device, whatever `reduction` it has.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.losses import loss as keras_losses

from tfdist.engine import allreduce
from tfdist.engine import current_step
from tfdist.engine import made_up
from tfdist.engine import own_losses
from tfdist.engine.servers import server_step

log = logging.getLogger("absl")

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_called = threading.local()  # The loss object whose values are being reduced.


def scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's `scale_loss_for_distribution` with the share in place of 1/replicas."""

    @functools.wraps(original)
    def scale_loss_for_distribution(value: Any) -> Any:
        step = current_step.current()
        if step is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        return step.mark(value * tf.cast(step.share, value.dtype))

    return scale_loss_for_distribution


def unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's `unscale_loss_for_distribution`: what a replica tells the loss trackers.

    They weigh it by the replica's examples, so parts over shares add up to the sum of all parts.
    """

    @functools.wraps(original)
    def unscale_loss_for_distribution(value: Any) -> Any:
        step = current_step.current()
        if step is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        if not step.has_parts:
            return step.mean(value)  # `compute_loss` of the user's own, which takes its own mean.
        if value.shape.rank == 0:
            return step.whole(value)
        # Not reduced: one value for each example, of which the trackers take the mean.
        return tf.math.divide_no_nan(tf.reduce_sum(value), tf.cast(tf.size(value), value.dtype))

    return unscale_loss_for_distribution


def called(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `Loss.__call__` that lets `reduce` know which loss it works for."""

    @functools.wraps(original)
    def __call__(self: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        outer = getattr(_called, "by", None)
        _called.by = (self, y_true, y_pred)
        try:
            return original(self, y_true, y_pred, *args, **kwargs)
        finally:
            _called.by = outer

    return __call__


def reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `reduce_weighted_values` that makes a part of the global loss, by its divisor."""

    @functools.wraps(original)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        step = current_step.current()
        if step is None:
            return original(values, sample_weight, mask, reduction, dtype)
        reduction = keras_losses.standardize_reduction(reduction)
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        if values.shape.rank == 0:
            with current_step.tracing(step.alone()):
                value = original(values, sample_weight, mask, reduction, dtype)
            return step.mark(_part_of_scalar(value, step))
        divisor = _divisor(values, sample_weight, mask, reduction)
        if divisor is None:
            part = original(values, sample_weight, mask, reduction, dtype)
            if reduction in _MEANS and part.shape.rank:
                part = tf.reduce_sum(part)  # Eagerly and without examples, Keras reduces nothing.
            return step.mark(part)
        with current_step.tracing(step.alone()):
            mean = original(values, sample_weight, mask, reduction, dtype)
        fraction = _fraction(divisor, step, values.dtype)
        return step.mark(tf.reduce_sum(mean) * fraction)

    return reduce_weighted_values


def averaged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `tf.nn.compute_average_loss` or the like: what it returns is a part already."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        step = current_step.current()
        return value if step is None else step.mark(value)

    return function


def differentiated(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `GradientTape.gradient` of this replica's part of a loss."""

    @functools.wraps(original)
    def gradient(
        self: Any, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> Any:
        on_server = server_step.current()
        if on_server is not None:
            sources = tree.map_structure(on_server.values.source, sources)
        step = current_step.current()
        terms = None if step is None or output_gradients is not None else step.terms(target)
        if step is None or terms is None:
            if step is not None:
                step.has_gradients_of_parts = step.has_parts
            return original(self, target, sources, output_gradients, **kwargs)
        step.has_gradients_of_parts = True
        if any(term.kind == own_losses.GUESS for term in terms):
            current_step.warn_of_own_loss(step.model)
        weights = [step.weight_of(term) for term in terms]
        if {term.kind for term in terms} != {own_losses.PART}:
            values = [step.unless_empty(term.value) for term in terms]
            step.mark(target, tf.add_n([v * w for v, w in zip(values, weights, strict=True)]))
        return original(self, [term.value for term in terms], sources, weights, **kwargs)

    return gradient


def watched(original: Any) -> Any:
    """Returns the property `num_replicas_in_sync`: who asks in a step divides a loss by it."""

    def num_replicas_in_sync(self: Any) -> Any:
        step = current_step.current()
        if step is not None:
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if asking.partition(".")[0] not in ("tensorflow", "keras", "tfdist"):
                step.is_divided = True
        return original.fget(self)

    return _Property(num_replicas_in_sync, doc=original.__doc__)


class _Property(property):
    """A property that the engine can put a mark on."""


def tracked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `Mean.update_state` that counts one number a replica by the replica's share.

    A step that tells a tracker the mean over a batch tells it once on one device; here the means
    of all replicas together count once, each by its examples, and a part of a loss as a part.
    """

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current_step.current()
        if step is None or sample_weight is not None:
            return original(self, values, sample_weight)
        if not isinstance(values, tf.Tensor) or values.shape.rank != 0:
            return original(self, values)
        return original(self, step.mean(values), sample_weight=step.share)

    return update_state


def _divisor(values: Any, sample_weight: Any, mask: Any, reduction: Any) -> Any:
    """Returns what Keras divides the sum over this replica by, if it is not its examples."""
    if reduction not in _MEANS:
        return None
    if reduction == "mean_with_sample_weight":
        if sample_weight is None and mask is None:
            return None
        weight = keras_losses.apply_mask(
            None if sample_weight is None else keras.ops.cast(sample_weight, values.dtype),
            mask,
            dtype=values.dtype,
            reduction=reduction,
        )
        return tf.reduce_sum(tf.cast(weight, tf.float32))
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


def _fraction(divisor: Any, step: current_step.ReplicaStep, dtype: Any) -> Any:
    divisor = tf.stop_gradient(divisor)
    if not step.can_communicate():
        log.warning(
            "a masked or weighted mean inside a tf.function, a condition or a loop of %s cannot "
            "ask the other replicas for their weights; it is weighed by examples",
            step.model,
        )
        return tf.cast(step.share, dtype)
    total = allreduce.scalar_total(divisor)
    return tf.cast(tf.math.divide_no_nan(divisor, total), dtype)


# A loss that reduces itself to a number: a mean or a sum?

_kinds: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _part_of_scalar(value: Any, step: current_step.ReplicaStep) -> Any:
    loss, y_true, y_pred = getattr(_called, "by", None) or (None, None, None)
    kind = "mean" if loss is None else _kinds.get(loss)
    if kind is None:
        kind = _kinds[loss] = _kind_of(loss, y_true, y_pred)
        if kind == "unknown":
            log.warning(
                "loss %s of %s returns one number that is neither the mean nor the sum over "
                "examples of anything: replicas use the mean of theirs, which is not the loss of "
                "one device. Return one value for each example instead",
                getattr(loss, "name", loss),
                step.model,
            )
    return value if kind == "sum" else value * tf.cast(step.share, value.dtype)


def _kind_of(loss: Any, y_true: Any, y_pred: Any) -> str:
    """Tries a loss function on a batch and on the same batch twice over."""
    try:
        with tf.init_scope():
            true, predicted = made_up.batch_like(y_true, 1), made_up.batch_like(y_pred, 2)
            once = float(loss.call(true, predicted))
            twice = float(loss.call(made_up.twice(true), made_up.twice(predicted)))
    except Exception as error:  # Of the user's function, on made-up data: anything.
        log.debug("could not try %s: %s", loss, error)
        return "mean"
    if abs(twice - once) <= 1e-4 * abs(once):
        return "mean"
    return "sum" if abs(twice - 2 * once) <= 1e-4 * abs(once) else "unknown"
