"""The shapes of batches in the order in which a step has met them.

A step of one device is traced for the first shape as it is, and with an open size from the second
on. The graphs are not the same to the last bit, so a process that goes on must trace its step for
the same shapes in the same order: the batch it begins with may be the last, smaller one.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from keras import tree

from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.replicas import is_synchronous

log = logging.getLogger("absl")

#: So many are told apart; later ones have graphs already.
_MOST = 8


class Kinds:
    """The shapes of the batches of one training.

    Attributes:
        shapes: For each kind the shape of every component; None for one that is no tensor.
    """

    def __init__(self) -> None:
        self.shapes: list[list[Any]] = []

    def note(self, batch: Any) -> None:
        """Notes the shapes of a batch."""
        if len(self.shapes) >= _MOST:
            return
        shapes = [
            list(leaf.shape) if isinstance(leaf, tf.Tensor) else None
            for leaf in tree.flatten(batch)
        ]
        if shapes not in self.shapes:
            self.shapes.append(shapes)

    def repeat(self, shapes: list[list[Any]], spec: Any, model: Any) -> None:
        """Lets a step of `model` meet zeros of the same shapes; what it changes is to be restored.

        Args:
            shapes: Those of an earlier process.
            spec: Structure of `tf.TypeSpec` of a batch.
            model: The model; nothing is done where its steps are not Keras's own.
        """
        self.shapes = [list(each) for each in shapes]
        strategy = model.distribute_strategy
        if model.run_eagerly or is_synchronous(strategy) or is_asynchronous(strategy):
            return
        leaves = tree.flatten(spec)
        for kind in self.shapes:
            is_known = [isinstance(leaf, tf.TensorSpec) or leaf is None for leaf in leaves]
            if len(kind) != len(leaves) or not all(is_known):
                return
            zeros = [
                None if shape is None else tf.zeros(shape, leaf.dtype)
                for shape, leaf in zip(kind, leaves, strict=True)
            ]
            try:
                model.train_function(iter([tree.pack_sequence_as(spec, zeros)]))
            except tf.errors.OpError as error:
                log.info("a step on zeros failed, numbers may differ in the last bit: %s", error)
                return
