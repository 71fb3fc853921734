"""`float(variable)` and `int(variable)` for variables that have a value on every replica."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def make(kind: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what makes the repair of `__float__` or `__int__` of Keras's variables."""

    def repair(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def convert(self: Any) -> Any:
            if isinstance(self.value, tf.distribute.DistributedValues) and self.ndim == 0:
                return kind(self.value.numpy())
            return original(self)

        return convert

    return repair
