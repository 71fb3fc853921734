"""Keras's `reduce_per_replica`, for what still calls it: `predict` and the `*_on_batch` family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras import tree

from tfdist.engine import steps


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `reduce_per_replica` whose means are of this process's replicas.

    The original reduces over axis 0, which a scalar does not have, when there are several workers.
    """

    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction in ("auto", "mean") and steps.is_several_workers(strategy):
            return tree.map_structure(lambda value: steps.local_mean(strategy, value), values)
        return original(values, strategy, reduction)

    return reduce_per_replica
