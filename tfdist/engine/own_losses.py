"""What a loss that a `train_step` computes by itself is: a mean, a sum, or a part already.

A replica's gradient has to be its part of the gradient over the global batch. Losses of Keras are
made parts where they are reduced. One of the user's own is `tf.reduce_mean` over the replica's
examples (to be weighed by its share of them), or `tf.reduce_sum` over a constant (a part as it
stands), or a sum of such and of regularizers. Which can be read from the graph that computes it:
from the loss back, past sums and products of numbers, to what first reduces the examples.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

#: A term of a loss is a part of the global one, a sum over the replica's examples, a mean over
#: them, taken for a mean because it cannot be seen what it is, or has to do with no examples.
PART, SUM, MEAN, GUESS, NONE = "part", "sum", "mean", "guess", "none"

_SUMS = frozenset(("Add", "AddV2", "AddN"))
_JOINS = frozenset((*_SUMS, "Sub", "Neg", "Mul", "MulNoNan", "Maximum", "Minimum"))
_SAME = frozenset(("Identity", "Cast", "Reshape", "Squeeze", "StopGradient", "ExpandDims"))
_QUOTIENTS = frozenset(("RealDiv", "DivNoNan", "Div"))
_COUNTS = frozenset(("Shape", "Size", "Sum", "Mean"))


@dataclasses.dataclass(frozen=True)
class Term:
    """One term of a loss.

    Attributes:
        value: Its tensor.
        kind: What it is.
        weight: Tensor: the loss grows by so much when the term grows by one.
    """

    value: Any
    kind: str
    weight: Any


def terms_of(loss: Any, parts: set[str]) -> list[Term]:
    """Returns terms that make up `loss`, each of one kind.

    Args:
        loss: Scalar tensor of a graph.
        parts: Names of the tensors that are known to be parts.
    """
    reader = _Reader(parts)
    return reader.terms(loss, tf.ones([], loss.dtype))


class _Reader:
    def __init__(self, parts: set[str]):
        self._parts = parts
        self._data: dict[str, bool] = {}

    def terms(self, tensor: Any, weight: Any) -> list[Term]:
        kinds = self.kinds(tensor) or {NONE}
        op = tensor.op
        if len(kinds) == 1:
            return [Term(tensor, kinds.pop(), weight)]
        if op.type in _SUMS or (op.type == "Sub" and _are_numbers(op.inputs)):
            signs = [weight, -weight if op.type == "Sub" else weight]
            return [
                term
                for i, each in enumerate(op.inputs)
                for term in self.terms(each, signs[min(i, 1)])
            ]
        if op.type == "Neg":
            return self.terms(op.inputs[0], -weight)
        if op.type in _SAME and op.inputs[0].shape.rank == 0:
            return self.terms(op.inputs[0], tf.cast(weight, op.inputs[0].dtype))
        if op.type == "Sum" and op.inputs[0].op.type == "Pack":
            return [t for each in op.inputs[0].op.inputs for t in self.terms(each, weight)]
        if op.type in ("Mul", *_QUOTIENTS) and _are_numbers(op.inputs):
            first, second = op.inputs
            if not self._depends_on_data(second):
                scaled = weight * second if op.type == "Mul" else weight / second
                return self.terms(first, scaled)
            if op.type == "Mul" and not self._depends_on_data(first):
                return self.terms(second, weight * first)
        return [Term(tensor, GUESS, weight)]

    def kinds(self, tensor: Any) -> set[str]:
        """Returns the kinds of what is summed up in a number; nothing if no examples are."""
        op = tensor.op
        if tensor.name in self._parts:
            return {PART}
        if tensor.shape.rank != 0:
            return {GUESS} if self._depends_on_data(tensor) else set()
        if op.type in _SAME and op.inputs[0].shape.rank == 0:
            return self.kinds(op.inputs[0])
        if op.type in _JOINS:
            kinds = [self.kinds(each) for each in op.inputs]
            # A regularizer beside a sum over examples is a term of its own.
            if op.type in _SUMS and any(kinds):
                kinds = [kind or {NONE} for kind in kinds]
            return set().union(*kinds)
        if op.type in _QUOTIENTS:
            above, below = op.inputs
            found = self.kinds(above)
            return {MEAN} if found == {SUM} and self._counts(below) else found
        if op.type == "Sum" and op.inputs[0].op.type == "Pack":
            return set().union(*(self.kinds(each) for each in op.inputs[0].op.inputs))
        if not self._depends_on_data(tensor):
            return set()
        return {{"Sum": SUM, "Mean": MEAN}.get(op.type, GUESS)}

    def _counts(self, tensor: Any) -> bool:
        """Whether a divisor is the replica's own number of examples, or sum of weights."""
        if not self._depends_on_data(tensor):
            return False
        return any(each.op.type in _COUNTS for each in _ancestors(tensor))

    def _depends_on_data(self, tensor: Any) -> bool:
        if tensor.name not in self._data:
            self._data[tensor.name] = any(_is_data(each) for each in _ancestors(tensor))
        return self._data[tensor.name]


def _are_numbers(tensors: Any) -> bool:
    return all(tensor.shape.rank == 0 for tensor in tensors)


def _is_data(tensor: Any) -> bool:
    # Variables reach a graph as resources, everything else as a number.
    return tensor.op.type == "Placeholder" and tensor.dtype.name not in ("resource", "variant")


def _ancestors(tensor: Any) -> list[Any]:
    found: dict[str, Any] = {}
    waiting = [tensor]
    while waiting:
        each = waiting.pop()
        if each.name not in found:
            found[each.name] = each
            waiting += each.op.inputs
    return list(found.values())
