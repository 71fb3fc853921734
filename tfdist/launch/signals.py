"""Signals of the launcher, received as values instead of interruptions.

A handler runs between any two instructions, so none does work here: it notes its signal, the
kernel wakes the wait, and the loop that owns the job decides.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Inbox:
    """Signals that came in, oldest first, and a wait that they end."""

    def __init__(self) -> None:
        self._received: collections.deque[int] = collections.deque()
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def put(self, number: int) -> None:
        """Adds a signal. Safe in a handler and from any thread."""
        self._received.append(number)
        self.wake()

    def take(self) -> int | None:
        """Removes and returns the oldest signal, or None."""
        return self._received.popleft() if self._received else None

    def wake(self) -> None:
        """Ends the current or next wait."""
        # A full pipe will end the wait as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"\0")

    def wait(self, seconds: float) -> None:
        """Waits until a signal arrives, a child changes its state or `seconds` have passed."""
        if self._received:
            return
        select.select([self._read_end], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


@contextlib.contextmanager
def inbox() -> Iterator[Inbox]:
    """Collects SIGINT, SIGTERM and SIGHUP in an `Inbox` until the context is left.

    A signal that the launcher was started to ignore (`nohup`, a shell's background job) stays
    ignored. Outside the main thread, where Python allows no handler, the inbox stays empty.
    """
    received = Inbox()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        received.put(number)

    def wake(number: int, frame: FrameType | None) -> None:
        del number, frame
        received.wake()

    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, note)
            previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, wake)
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        received.close()
