"""Creates a job exactly once, whatever becomes of the answers.

A request to create a job that gets no answer may have been carried out all the same, and a job
that is created twice costs twice. So each submission has an id of its own in a label, and is looked
for before it is tried again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdist.errors import TfdistError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex.jobs import JobStatus

#: Key of the label that a submission is found by.
SUBMISSION_LABEL = "tfdist_submission"

_LONGEST_PAUSE = 10.0


def create_once(
    service: client.JobService,
    parent: str,
    body: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    seconds: float = 60.0,
    pause: float = 1.0,
) -> JobStatus:
    """Creates a job, again and again until the service answers, and never two of them.

    Args:
        service: The job service.
        parent: `projects/P/locations/R`.
        body: The job, with its `tfdist_submission` label.
        say: Told about requests without an answer.
        seconds: How long to try.
        pause: Seconds before the second try; doubled each time.

    Raises:
        ServiceError: No quota, or no answer in time.
        ConfigError: The service refuses it.
    """
    creation = _Creation(service, parent, body, say)
    try:
        return creation.run(seconds, pause)
    except KeyboardInterrupt:
        say(f"interrupted; look whether there is a job: {creation.lookup}")
        raise


class _Creation:
    """One job that is being created."""

    def __init__(
        self,
        service: client.JobService,
        parent: str,
        body: Mapping[str, Any],
        say: Callable[[str], None],
    ):
        self._service = service
        self._parent = parent
        self._body = body
        self._say = say
        self._submission = str(body["labels"][SUBMISSION_LABEL])
        #: Whether a request without an answer may have been carried out.
        self._in_doubt = False

    @property
    def lookup(self) -> str:
        """The command that shows whether the job is there."""
        _, project, _, region = self._parent.split("/")
        return (
            f"gcloud ai custom-jobs list --project={project} --region={region} "
            f"--filter=labels.{SUBMISSION_LABEL}={self._submission}"
        )

    def run(self, seconds: float, pause: float) -> JobStatus:
        """Creates it; see `create_once`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                made = self._service.create(self._parent, self._body)
                return self._only(made) if self._in_doubt else made
            except failures.UnavailableError as error:
                self._in_doubt = self._in_doubt or error.maybe_done
                self._say(f"no job yet: {failures.words(error)}; trying for {seconds:.0f} s")
                found = self._found_after(pause, deadline, error)
                if found is None and time.monotonic() > deadline:
                    raise self._gave_up(error) from error
            except TfdistError as error:
                # Perhaps it is refused because of its own first request: that took the quota.
                found = self._found_after(pause, deadline, error) if self._in_doubt else None
                if found is None:
                    raise
            if found:
                self._say("the job was created all the same")
                return found[0]
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _find(self) -> list[JobStatus]:
        return self._service.find(self._parent, SUBMISSION_LABEL, self._submission)

    def _found_after(
        self, pause: float, deadline: float, error: TfdistError
    ) -> list[JobStatus] | None:
        """Waits, then looks for the job; returns None once it is known not to be there."""
        while True:
            time.sleep(pause * random.uniform(0.8, 1.2))
            if not self._in_doubt:
                return None
            try:
                return self._find() or None
            except failures.UnavailableError:
                if time.monotonic() > deadline:
                    raise self._gave_up(error) from error
                pause = min(2 * pause, _LONGEST_PAUSE)
            except TfdistError as refused:  # Jobs may be created by some who may not list them.
                raise self._gave_up(error) from refused

    def _only(self, made: JobStatus) -> JobStatus:
        """Cancels all but the first job: an earlier request may have been carried out late."""
        try:
            first, *others = self._find() or [made]
            for other in others:
                self._say(f"created twice: {other.name} is cancelled, {first.name} stays")
                self._service.cancel(other.name)
        except TfdistError as error:
            self._say(
                f"warning: this may be created twice, and cannot be looked for now "
                f"({failures.words(error)}): {self.lookup}"
            )
            return made
        return first

    def _gave_up(self, error: TfdistError) -> TfdistError:
        if not self._in_doubt:
            return error
        return failures.UnavailableError(
            "an answer to the request to create a job",
            error.received,
            f"look whether it is there before you submit again: {self.lookup}",
        )
