"""What one worker has in a position: its place in the data, callbacks, generators, history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from tfdist.engine import plain
from tfdist.engine import randomness_state
from tfdist.engine.callback_states import CallbackStates

if TYPE_CHECKING:
    from tfdist.engine.training import Training

#: What a worker tells of its callbacks is at most that long; else it goes on with the chief's.
_LONGEST = 2**20
#: Bytes of an iterator's state (what its shuffle holds) that a worker sends to the chief.
_LONGEST_ITERATOR = 2**23


def capture(
    training: Training, callbacks: CallbackStates, arrays: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Returns what this worker has, fit for JSON.

    Args:
        training: The training.
        callbacks: The states of its callbacks.
        arrays: Where arrays and long bytes are put; those of the chief are kept.
    """
    states: dict[str, Any] | None = callbacks.capture(arrays, ended=training.has_ended)
    if not training.is_chief and len(json.dumps(states)) > _LONGEST:
        states = None
    place = _place(training)
    return {
        "data": plain.encode(place, arrays if training.is_chief else None, "data"),
        "held out": training.held_out.past() if training.held_out is not None else None,
        "random": randomness_state.capture(),
        "callbacks": states,
        "logs": plain.encode(training.logs),
        "weight": float(getattr(training.model.train_function, "weight", 1.0)),
    }


def history(calls: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Returns what the `History` of a `CallbackList` has, fit for JSON; None where there is none.

    Args:
        calls: The `CallbackList`.
        arrays: Where arrays are put.
    """
    found = getattr(calls, "_history", None)
    if found is None:
        return None
    told = {"epoch": getattr(found, "epoch", []), "history": found.history}
    return plain.encode(told, arrays, "history")


def _place(training: Training) -> dict[str, Any] | None:
    """Returns where this worker is in its data, or None where that is not known."""
    if not training.has_position:
        return None
    found: dict[str, Any] = training.feed.position()
    state = found.get("iterator")
    if state is not None and not training.is_chief and len(state) > _LONGEST_ITERATOR:
        found["iterator"] = None  # The place is found by reading again what was read.
    return found
