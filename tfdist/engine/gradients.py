"""Makes the gradient that is applied the one of the global batch: weighed, summed, then clipped.

Keras takes the mean of a loss over a replica's examples, divides it by the number of replicas, and
sums the gradients. That is the mean over the global batch only if all replicas have as many
examples as each other: a last batch of 5 split into 4 and 1 counts the lone example four times
(tensorflow issue 45594). Gradients are linear in the loss, so it is enough to multiply a replica's
mean by its own number of examples over that of all replicas instead of by 1 over their number.
Regularizers and `add_loss` come out right by the same weights, which sum to one. A replica without
examples has weight zero.

Keras clips a replica's gradient, which is a part of the sum, before it is summed: with `clipnorm`
two replicas may move twice as far as one device (tensorflow issue 33929). Here the sum comes first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.engine.replicas import is_synchronous

_replica = threading.local()  # TensorFlow runs each replica's function in a thread of its own.


@contextlib.contextmanager
def share_of_replica(share: Any) -> Iterator[None]:
    """While a replica's step is traced: its examples over those of the global batch.

    Args:
        share: Scalar tensor, or None to divide by the number of replicas as Keras does.
    """
    outer = getattr(_replica, "share", None)
    _replica.share = share
    try:
        yield
    finally:
        _replica.share = outer


def scale(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's `scale_loss_for_distribution` with the share in place of 1/replicas."""

    @functools.wraps(original)
    def scale_loss_for_distribution(value: Any) -> Any:
        share = getattr(_replica, "share", None)
        if share is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        return value * tf.cast(share, value.dtype)

    return scale_loss_for_distribution


def unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's `unscale_loss_for_distribution`, the inverse; 0 without examples."""

    @functools.wraps(original)
    def unscale_loss_for_distribution(value: Any) -> Any:
        share = getattr(_replica, "share", None)
        if share is None:
            return original(value)
        value = tf.convert_to_tensor(value)
        return tf.math.divide_no_nan(value, tf.cast(share, value.dtype))

    return unscale_loss_for_distribution


def reduce_then_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `_backend_apply_gradients` that sums over replicas before it clips."""

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any) -> Any:
        clips = self.clipnorm or self.global_clipnorm or self.clipvalue
        if not clips or self.gradient_accumulation_steps or not _in_replica():
            return original(self, grads, trainable_variables)
        variables = list(trainable_variables)
        pairs = self._all_reduce_sum_gradients(list(zip(grads, variables, strict=True)))
        _replica.summed = True
        try:
            return original(self, [gradient for gradient, _ in pairs], variables)
        finally:
            _replica.summed = False

    return apply


def sum_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's `_all_reduce_sum_gradients` that leaves alone what is summed."""

    @functools.wraps(original)
    def all_reduce(self: Any, grads_and_vars: Any) -> Any:
        if getattr(_replica, "summed", False):
            return list(grads_and_vars)
        share = getattr(_replica, "share", None)
        if share is not None:
            grads_and_vars = [(_zero_if_empty(g, share), v) for g, v in grads_and_vars]
        return original(self, grads_and_vars)

    return all_reduce


def _zero_if_empty(gradient: Any, share: Any) -> Any:
    # Without examples a layer that takes a mean of its own has NaN, and 0 times NaN is NaN.
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _zero_if_empty(gradient.values, share)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.where(share > 0, gradient, tf.zeros_like(gradient))


def _in_replica() -> bool:
    strategy = tf.distribute.get_strategy()
    return (
        tf.distribute.get_replica_context() is not None
        and strategy.num_replicas_in_sync > 1
        and is_synchronous(strategy)
    )
