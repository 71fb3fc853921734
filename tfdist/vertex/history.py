"""What a job has done so far: its states, how long it was in each, and how it ended. Pure.

history = History()
history.observe(status, now)      # whether its state is another
history.seconds(now)              # {"QUEUED": 4.0, "PENDING": 181.2, "RUNNING": 12.0}
history.outcome                   # None, or how it ended
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from tfdist.errors import EXIT_FAILED
from tfdist.errors import EXIT_OK
from tfdist.vertex.jobs import JobStatus

#: States before a job runs.
WAITING = frozenset({"UNSPECIFIED", "QUEUED", "PENDING"})

#: What each state that a job does not leave means. `aiplatform` waits for ever on two of them.
ENDED: Mapping[str, tuple[int, str]] = {
    "SUCCEEDED": (EXIT_OK, "the job succeeded"),
    "FAILED": (EXIT_FAILED, "the job failed"),
    "CANCELLED": (EXIT_FAILED, "the job was cancelled"),
    "EXPIRED": (
        EXIT_FAILED,
        "the job expired: it got no machines, or ran into its timeout, before it was done",
    ),
    "PARTIALLY_SUCCEEDED": (EXIT_FAILED, "the job succeeded in part: some results may be missing"),
}

_PAUSED = "PAUSED"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: 0 for success, else 1.
        reason: A sentence, with the service's own words where it said any.
    """

    exit_code: int
    reason: str


class History:
    """The states of one job, in the order in which they are observed.

    Args:
        paused: Whether a paused job is one that ended ("end") or one to wait for ("continue").

    Attributes:
        status: What was observed last, or None.
        restarts: How often it went back from running to waiting for machines.
    """

    def __init__(self, paused: Literal["end", "continue"] = "end"):
        self.status: JobStatus | None = None
        self.restarts = 0
        self._paused = paused
        self._seconds: dict[str, float] = {}
        self._begin = 0.0
        self._since = 0.0

    @property
    def state(self) -> str:
        """Its state, "UNSPECIFIED" before the first observation."""
        return self.status.state if self.status else "UNSPECIFIED"

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, or None while it goes on."""
        if self.status is None:
            return None
        error = f": {self.status.error}" if self.status.error else ""
        if "quota" in error.lower():
            error += " (ask for fewer machines, or for more quota in the console: IAM, Quotas)"
        if self.state == _PAUSED and self._paused == "end":
            return Outcome(EXIT_FAILED, f"the job is paused{error}: resume it and follow it again")
        if self.state not in ENDED:
            return None
        code, reason = ENDED[self.state]
        return Outcome(code, f"{reason}{error}")

    def observe(self, status: JobStatus, now: float) -> bool:
        """Takes in what the service says now.

        Args:
            status: What it says.
            now: When it said so, in seconds since 1970.

        Returns:
            Whether the job is in another state than before.
        """
        before, self.status = self.status, status
        if before is None:
            self._begin = self._since = _not_after(status.create_time, now)
            ran = status.start_time is not None
            if ran and status.state not in WAITING:
                self._pass("PENDING", status.start_time, now)
            if status.state in ENDED:
                self._pass("RUNNING" if ran else "PENDING", status.end_time, now)
            return True
        if status.state == before.state:
            return False
        started = status.start_time if before.start_time is None else None
        if before.state in WAITING and started is not None:
            self._pass(before.state, started, now)
            if status.state in ENDED:  # It ran while nobody looked.
                self._pass("RUNNING", status.end_time, now)
        else:
            self._pass(before.state, status.end_time if status.state in ENDED else None, now)
        self.restarts += before.state == "RUNNING" and status.state in WAITING
        return True

    def seconds(self, now: float) -> dict[str, float]:
        """Returns how long the job was in each state so far, in the order of the first visits.

        Args:
            now: Seconds since 1970.
        """
        passed = dict(self._seconds)
        if self.status is not None and self.state not in ENDED:
            passed[self.state] = passed.get(self.state, 0.0) + max(0.0, now - self._since)
        return passed

    def total(self, now: float) -> float:
        """Returns the seconds since the job was created, up to its end.

        Args:
            now: Seconds since 1970.
        """
        if self.status is None:
            return 0.0
        end = self._since if self.state in ENDED else now
        return max(0.0, end - self._begin)

    def _pass(self, state: str, until: float | None, now: float) -> None:
        """Adds the time since the last change to a state.

        Args:
            state: The state.
            until: When it ended by the service's clock, or None where it does not say.
            now: When that was observed by ours.
        """
        # The clocks may differ: time goes on, and nothing ends after it was seen to have ended.
        moment = max(self._since, _not_after(until, now))
        self._seconds[state] = self._seconds.get(state, 0.0) + moment - self._since
        self._since = moment


def _not_after(moment: float | None, now: float) -> float:
    return now if moment is None else min(moment, now)


def shown(seconds: float) -> str:
    """Returns a time as "0:07", "12:03" or "1:02:03".

    Example:
        >>> shown(3723.4)
        '1:02:03'
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def line(history: History, now: float) -> str:
    """Returns one line: the state, the time in it, the times in others, and in total.

    Args:
        history: Of the job.
        now: Seconds since 1970.

    Example:
        "RUNNING 12:03 (pending 3:10, total 15:17)"
    """
    seconds = history.seconds(now)
    own = seconds.pop(history.state, None)
    others = [f"{state.lower()} {shown(passed)}" for state, passed in seconds.items()]
    others.append(f"total {shown(history.total(now))}")
    if history.restarts:
        others.append(f"restarts {history.restarts}")
    begin = history.state if own is None else f"{history.state} {shown(own)}"
    return f"{begin} ({', '.join(others)})"
