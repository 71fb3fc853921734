"""What a check of `tfdist doctor` says, and how checks run: side by side, each with a deadline.

>>> run([Job("disk", "/data", lambda: Check("disk", "ok", "it answers"))], timeout=5.0)
[Check(name='disk', status='ok', detail='it answers', fix='')]
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Literal
from typing import TypeVar

Status = Literal["ok", "warning", "failed", "skipped"]
T = TypeVar("T")

_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: What was checked, one word.
        status: "ok"; "warning": the job may still run; "failed": it will not; "skipped".
        detail: What was seen.
        fix: What to do about it, or "".
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """A check that depends on no other.

    Attributes:
        name: Name of the check.
        subject: What it looks at, for the message when it does not end.
        work: Does it.
        fix: What to do where it does not end.
    """

    name: str
    subject: str
    work: Callable[[], Check]
    fix: str = "run it again with a longer --timeout"


def run(jobs: Iterable[Job], timeout: float) -> list[Check]:
    """Runs independent checks side by side; one that does not end within `timeout` has failed.

    Args:
        jobs: The checks.
        timeout: Seconds.
    """
    return collect(start(jobs), timeout, time.monotonic())


Started = list[tuple[Job, "concurrent.futures.Future[Check]"]]


def start(jobs: Iterable[Job]) -> Started:
    """Starts every check in a thread of its own."""
    return [(job, in_thread(job.work)) for job in jobs]


def collect(started: Started, timeout: float, began: float) -> list[Check]:
    """Waits for checks that were started at `began`; one that has not ended by then has failed."""
    left = max(0.0, began + timeout - time.monotonic())
    concurrent.futures.wait([future for _, future in started], left)
    return [
        future.result()
        if future.done()
        else Check(job.name, "failed", f"{job.subject}: no answer within {timeout:g} s", job.fix)
        for job, future in started
    ]


def in_thread(
    work: Callable[[], T], too_late: Callable[[T], None] | None = None
) -> concurrent.futures.Future[T]:
    """Does `work` in a thread that may be left behind; `too_late` gets a result nobody awaits."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def target() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: B036 - it is raised where the result is read
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)
            return
        try:
            future.set_result(result)
        except concurrent.futures.InvalidStateError:
            if too_late is not None:
                too_late(result)

    threading.Thread(target=target, name="tfdist-doctor", daemon=True).start()
    return future


def some(items: Sequence[str]) -> str:
    """Returns the first of a list that may be long, and how many more there are."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def are(items: Sequence[object], one: str, many: str) -> str:
    """Returns the word for one item or for several."""
    return one if len(items) == 1 else many
