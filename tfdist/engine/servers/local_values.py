"""A step's own copy of the variables, in which Keras's code reads and writes as usual."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python import pywrap_tfe


class LocalValues(keras.StatelessScope):
    """While it is open, the given variables have the given values, and assignments stay here.

    Gradients can be taken of trainable variables as usual: what is read is watched by every open
    tape, as TensorFlow does for a variable of its own. `source` names the tensor to ask a tape for.

    Args:
        values: Pairs of a Keras variable and its value.

    Attributes:
        assigned: Variables that were assigned to, and whose value is the new one.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, Any] = {}
        self._watched: dict[int, _Watched] = {}
        for variable, value in values:
            self.state_mapping[id(variable)] = value
            if variable.trainable:
                self._watched[id(variable)] = _Watched(value)

    def get_current_value(self, variable: Any) -> Any:
        watched = self._watched.get(id(variable))
        if watched is not None:
            pywrap_tfe.TFE_Py_TapeVariableAccessed(watched)
        value = super().get_current_value(variable)
        if value is None and variable.regularizer is not None:
            return variable._value  # A table: Keras's penalty asks here, and takes no None.
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        self.assigned[id(variable)] = variable
        watched = self._watched.get(id(variable))
        if watched is not None:
            # As with a variable: what is read from now on has a gradient, its new value has none.
            read = watched.handle
            value = tf.stop_gradient(value) + (read - tf.stop_gradient(read))
        super().add_update((variable, value))

    def source(self, variable: Any) -> Any:
        """Returns the tensor that was read for a trainable variable, or the variable itself."""
        watched = self._watched.get(id(variable))
        return variable if watched is None else watched.handle


class _Watched:
    """What a tape wants to know of a variable that it watches."""

    trainable = True

    def __init__(self, handle: Any):
        self.handle = handle
