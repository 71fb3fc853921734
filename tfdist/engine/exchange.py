"""Small whole numbers that the workers tell each other at every step: rows, flags.

Through memory that they share where they can, which takes a tenth of a millisecond; through the
group's hub elsewhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from tfdist import collectives
from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.cluster.group import Group
from tfdist.errors import PeerLostError


def share_memory(
    group: Group, what: str, buckets: Sequence[collectives.Bucket], limit: float | None = None
) -> tuple[collectives.AllReduce | None, str]:
    """Returns memory in which the workers of `group` sum `buckets`; they all call it together.

    Args:
        group: The workers.
        what: What is summed, for messages.
        buckets: See `collectives.connect`.
        limit: Longest wait for another worker, in seconds; None: as long as for any agreement.

    Returns:
        As `collectives.connect`.
    """
    patience = rendezvous.patience_from(os.environ)
    return collectives.connect(
        group.rank,
        [str(task) for task in group.tasks],
        lambda value: group.all_gather(f"sharing memory for {what}", value, patience),
        buckets,
        check=lambda: group.raise_if_lost(what),
        timeout_seconds=patience if limit is None else limit,
        what=what,
        variable="TFDIST_AGREEMENT_TIMEOUT" if limit is None else "TFDIST_TIMEOUT_SECONDS",
    )


class Exchange:
    """What every worker says at one point of a step.

    Args:
        group: The workers.
        name: The point.
        width: How many numbers each worker says.
    """

    def __init__(self, group: Group, name: str, width: int):
        self._group = group
        self._name = name
        self._mine = np.zeros((group.size, width), np.int64)
        bucket = collectives.Bucket("int64", ((group.size, width),))
        self._reducer, _ = share_memory(group, name, [bucket])

    def gather(self, values: list[int]) -> list[list[int]]:
        """Returns the numbers of every worker, in the order of the group's tasks.

        Raises:
            PeerLostError: Another worker died, or did not come in time.
        """
        if self._reducer is None:
            patience = rendezvous.patience_from(os.environ)
            return self._group.all_gather(self._name, values, patience)
        self._mine[self._group.rank] = values
        [everyone] = self._reducer.reduce(0, [self._mine])
        gathered: list[list[int]] = everyone.tolist()
        return gathered

    def begin(self) -> None:
        """Forgets what is under way; called by all workers together."""
        if self._reducer is not None:
            self._reducer.reset()


_made: list[Exchange] = []


@functools.cache
def exchange(name: str, width: int) -> Exchange:
    """Returns the exchange of this process's group at a point; all workers ask for it together."""
    group = current.group()
    if group is None:
        raise PeerLostError("a group of workers", "a process alone")
    _made.append(Exchange(group, name, width))
    return _made[-1]


def begin() -> None:
    """Forgets what is under way everywhere; called by all workers together."""
    for each in _made:
        each.begin()
