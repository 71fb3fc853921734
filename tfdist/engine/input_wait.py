"""How long the loop waits for its data: the part of a step in which nothing else is done."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

log = logging.getLogger("absl")

#: The pipeline is named as the bottleneck above this share of the time.
BOTTLENECK = 0.2
#: Fewer steps of an epoch say nothing.
_FEWEST = 10
#: Handing over a batch that is there takes some tenths of a millisecond.
_HANDING_OVER = 0.001


class InputWait(NamedTuple):
    """What was measured in one epoch, its first two batches left out: tracing, filling buffers.

    Attributes:
        steps: Steps that were measured.
        seconds: Time waited for the next batch, in all.
        elapsed: Time that the steps took, waiting included.
    """

    steps: int
    seconds: float
    elapsed: float

    @property
    def share(self) -> float:
        """The part of the time that was waited, from 0 to 1."""
        return self.seconds / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def is_bottleneck(self) -> bool:
        """Whether faster input would make steps faster by much."""
        enough = self.steps >= _FEWEST and self.seconds > self.steps * _HANDING_OVER
        return enough and self.share > BOTTLENECK

    def __str__(self) -> str:
        each = 1000.0 / max(1, self.steps)
        return (
            f"input wait {self.seconds * each:.1f} ms of a step of {self.elapsed * each:.1f} ms "
            f"({self.share:.0%}), mean of {self.steps} steps"
        )


class Waiting:
    """Adds up what a reader waits for its iterator.

    Attributes:
        seconds: Since the beginning.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *unused: object) -> None:
        self.seconds += time.perf_counter() - self._begun


class Epoch:
    """Measures one epoch.

    Args:
        waiting: What the reader waits, or None where that is not known.
    """

    def __init__(self, waiting: Waiting | None):
        self._waiting = waiting
        self._batches = 0
        self._first = self._last = (0.0, 0.0)

    def has_batch(self) -> None:
        """Notes that the next batch is there."""
        if self._waiting is None:
            return
        self._batches += 1
        self._last = time.perf_counter(), self._waiting.seconds
        if self._batches <= 2:
            self._first = self._last

    def result(self) -> InputWait | None:
        """Returns what was measured, or None where nothing was."""
        if self._batches <= 2:
            return None
        elapsed, seconds = (b - a for a, b in zip(self._first, self._last, strict=True))
        return InputWait(self._batches - 2, seconds, elapsed)


def tell(found: InputWait, *, warn: bool = True) -> bool:
    """Logs what was measured; returns whether it warned that the pipeline is the bottleneck.

    Args:
        found: What was measured.
        warn: Whether to say so where it is.
    """
    if found.steps < _FEWEST:
        return False
    log.info("%s", found)
    if not warn or not found.is_bottleneck:
        return False
    log.warning(
        "the input pipeline is the bottleneck: %s; give map() num_parallel_calls=tf.data.AUTOTUNE, "
        "work on whole batches (map_batch=), keep with cache() what is the same in every pass, "
        "give each worker more cores, or have other hosts make the batches (service= of "
        "tfdist.data.shard)",
        found,
    )
    return True
