"""What `submit`, `wait` and `logs` share: a job followed on a terminal or in a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from typing import Literal
from typing import TextIO

from tfdist.errors import ConfigError
from tfdist.vertex.history import History
from tfdist.vertex.history import line
from tfdist.vertex.jobs import JobName
from tfdist.vertex.jobs import parse_job
from tfdist.vertex.logs import LogLine
from tfdist.vertex.wait import JobResult
from tfdist.vertex.wait import Pace
from tfdist.vertex.wait import Reporter
from tfdist.vertex.wait import wait

_PREFIX = "tfdist vertex: "
_ERASE = "\r\033[K"


class Console(Reporter):
    """States to standard error, the job's own lines to `out`.

    On a terminal a live line shows the time in the present state; elsewhere there is one line for
    each change.

    Args:
        out: Where the job's lines go.
    """

    def __init__(self, out: TextIO):
        self._out = out
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self.tick_seconds = 1.0 if self._live else None

    def tick(self, history: History, now: float) -> None:
        if self._live and history.status is not None and history.outcome is None:
            width = shutil.get_terminal_size().columns - 1
            self._show(line(history, now)[:width])

    def say(self, text: str) -> None:
        self.clear()
        print(f"{_PREFIX}{text}", file=sys.stderr, flush=True)

    def log(self, entry: LogLine) -> None:
        shown = self._shown
        self.clear()
        print(entry, file=self._out, flush=True)
        self._show(shown)

    def clear(self) -> None:
        """Takes the live line away."""
        if self._shown:
            print(_ERASE, end="", file=sys.stderr, flush=True)
            self._shown = ""

    def _show(self, text: str) -> None:
        if text:
            print(f"{_ERASE}{text}", end="", file=sys.stderr, flush=True)
            self._shown = text


def follow(
    job: JobName,
    console: Console,
    *,
    endpoint: str | None,
    timeout: float | None,
    show_logs: bool | None,
    cancel_on_interrupt: bool,
    paused: Literal["end", "continue"] = "end",
) -> JobResult:
    """Waits for a job, and asks at Ctrl-C what shall become of it.

    Args:
        job: The job.
        console: Where it is shown.
        endpoint: As for `tfdist.vertex.wait`.
        timeout: As for `tfdist.vertex.wait`.
        show_logs: As for `tfdist.vertex.wait`.
        cancel_on_interrupt: Whether Ctrl-C and SIGTERM cancel the job without asking.
        paused: As for `tfdist.vertex.wait`.
    """
    with _terminable() as terminated:

        def interrupted() -> Literal["cancel", "leave"]:
            console.clear()
            if cancel_on_interrupt:
                return "cancel"
            if terminated or not (sys.stdin.isatty() and sys.stderr.isatty()):
                return "leave"
            print("\ncancel the job? [y/N] ", end="", file=sys.stderr, flush=True)
            return "cancel" if sys.stdin.readline().strip().lower() in ("y", "yes") else "leave"

        try:
            return wait(
                job,
                endpoint=endpoint,
                timeout=timeout,
                paused=paused,
                show_logs=show_logs,
                pace=_pace(),
                reporter=console,
                interrupted=interrupted,
            )
        finally:
            console.clear()


def chosen(job: str, project: str | None, region: str | None, config: str | None) -> JobName:
    """Returns which job is meant.

    Args:
        job: Its resource name, its page in the console, or its id.
        project: Project of an id.
        region: Region of an id.
        config: Config that names both.
    """
    if config is not None:
        from tfdist.vertex.config import load

        spec = load(config)
        project, region = project or spec.project, region or spec.region
    return parse_job(job, project, region)


def check_timeout(timeout: float | None) -> None:
    """Refuses a time that is none.

    Raises:
        ConfigError: It is not above 0.
    """
    if timeout is not None and not timeout > 0:
        raise ConfigError("--timeout to be above 0 seconds", f"{timeout:g}", "leave it out")


@contextlib.contextmanager
def _terminable() -> Iterator[list[int]]:
    """Ends waiting at SIGTERM as at Ctrl-C; yields the signals that came."""
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before: Any = signal.signal(signal.SIGTERM, stop)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def _pace() -> Pace:
    """Returns how often to ask; `TFDIST_VERTEX_POLL` shortens the pauses."""
    given = os.environ.get("TFDIST_VERTEX_POLL")
    if not given:
        return Pace()
    try:
        most = float(given)
    except ValueError:
        most = 0.0
    if not most > 0:
        raise ConfigError("TFDIST_VERTEX_POLL to be seconds above 0", repr(given), "write 5")
    return Pace(first=min(most, Pace.first), most=most, settle=min(3 * most, Pace.settle))
