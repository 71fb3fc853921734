"""Ends a process that waits for a task that is gone, when it cannot notice by itself.

A collective may wait for ever for a peer that is gone, in native code that no exception of Python
can enter. `Doom` is the thread that ends such a process, with a message.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from tfdist.errors import PeerLostError


class Region(enum.Enum):
    """Where the main thread may be, other than in common work, which has a name."""

    #: Nobody has said what it does: it may need the others or not.
    UNMARKED = enum.auto()
    #: In work that needs nobody else: it may take as long as it likes, in native code too.
    ALONE = enum.auto()


class Doom(threading.Thread):
    """Ends the process once its main thread has had time to notice a loss.

    Args:
        seconds: That time.
        region: Returns the name of the common work that the main thread is in, or where else it
            is.
        waits: Whether a thread with this innermost frame may be waiting for others.
        error: Makes the error for work of that name.
        over: Returns whether the process has left the group.
    """

    def __init__(
        self,
        seconds: float,
        region: Callable[[], str | Region],
        waits: Callable[[FrameType], bool],
        error: Callable[[str], PeerLostError],
        over: Callable[[], bool],
    ):
        super().__init__(name="tfdist-doom", daemon=True)
        self._seconds = seconds
        self._region = region
        self._stuck = _Stuck(waits)
        self._error = error
        self._over = over

    def run(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._over():
            region, now = self._region(), time.monotonic()
            if isinstance(region, str):
                if now > deadline:
                    self._end(region)
            elif region is Region.UNMARKED and self._stuck.seconds() > self._seconds:
                # A loop of the user's own marks nothing, but can be seen to wait in an operation.
                self._end("the operation that it waits in")
            else:
                # Work that needs nobody else (writing a file, say) may go on.
                deadline = max(deadline, now + self._seconds / 2)
            time.sleep(0.25)

    def _end(self, name: str) -> None:
        error = self._error(name)
        sys.stderr.write(f"tfdist: error: {error}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(error.exit_code)


class _Stuck:
    """Tells how long the main thread has been in one and the same frame that waits."""

    def __init__(self, waits: Callable[[FrameType], bool]) -> None:
        self._waits = waits
        # The frame is kept, so that a later call cannot look like this one.
        self._frame: FrameType | None = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None and not self._waits(frame):
            frame = None
        if frame is None or frame is not self._frame:
            self._frame, self._since = frame, time.monotonic()
            return 0.0
        return time.monotonic() - self._since
