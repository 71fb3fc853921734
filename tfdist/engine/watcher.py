"""Who acts between steps: commits, ends training in order, measures."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

import keras

from tfdist.engine import callbacks as callback_rules

if TYPE_CHECKING:
    from tfdist.engine.training import Training


class Watcher(keras.callbacks.Callback):
    """A callback that acts at the boundaries of a training, after all other callbacks."""

    def open(self, training: Training) -> None:
        """Called before `on_train_begin`; here a training may be told where to go on."""

    def is_due(self, training: Training) -> bool:
        """Returns whether it wants to act at the next boundary; asked by every worker.

        Parameter servers have a boundary only where somebody is due: work must be drained for it.
        """
        return True

    def at_boundary(self, training: Training) -> None:
        """Called by every worker between two steps, and between two epochs."""

    def is_due_in_validation(self, training: Training) -> bool:
        """Returns whether it wants to act in the middle of validation; parameter servers ask."""
        return False

    def at_boundary_in_validation(self, training: Training) -> None:
        """Called by every worker between two steps of the validation of an epoch.

        A position that is captured here is gone on with at the beginning of that validation.
        """

    def commit(self, training: Training, *, wait: bool = False) -> None:
        """Called by every worker at a boundary where the position is to be made durable.

        Args:
            training: The training.
            wait: Whether to return only when it is.
        """

    def close(self, training: Training) -> None:
        """Called after `on_train_end`."""

    def abandon(self) -> None:
        """Called when training ends with an exception."""


def has_watchers(callbacks: Any) -> bool:
    """Whether a `Watcher` is among the callbacks, given to `fit` in whatever form."""
    return any(isinstance(each, Watcher) for each in callback_rules.as_list(callbacks))
