"""Follows a job until it ends, however it ends.

    result = tfdist.vertex.wait(job)
    result.exit_code                       # 0: it succeeded
    result.reason                          # "the job failed: Replica workerpool0-0 exited ..."

The client library's own waiter never returns for a job that expired and takes a paused one for a
success. This one knows every state, goes on through overload and broken connections for a while,
and brings the job's log along.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Literal

from tfdist.errors import EXIT_FAILED
from tfdist.errors import TfdistError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex import logs
from tfdist.vertex.history import History
from tfdist.vertex.history import line
from tfdist.vertex.history import shown
from tfdist.vertex.jobs import JobName
from tfdist.vertex.jobs import parse_job
from tfdist.vertex.submit import SubmittedJob

EXIT_INTERRUPTED = 130

_UNKNOWN_OUTAGE = 60.0  # Who never answered may not be there at all.
_LOG_SECONDS = 5.0  # The project may read its log 60 times a minute.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """How often the service is asked.

    Attributes:
        first: Seconds before the next question after the job's state changed.
        most: Most seconds, as the state stays.
        outage: Seconds that the service may be unreachable before waiting ends; at most a minute
            where it never answered.
        settle: Seconds after the job's end in which late lines of its log are shown.
    """

    first: float = 1.0
    most: float = 30.0
    outage: float = 600.0
    settle: float = 6.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobResult:
    """What became of a job, or of waiting for it.

    Attributes:
        name: Resource name.
        state: Its last known state, for example "FAILED".
        exit_code: 0 for success, 1 for anything else that the job can do, 130 if waiting was
            interrupted and the job goes on.
        reason: A sentence.
        seconds: Seconds in each state.
        total: Seconds from its creation to its end.
        restarts: How often it went back from running to waiting for machines.
        console_url: Address of its page in Google's console.
    """

    name: str
    state: str
    exit_code: int
    reason: str
    seconds: Mapping[str, float]
    total: float
    restarts: int
    console_url: str


class Reporter:
    """What waiting tells whoever waits; by default absl's log.

    Attributes:
        tick_seconds: How often `tick` is wanted, or None for never.
    """

    tick_seconds: float | None = None

    def change(self, history: History, now: float) -> None:
        """The job is in another state."""
        self.say(line(history, now))

    def tick(self, history: History, now: float) -> None:
        """Time has passed."""

    def say(self, text: str) -> None:
        """Something about the waiting itself."""
        from absl import logging

        logging.info("%s", text)

    def log(self, entry: logs.LogLine) -> None:
        """The job printed something."""
        self.say(str(entry))


def wait(
    job: SubmittedJob | JobName | str,
    *,
    project: str | None = None,
    region: str | None = None,
    endpoint: str | None = None,
    credentials: Any = None,
    timeout: float | None = None,
    paused: Literal["end", "continue"] = "end",
    show_logs: bool | None = None,
    pace: Pace | None = None,
    reporter: Reporter | None = None,
    interrupted: Callable[[], Literal["cancel", "leave"]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> JobResult:
    """Waits until a job ends.

    Args:
        job: The job, its resource name, its page in the console, or its id.
        project: Project of an id; by default that of `aiplatform.init`, or of the environment.
        region: Region of an id, like `project`.
        endpoint: As for `submit`.
        credentials: As for `submit`.
        timeout: Seconds after which waiting ends and the job goes on; None: as long as it takes.
        paused: Whether a paused job is one that ended, or is waited for.
        show_logs: Whether the job's log is shown; by default unless the job service is an
            emulator that has none (`TFDIST_LOGGING_ENDPOINT`).
        pace: How often the service is asked.
        reporter: Told what happens.
        interrupted: Asked at Ctrl-C whether to cancel the job or to leave it running; a second
            Ctrl-C leaves it. By default KeyboardInterrupt is raised.
        environ: Where variables are looked up; by default the process's.

    Raises:
        NotThereError: No such job.
        ConfigError: It names no job, or there is no permission.
        UnavailableError: The service was unreachable for too long; the job goes on.
    """
    name = _name(job, project, region, environ)
    access = client.connect(endpoint, credentials, environ)
    reporter = reporter or Reporter()
    if show_logs is None:
        show_logs = not access.is_emulator or logs.logging_endpoint(None, environ) is not None
    reader = logs.LogReader(name, access, environ=environ) if show_logs else None
    waiter = _Waiter(
        name, client.JobService(name.region, access), reader, reporter, pace or Pace(), paused
    )
    return waiter.run(timeout, interrupted)


def _name(
    job: SubmittedJob | JobName | str,
    project: str | None,
    region: str | None,
    environ: Mapping[str, str] | None,
) -> JobName:
    if isinstance(job, JobName):
        return job
    text = job.name if isinstance(job, SubmittedJob) else job
    project = project or client.initialized("_project")
    region = region or client.initialized("_location")
    return parse_job(text, project, region, environ)


class _Waiter:
    """The loop: asks for the state at a slowing pace, for the log at an even one."""

    def __init__(
        self,
        name: JobName,
        service: client.JobService,
        reader: logs.LogReader | None,
        reporter: Reporter,
        pace: Pace,
        paused: Literal["end", "continue"],
    ):
        self._name = name
        self._service = service
        self._reader = reader
        self._reporter = reporter
        self._pace = pace
        self._history = History(paused)
        self._pause = pace.first
        self._next_poll = 0.0
        self._next_logs = 0.0
        self._unreachable_since: float | None = None
        self._cancel_wanted = False

    def run(
        self,
        timeout: float | None,
        interrupted: Callable[[], Literal["cancel", "leave"]] | None,
    ) -> JobResult:
        """Waits; see `wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        asked = False
        while True:
            try:
                return self._wait(deadline)
            except KeyboardInterrupt:
                outcome = self._history.outcome
                if outcome is not None:  # Only late lines of the log are missing.
                    return self._result(outcome.exit_code, outcome.reason)
                if interrupted is None:
                    raise
                if asked or self._ask(interrupted) == "leave":
                    return self._result(
                        EXIT_INTERRUPTED, f"the job goes on; {self._follow_again()}"
                    )
                asked = self._cancel_wanted = True
                self._next_poll = 0.0

    def _ask(self, interrupted: Callable[[], Literal["cancel", "leave"]]) -> str:
        try:
            return interrupted()
        except KeyboardInterrupt:
            return "leave"

    def _cancel(self) -> None:
        """Asks the service to cancel the job; tries again with the next poll if it is away."""
        try:
            self._service.cancel(self._name)
        except failures.UnavailableError as error:
            self._reporter.say(f"not cancelled yet: {failures.words(error)}")
            return
        except TfdistError as error:  # It has ended meanwhile, or this user may not.
            self._reporter.say(f"not cancelled: {failures.words(error)}")
        else:
            self._reporter.say("the job is being cancelled")
        self._cancel_wanted = False
        self._pause = self._pace.first

    def _wait(self, deadline: float | None) -> JobResult:
        while True:
            if time.monotonic() >= self._next_poll:
                if self._cancel_wanted:
                    self._cancel()
                self._poll()
            if self._reader is not None and time.monotonic() >= self._next_logs:
                self._read_logs()
            outcome = self._history.outcome
            if outcome is not None:
                self._settle()
                return self._result(outcome.exit_code, outcome.reason)
            if deadline is not None and time.monotonic() >= deadline:
                return self._result(
                    EXIT_FAILED,
                    f"the job has not ended in time and goes on; {self._follow_again()}",
                )
            self._sleep(deadline)

    def _poll(self) -> None:
        try:
            status = self._service.get(self._name)
        except failures.UnavailableError as error:
            self._is_unreachable(error)
        except TfdistError:
            if self._history.status is not None:
                self._reporter.say(f"the job goes on; {self._follow_again()}")
            raise
        else:
            if self._unreachable_since is not None:
                passed = shown(time.monotonic() - self._unreachable_since)
                self._reporter.say(f"the service answers again, after {passed}")
                self._unreachable_since = None
            now = time.time()
            if self._history.observe(status, now):
                self._pause = self._pace.first
                self._reporter.change(self._history, now)
        self._next_poll = time.monotonic() + self._pause * random.uniform(0.8, 1.2)
        self._pause = min(1.5 * self._pause, self._pace.most)

    def _is_unreachable(self, error: failures.UnavailableError) -> None:
        now = time.monotonic()
        outage = self._pace.outage
        if self._history.status is None:
            outage = min(outage, _UNKNOWN_OUTAGE)
        if self._unreachable_since is None:
            self._unreachable_since = now
            self._pause = self._pace.first
            self._reporter.say(
                f"no answer about the job: {failures.words(error)}; trying for {shown(outage)}"
            )
        elif now - self._unreachable_since > outage:
            raise failures.UnavailableError(
                f"an answer about {self._name} within {shown(outage)}",
                error.received,
                f"the job may go on; {self._follow_again()}",
            ) from error

    def _read_logs(self) -> None:
        reader = self._reader
        if reader is None:
            return
        pause = min(_LOG_SECONDS, self._pace.most)
        try:
            if self._history.status is not None:
                reader.has_reduction_server = self._history.status.has_reduction_server
            for entry in reader.read():
                self._reporter.log(entry)
        except failures.ServiceError as error:
            self._reporter.say(f"no log for now: {failures.words(error)}")
            pause = self._pace.most
        except TfdistError as error:
            self._reporter.say(f"the job's log is not shown: {error}")
            self._reader = None
        self._next_logs = time.monotonic() + pause

    def _settle(self) -> None:
        """Shows what comes to the log after the end."""
        end = time.monotonic() + self._pace.settle
        while self._reader is not None:
            self._read_logs()
            if time.monotonic() >= end:
                return
            time.sleep(min(self._pace.settle / 3, 2.0))

    def _sleep(self, deadline: float | None) -> None:
        wakes = [self._next_poll]
        if self._reader is not None:
            wakes.append(self._next_logs)
        if deadline is not None:
            wakes.append(deadline)
        wake = min(wakes)
        tick = self._reporter.tick_seconds
        while (left := wake - time.monotonic()) > 0:
            time.sleep(left if tick is None else min(left, tick))
            if tick is not None:
                self._reporter.tick(self._history, time.time())

    def _follow_again(self) -> str:
        return f"follow it with: tfdist vertex wait {self._name}"

    def _result(self, exit_code: int, reason: str) -> JobResult:
        now = time.time()
        return JobResult(
            name=str(self._name),
            state=self._history.state,
            exit_code=exit_code,
            reason=reason,
            seconds=self._history.seconds(now),
            total=self._history.total(now),
            restarts=self._history.restarts,
            console_url=self._name.console_url,
        )
