"""Random numbers in a step: others on every replica, the same ones in every run from one seed.

A seeded layer (dropout, noise, augmentation) draws from a state that is the same on all replicas,
so all drop the same units of their parts of the batch; over a global batch that is not the noise of
one device. Here a replica's draws also depend on its number. The first replica draws what one
device would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.engine.replicas import is_synchronous

_STRIDE = 0x632BE5AB  # Odd, so that no two replicas meet; an arbitrary number of 31 bits.


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `SeedGenerator.next` that differs between replicas."""

    @functools.wraps(original)
    def next(self: Any, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        context = tf.distribute.get_replica_context()
        if context is None or not is_synchronous(context.strategy):
            return seed
        number = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        return tf.bitwise.bitwise_xor(seed, tf.stack([number * _STRIDE, tf.zeros_like(number)]))

    return next
