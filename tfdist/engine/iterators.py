"""The state of a `tf.data` iterator as bytes: what its shuffles hold, and what was read ahead."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_FAIL = 2  # Of `tf.data.experimental.ExternalStatePolicy`.


def saved(iterator: Any) -> bytes | None:
    """Returns the state of an iterator, or None where TensorFlow cannot save it.

    It cannot where a step of the pipeline keeps its state elsewhere: Python functions, generators,
    random numbers that no `stateless` operation makes.
    """
    try:
        state = tf.raw_ops.SerializeIterator(
            resource_handle=iterator._iterator_resource, external_state_policy=_FAIL
        )
    except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError):
        return None
    return bytes(tf.io.serialize_tensor(state).numpy())


def restore(iterator: Any, state: bytes) -> None:
    """Puts a new iterator over the same pipeline where the one of `state` was."""
    tf.raw_ops.DeserializeIterator(
        resource_handle=iterator._iterator_resource,
        serialized=tf.io.parse_tensor(state, tf.variant),
    )
