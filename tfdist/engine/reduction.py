"""Keras's `reduce_per_replica`, for what still calls it: putting predictions together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree

from tfdist.engine.replicas import is_several_workers
from tfdist.errors import UnsupportedError


def make(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `reduce_per_replica` that says what it cannot put together."""

    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction == "concat" and is_several_workers(strategy):
            tree.map_structure(lambda value: _refuse_text(strategy, value), values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _refuse_text(strategy: Any, value: Any) -> None:
    if strategy.experimental_local_results(value)[0].dtype == tf.string:
        raise UnsupportedError(
            "numbers as predictions: TensorFlow cannot gather text from several workers",
            "a model whose output is text",
            "predict the numbers and look the text up afterwards, or use predict_on_batch",
        )
