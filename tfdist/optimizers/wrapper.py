"""`RowSparse`: any Keras optimizer, made to update only the rows that have a gradient."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist.errors import ConfigError
from tfdist.optimizers import row_sparse

_register = keras.saving.register_keras_serializable(package="tfdist", name="RowSparse")


@_register
class RowSparse(Optimizer):
    """Makes an optimizer update only the rows of a table that have a gradient.

    The result is an optimizer of the same class, with the same attributes, variables and files,
    that also is a `RowSparse`: a second view of the one it was given, which itself stays as it is.
    Variables whose gradient is dense are updated as before. For those with a gradient by rows
    (`tf.IndexedSlices`, from embeddings), moments, accumulators and weight decay of a row change
    only in the steps in which it has a gradient (`tfdist.optimizers.row_sparse` says more), and
    the cost of a step does not grow with the number of rows.

    Three things still need the whole table: an `embeddings_constraint` or `embeddings_regularizer`
    and averages (`use_ema`). They are right, and slow.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, its name, or its config.

    Raises:
        ConfigError: The optimizer accumulates gradients or holds optimizers of its own.

    Example:
    ```python
    model.compile(optimizer=tfdist.optimizers.RowSparse(keras.optimizers.Adam(1e-3)), loss="mse")
    ```
    """

    def __new__(cls, optimizer: Any = None, **unused: Any) -> Any:
        if optimizer is None:  # A copy is being made of one.
            return object.__new__(cls)
        optimizer = keras.optimizers.get(optimizer)
        if isinstance(optimizer, RowSparse):
            return optimizer
        _check(optimizer)
        inner: Any = type(optimizer)
        wrapped = object.__new__(_class_of(inner))
        object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
        return wrapped

    def __init__(self, optimizer: Any):
        pass  # All state is the given optimizer's.

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable: by rows if its gradient is a `tf.IndexedSlices`."""
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        # Constraints are applied by `apply`, to all variables.
        row_sparse.apply_rows(_inner(self), variable, gradient, learning_rate, constrain=False)

    def get_config(self) -> dict[str, Any]:
        """Returns the config: that of the optimizer it was made from."""
        return {"optimizer": keras.saving.serialize_keras_object(_inner(self))}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Makes a row-sparse optimizer from its config."""
        optimizer = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        return RowSparse(optimizer)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # `_apply_weight_decay` gets no gradients to tell which variables decay with their rows.
        sparse = {
            self._var_key(variable)
            for gradient, variable in zip(grads, trainable_variables, strict=True)
            if isinstance(gradient, tf.IndexedSlices)
        }
        object.__setattr__(self, "_by_rows", sparse)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        # Keras clips each mention of a row by itself, and turns some gradients into dense ones.
        grads = [row_sparse.deduplicated(g) if _is_sparse(g) else g for g in grads]
        clipped = super()._clip_gradients([g.values if _is_sparse(g) else g for g in grads])
        return [
            tf.IndexedSlices(values, g.indices, g.dense_shape) if _is_sparse(g) else values
            for g, values in zip(grads, clipped, strict=True)
        ]

    def _apply_weight_decay(self, variables: Any) -> None:
        by_rows = getattr(self, "_by_rows", ())
        dense = [v for v in variables if self._var_key(v) not in by_rows]
        if dense:
            super()._apply_weight_decay(dense)


def _inner(optimizer: RowSparse) -> Any:
    """Returns the view without the rows of a row-sparse optimizer."""
    inner: Any = object.__new__(type(optimizer).__bases__[1])
    object.__setattr__(inner, "__dict__", optimizer.__dict__)
    return inner


@functools.cache
def _class_of(inner: Any) -> Any:
    # Under one registered name: to load it, the class of the inner optimizer is in the config.
    names = {"__doc__": RowSparse.__doc__, "__module__": RowSparse.__module__}
    return _register(type("RowSparse", (RowSparse, inner), names))


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _check(optimizer: Any) -> None:
    if hasattr(optimizer, "inner_optimizer"):
        raise ConfigError(
            "an optimizer that updates variables itself",
            type(optimizer).__name__,
            f"write {type(optimizer).__name__}(RowSparse(...)) instead",
        )
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            "an optimizer without gradient accumulation, whose sums are as large as the table",
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}",
            "use a larger batch",
        )
