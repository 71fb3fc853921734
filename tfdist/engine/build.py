"""Builds a model, its metrics and its optimizer from the shape of the data, reading none of it.

Stock Keras takes the first batch of the data for this. A generator loses that batch and those that
were prefetched behind it (32 of 64 examples in one measurement), string features fail in the mean
that is taken over the batch, and under MultiWorkerMirroredStrategy the mean itself fails
(keras issue 20585).
"""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src import backend as keras_backend

from tfdist.engine.replicas import is_composite

log = logging.getLogger("absl")


def build(model: Any, spec: Any, sample: Any = None, *, to_train: bool = True) -> None:
    """Creates the variables of `model` and, to train it, of its metrics and optimizer.

    Args:
        model: A Keras model created under a strategy.
        spec: Structure of `tf.TypeSpec` of one batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
        sample: Callable that returns one real batch, used only where the spec does not tell the
            rank of the data and reading does not lose anything; or None.
        to_train: Whether compiled metrics and the optimizer are needed; not so to predict.
    """
    if _is_built(model, to_train):
        return
    if sample is not None and not _has_ranks(spec):
        spec = tree.map_structure(tf.type_spec_from_value, sample())
    batch = tree.map_structure(_symbolic, spec)
    with model.distribute_strategy.scope():
        try:
            if to_train:
                model._symbolic_build(data_batch=batch)
            else:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                keras_backend.compute_output_spec(model, x, training=False)
        except RuntimeError as error:
            # A model that is trained through a train_step of its own may have no call() at all
            # (a GAN, say), and Keras's stand-ins for data are dense. What is missing builds itself
            # in the first step.
            built = all(layer.built for layer in model._flatten_layers())
            if type(model).train_step is keras.Model.train_step and not built:
                raise
            log.info("%s builds itself in its first step: %s", model.name, _last_line(error))


def spec_of(batch: Any) -> Any:
    """Returns the structure of `tf.TypeSpec` of a batch of arrays or tensors."""

    def one(leaf: Any) -> Any:
        if leaf is None:
            return None
        return tf.type_spec_from_value(leaf if is_composite(leaf) else tf.convert_to_tensor(leaf))

    return tree.map_structure(one, batch, none_is_leaf=True)


def _is_built(model: Any, to_train: bool) -> bool:
    parts = list(model._flatten_layers())
    if to_train:
        parts += [model._compile_metrics, model._compile_loss, model.optimizer]
    return all(part is None or part.built for part in parts)


def _has_ranks(spec: Any) -> bool:
    return all(
        getattr(leaf, "shape", None) is not None and leaf.shape.rank is not None
        for leaf in tree.flatten(spec)
        if leaf is not None
    )


def _symbolic(spec: Any) -> Any:
    """Returns a `KerasTensor` with an open batch dimension."""
    if spec is None or not hasattr(spec, "dtype") or not hasattr(spec, "shape"):
        return None  # An absent sample weight.
    shape = (None, *spec.shape[1:]) if spec.shape.rank else spec.shape
    return keras.KerasTensor(
        shape,
        keras.backend.standardize_dtype(spec.dtype),
        sparse=isinstance(spec, tf.SparseTensorSpec),
        ragged=isinstance(spec, tf.RaggedTensorSpec),
        **({"ragged_rank": spec.ragged_rank} if isinstance(spec, tf.RaggedTensorSpec) else {}),
    )


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:200]
