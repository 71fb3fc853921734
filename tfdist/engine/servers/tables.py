"""Tables: variables of which a step needs a few rows, and which never travel whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine.servers import server_step
from tfdist.layers.shards import look_up

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
        table = getattr(self, "_embeddings", None)
        known = server_step.current() is not None and is_table(table)
        if not known or not isinstance(inputs, tf.Tensor):
            return original(self, inputs)
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        rows = look_up([table], self.name, tf.reshape(ids, [-1]))
        shape = tf.concat([tf.shape(ids), tf.shape(rows)[1:]], axis=0)
        rows = tf.reshape(tf.cast(rows, self.compute_dtype), shape)
        rows.set_shape([*ids.shape, self.output_dim] if ids.shape.rank is not None else None)
        return rows

    return call


def _looks_up(layer: Any) -> bool:
    return not (getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None))
