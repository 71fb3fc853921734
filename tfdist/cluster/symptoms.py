"""How TensorFlow looks from outside when a peer is gone.

The one place of this package that knows it, and by name only: cluster/ does not import TensorFlow.
"""

from __future__ import annotations

from types import FrameType

#: Where TensorFlow's Python waits for an operation to end.
_EXECUTION = "/tensorflow/python/eager/"

#: Errors that its collectives raise when a peer goes away.
_ERRORS = frozenset(
    (
        "UnavailableError",
        "AbortedError",
        "CancelledError",
        "DeadlineExceededError",
        "InternalError",
        "UnknownError",
        "FailedPreconditionError",
    )
)


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether the loss of a peer may be the cause of `error`."""
    return type(error).__name__ in _ERRORS


def is_in_operation(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame waits for an operation to end."""
    return _EXECUTION in frame.f_code.co_filename
