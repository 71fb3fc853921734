"""What the code of a step may know about the replica it is traced for.

TensorFlow runs each replica's function in a thread of its own, one after the other, so what is
known is kept for each thread.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import tensorflow as tf

from tfdist.engine import own_losses
from tfdist.engine.per_thread import PerThread

log = logging.getLogger("absl")


class ReplicaStep:
    """One replica's run of a step, while it is traced (or run eagerly).

    Attributes:
        share: Scalar tensor: the replica's examples over those of the global batch.
        model: Name of the model, for messages.
        may_be_empty: Whether the replica may have no examples, so that its means may be NaN.
        is_divided: Whether the step has asked for the number of replicas, to divide by it.
        has_gradients_of_parts: Whether the gradients taken last are those of this replica's part.
        graph: Graph in which the step began; messages between replicas can only start there.
    """

    def __init__(self, share: Any, model: str, may_be_empty: bool = False):
        self.share = share
        self.model = model
        self.may_be_empty = may_be_empty
        self.is_divided = False
        self.graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        self._parts: list[tuple[Any, Any]] = []
        self.has_gradients_of_parts = False

    @property
    def has_parts(self) -> bool:
        """Whether a loss of this step has been made a part of the global one."""
        return bool(self._parts) or self.is_divided

    def terms(self, loss: Any) -> list[own_losses.Term] | None:
        """Returns what `loss` is made of, or None where that cannot be read or does not matter."""
        if not isinstance(loss, tf.Tensor) or loss.shape.rank != 0 or self.is_divided:
            return None
        if tf.executing_eagerly() or loss.graph is not self.graph:
            return None
        return own_losses.terms_of(
            loss, {known.name for known, part in self._parts if known is part}
        )

    def weight_of(self, term: own_losses.Term) -> Any:
        """Returns how much this replica's part of a loss grows with one term of it."""
        if term.kind in (own_losses.PART, own_losses.SUM):
            return term.weight
        return term.weight * tf.cast(self.share, term.weight.dtype)

    def alone(self) -> ReplicaStep:
        """Returns a step in which this replica is the only one."""
        return ReplicaStep(tf.constant(1.0), self.model)

    def mark(self, value: Any, part: Any = None) -> Any:
        """Remembers that `value` is this replica's part of a sum over replicas; returns it.

        Args:
            value: Tensor.
            part: The part, if it is not `value` itself.
        """
        self._parts.append((value, value if part is None else part))
        return value

    def part(self, value: Any) -> Any:
        """Returns the part that `value` is known as, to be summed, not averaged; or None."""
        return next((part for known, part in self._parts if known is value), None)

    def whole(self, value: Any) -> Any:
        """Returns a part over the share: its mean over replicas, by examples, is the sum."""
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

    def mean(self, value: Any) -> Any:
        """Returns what to weigh by the share; 0 without examples, when it may be NaN."""
        part = self.part(value)
        if part is not None:
            return self.whole(part)
        return self.unless_empty(value)

    def unless_empty(self, value: Any) -> Any:
        """Returns `value`, or 0 without examples: 0 times NaN is NaN."""
        if not self.may_be_empty:
            return value
        return tf.where(self.share > 0, value, tf.zeros_like(value))

    def can_communicate(self) -> bool:
        """Whether replicas can be asked for something here: not inside a condition or a loop."""
        return tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self.graph


@functools.cache  # Once for the models of a name, not for every replica and optimizer.
def warn_of_own_loss(model: str) -> None:
    """Warns of a gradient of which it cannot be seen what it is to be weighed by."""
    log.warning(
        "train_step of %s takes a gradient of a loss of its own: it is weighed by the replica's "
        "share of the examples (1/%d where all have as many), as the part of a mean. If your loss "
        "is no mean, use self.compute_loss, a keras.losses object or tf.nn.compute_average_loss",
        model,
        tf.distribute.get_strategy().num_replicas_in_sync,
    )


_steps: PerThread[ReplicaStep | None] = PerThread()
#: The step that this thread traces, or None outside `fit` and the like.
current = _steps.get
#: Makes a step the current one of this thread, as a context.
tracing = _steps.having
