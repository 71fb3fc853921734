"""Whether, and how soon, a job that has failed is worth another start.

The tasks tell (`tfdist.cluster.notice`) which steps are committed. A start that has committed
something is progress: the next one follows soon. Starts that commit nothing wait longer and
longer, and after `STALLED_STARTS` of them in a row the job is given up: what ends it will end it
again. A start that was killed (SIGKILL: a machine that is taken away, an operator, want of memory)
says less of the next one, and counts as a third. Nothing is concluded about a program that commits
nothing ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: So many starts in a row that end with the same newest commit are no accident.
STALLED_STARTS = 5
#: So many starts that were killed count as one that failed by itself.
KILLED_STARTS = 3


class Restarts:
    """Follows the progress of one job over all its starts.

    Args:
        first_seconds: Wait before a start that follows progress.
        most_seconds: Longest wait; each one without progress takes twice as long as the last.

    Attributes:
        stalled: How many starts in a row have ended with the same newest commit.
    """

    def __init__(self, first_seconds: float, most_seconds: float):
        self.stalled = 0
        self._first = first_seconds
        self._most = most_seconds
        self._committed: dict[str, int] = {}
        # Both in parts of a start that failed by itself.
        self._alike = self._in_vain = 0

    def note_end(self, committed: Mapping[str, int], *, was_killed: bool = False) -> None:
        """Notes that a start has ended.

        Args:
            committed: For each directory of commits that it told of, how many steps are in the
                newest one; 0 where there is none yet.
            was_killed: Whether the task that failed first was killed by SIGKILL.
        """
        weight = 1 if was_killed else KILLED_STARTS
        is_progress = any(
            step > self._committed.get(place, -1) for place, step in committed.items()
        )
        for place, step in committed.items():
            self._committed[place] = max(step, self._committed.get(place, step))
        if is_progress:
            self.stalled, self._alike, self._in_vain = 1, weight, 0
        elif self._committed:
            self.stalled += 1
            self._alike += weight
            self._in_vain += weight
        else:
            self._in_vain += weight

    @property
    def is_stalled(self) -> bool:
        """Whether another start would end as the last ones did."""
        return self._alike >= STALLED_STARTS * KILLED_STARTS

    @property
    def seconds(self) -> float:
        """How long to wait before the next start."""
        in_vain = self._in_vain // KILLED_STARTS
        doublings = in_vain if self._committed else in_vain - 1
        return min(self._most, self._first * 2.0 ** min(max(0, doublings), 60))

    @property
    def newest(self) -> str:
        """The newest commits, in words; "" where none was told of."""
        return ", ".join(f"step {step} in {place}" for place, step in self._committed.items())


def starts_in_vain(record: Mapping[str, Any] | None) -> int:
    """Returns how many starts in a row, up to the last, have begun at one step and saved nothing.

    For who is started again by others (Vertex AI, Kubernetes), and keeps no count of its own.

    Args:
        record: What `tfdist.state.provenance.Provenance.read` returns.
    """
    count, step = 0, None
    for entry in reversed(record["incarnations"] if record else []):
        begun = entry.get("resumed_step", 0)
        is_progress = entry.get("saved_step", begun) > begun or entry.get("ended") == "finished"
        if is_progress or (step is not None and begun != step):
            break
        count, step = count + 1, begun
    return count
