"""How fast a commit is written in the background.

Training wants every core, so what a commit takes from it is spread over time. For each second that
its thread has spent on a core, and for each that training has waited for the snapshot, there are
16 seconds from its beginning to its end: steps become 6 % longer, not counting copies that
updates have to make, and a state of 250 MB is written in five to ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: The part of one core that a commit may take while it is written.
_SHARE = 1 / 16
#: Bytes between two looks at the clock: a millisecond of work.
PIECE = 1 << 20


class Pace:
    """Keeps one commit to its share; made and called in the thread that writes it.

    Args:
        rest: Called with the seconds that are to pass; it may return early where there is haste.
        spent: Seconds that training has already waited for this commit.
    """

    def __init__(self, rest: Callable[[float], None], spent: float = 0.0):
        self._rest = rest
        self._began = time.monotonic()
        self._before = time.thread_time() - spent

    def __call__(self) -> None:
        """Rests as long as the commit is ahead of its time."""
        due = self._began + (time.thread_time() - self._before) / _SHARE
        ahead = due - time.monotonic()
        if ahead > 0:
            self._rest(ahead)
