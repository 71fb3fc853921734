"""SIGTERM keeps its meaning when TensorFlow, for several workers, takes it over.

TensorFlow's runtime installs a handler of its own with a strategy for several workers, from a
thread and a moment late. It notes the signal for those who ask TensorFlow for it, and the process
lives on: a task that is told to end would hold up its machine, or train on to the end. Here nobody
asks TensorFlow; `fit` with a `BackupAndRestore` takes the signal over itself, and before and after
that there is nothing to save.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator

#: For TensorFlow's thread to start.
_WAIT_SECONDS = 2.0

_is_done = False


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Puts back what SIGTERM meant, after the first strategy for several workers is built."""
    global _is_done
    before = signal.getsignal(signal.SIGTERM)  # As Python knows it; None: it is not Python's.
    is_main = threading.current_thread() is threading.main_thread()
    if _is_done or before is None or not is_main:
        yield
        return
    handler = _handler()
    yield
    _is_done = True
    deadline = time.monotonic() + _WAIT_SECONDS
    while _handler() == handler and time.monotonic() < deadline:
        time.sleep(0.002)
    signal.signal(signal.SIGTERM, before)


def _handler() -> int:
    """Returns the address of what the process has in place for SIGTERM."""
    # `struct sigaction`, with room to spare: the handler comes first.
    action = (ctypes.c_void_p * 64)()
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, ctypes.byref(action))
    return action[0] or 0
