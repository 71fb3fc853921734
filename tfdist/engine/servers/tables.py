"""Tables: variables of which a step needs a few rows, and which never travel whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine.servers import server_step

_MARK = "_tfdist_table"


def is_table(variable: Any) -> bool:
    """Whether only rows of `variable` travel."""
    return bool(getattr(variable, _MARK, False))


def mark(model: Any) -> None:
    """Marks the tables of Keras's own Embedding layers in `model`."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding) and _looks_up(layer):
            table = getattr(layer, "_embeddings", None)
            if table is not None:
                setattr(table, _MARK, True)


def embedding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's `Embedding.call` that fetches the rows of the batch, each once."""

    @functools.wraps(original)
    def call(self: Any, inputs: Any) -> Any:
        if server_step.current() is None or not is_table(getattr(self, "_embeddings", None)):
            return original(self, inputs)
        ids = tf.cast(inputs, tf.int64)
        unique, positions = tf.unique(tf.reshape(ids, [-1]), tf.int64)
        table = self._embeddings._value
        with tf.device(table.device):
            rows = tf.gather(table, tf.identity(unique))
        rows = tf.cast(tf.identity(rows), self.compute_dtype)
        flat = tf.gather(rows, positions)
        return tf.reshape(flat, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], axis=0))

    return call


def _looks_up(layer: Any) -> bool:
    return not (getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None))
