"""Weighs each replica's gradient by its share of the global batch.

Keras takes the mean of a loss over a replica's examples, divides it by the number of replicas, and
sums the gradients. That is the mean over the global batch only if all replicas have as many
examples as each other: a last batch of 5 split into 4 and 1 counts the lone example four times
(tensorflow issue 45594). Gradients are linear in the loss, so it is enough to multiply a replica's
mean by its own number of examples over that of all replicas instead of by 1 over their number.
Regularizers and `add_loss` come out right by the same weights, which sum to one. A replica without
examples has weight zero.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

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
