"""`jit_compile=True`: the model's call, forward and backward, is compiled by XLA; the rest is not.

Keras hands the whole step to XLA, which can hold neither messages between replicas on CPU nor
variables of another replica's device. What takes the time is the call of the model and its
gradient. So that is compiled as a function of tensors alone: the values of variables go in, their
new values come out. Losses, sums over replicas, updates and metrics stay around it, in a
`train_step` of the user's own, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from keras.src import backend as keras_backend

log = logging.getLogger("absl")


class Compiled:
    """The compiled call of one model.

    Args:
        model: A built Keras model.
    """

    def __init__(self, model: Any):
        self._model = model
        self._call = model.call
        self._functions: dict[Any, Any] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the compiled call in the place of the model's own, while a step is traced."""
        object.__setattr__(self._model, "call", self._compiled_call())
        try:
            yield
        finally:
            object.__delattr__(self._model, "call")

    def _compiled_call(self) -> Callable[..., Any]:
        @functools.wraps(self._call)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        return call

    def _run(self, args: Any, kwargs: Any) -> Any:
        variables = self._model.variables
        states = [v for v in variables if not v.trainable]
        inputs = {"args": args, "kwargs": kwargs}
        tensors = [leaf for leaf in tree.flatten(inputs) if tf.is_tensor(leaf)]
        # What is no tensor is fixed in what is compiled, with the place of what is.
        fixed = tree.map_structure(lambda leaf: _HOLE if tf.is_tensor(leaf) else leaf, inputs)

        def pure(values: list[Any], tensors: list[Any]) -> Any:
            given = iter(tensors)
            arguments = tree.map_structure(
                lambda leaf: next(given) if leaf is _HOLE else leaf, fixed
            )
            mapping = list(zip(variables, values, strict=True))
            with keras_backend.StatelessScope(mapping, collect_losses=True) as scope:
                outputs = self._call(*arguments["args"], **arguments["kwargs"])
            masks = [keras_backend.get_keras_mask(each) for each in tree.flatten(outputs)]
            return outputs, masks, [scope.get_current_value(v) for v in states], scope.losses

        replica = int(tf.get_static_value(_replica_id()))
        key = (replica, repr(tree.map_structure(_description, fixed)))
        if key not in self._functions:
            self._functions[key] = tf.function(pure, jit_compile=True, reduce_retracing=True)
        values = [tf.convert_to_tensor(v.value) for v in variables]
        outputs, masks, states_after, losses = self._functions[key](values, tensors)
        for output, mask in zip(tree.flatten(outputs), masks, strict=True):
            if mask is not None:
                keras_backend.set_keras_mask(output, mask)
        for variable, value in zip(states, states_after, strict=True):
            variable.assign(value)
        for loss in losses:
            self._model.add_loss(loss)
        return outputs


_HOLE = "where a tensor goes"


def _description(leaf: Any) -> Any:
    # NumPy shortens what it prints of large arrays.
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf


def _replica_id() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def compiled(model: Any) -> Compiled | None:
    """Returns the compiled call of `model`, or None if it is not to be compiled or cannot be."""
    if not model.jit_compile or model.run_eagerly:
        return None
    talking = [
        layer.name for layer in model._flatten_layers() if getattr(layer, "synchronized", False)
    ]
    if talking:
        log.warning(
            "%s is not compiled by XLA: layer %s takes the statistics of all replicas, which XLA "
            "cannot hold. The numbers are the same",
            model.name,
            talking[0],
        )
        return None
    return Compiled(model)
