"""Counters in shared memory by which ranks tell each other how far they are.

Each rank only writes its own and only ever raises them; the others sleep until they are high
enough. A counter is written after the data that it announces, and x86 shows stores in order.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable

from tfdist.collectives import futex
from tfdist.collectives.layout import SLOTS
from tfdist.collectives.memory import Place
from tfdist.errors import PeerLostError

#: The counters: chunks written to the slots, chunks read from them, chunks read back.
FILLED, REDUCED, DRAINED = range(3)

_WORD = 8
_APART = 16  # Words between counters: two cache lines, which processors fetch together.
_NOTES = 3 * _APART
#: Others are seldom exactly as fast, and each rank may have only one core: sleep soon.
_SPIN_SECONDS = 30e-6
_NAP_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long to wait for a peer.

    Attributes:
        what: What is waited for, in messages.
        check: Raises if a peer is known to be gone, or if there is another reason not to wait.
        seconds: Longest wait; None waits as long as `check` does not raise.
        variable: Name of the environment variable that sets `seconds`.
    """

    what: str
    check: Callable[[], None]
    seconds: float | None
    variable: str


class Signals:
    """The counters of all ranks, as one rank sees them.

    Args:
        place: The shared memory.
        patience: How long to wait for a peer.
    """

    def __init__(self, place: Place, patience: Patience):
        layout = place.layout
        self._names = place.names
        self._patience = patience
        self._words = memoryview(place.memory).cast("Q")
        self._anchor = ctypes.c_char.from_buffer(place.memory)
        self._address = ctypes.addressof(self._anchor)
        self._base = [layout.counters(each) // _WORD for each in range(layout.ranks)]
        self._mine = self._base[place.rank]
        self._peers = [each for each in range(layout.ranks) if each != place.rank]

    def raise_to(self, counter: int, value: int) -> None:
        """Raises this rank's counter and wakes those who wait for it."""
        word = self._mine + counter * _APART
        self._words[word] = value
        futex.wake(self._address + word * _WORD)

    def await_all(self, counter: int, value: int) -> None:
        """Waits until the counter of every other rank is at least `value`.

        Raises:
            PeerLostError: A rank did not get there in time.
        """
        words = self._words
        for peer in self._peers:
            if words[self._base[peer] + counter * _APART] < value:
                self._await(peer, self._base[peer] + counter * _APART, value)

    def note(self, entry: int, tag: int, mask: int) -> None:
        """Writes this rank's notes on the chunk in slot `entry`."""
        at = self._mine + _NOTES + entry % SLOTS * 2
        self._words[at] = tag
        self._words[at + 1] = mask

    def notes(self, rank: int, entry: int) -> tuple[int, int]:
        """Reads the notes of `rank` on the chunk in slot `entry`."""
        at = self._base[rank] + _NOTES + entry % SLOTS * 2
        return self._words[at], self._words[at + 1]

    def clear(self) -> None:
        """Sets this rank's counters back to zero, when nobody looks at them."""
        for counter in (FILLED, REDUCED, DRAINED):
            self._words[self._mine + counter * _APART] = 0

    def _await(self, peer: int, word: int, value: int) -> None:
        words, patience = self._words, self._patience
        started = time.monotonic()
        while time.monotonic() - started < _SPIN_SECONDS:
            if words[word] >= value:
                return
        while True:
            seen = words[word]
            if seen >= value:
                return
            futex.wait(self._address + word * _WORD, seen, _NAP_SECONDS)
            if words[word] >= value:
                return
            patience.check()
            if patience.seconds is not None and time.monotonic() - started > patience.seconds:
                raise PeerLostError(
                    f"{patience.what} within {patience.seconds:g} s",
                    f"nothing from {self._names[peer]}",
                    f"look at the log of {self._names[peer]}, or allow more time with "
                    f"{patience.variable}",
                )
