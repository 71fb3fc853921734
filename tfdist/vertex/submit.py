"""Submits a job: checks, uploads what it needs, and creates it exactly once.

    job = tfdist.vertex.submit(spec)
    job.name                                # projects/P/locations/R/customJobs/ID
    tfdist.vertex.wait(job)

A request to create a job that gets no answer may have been carried out all the same, and a job
that is created twice costs twice. So each submission is labelled with an id of its own, and looked
for before it is tried again.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
import uuid
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex import package
from tfdist.vertex import staging
from tfdist.vertex.checks import check
from tfdist.vertex.checks.finding import Finding
from tfdist.vertex.checks.finding import JobError
from tfdist.vertex.facts import facts
from tfdist.vertex.jobs import JobStatus
from tfdist.vertex.jobs import check_region
from tfdist.vertex.jobs import parse_job
from tfdist.vertex.render import body as rendered
from tfdist.vertex.spec import JobSpec

#: Key of the label that a submission is found by.
SUBMISSION_LABEL = "tfdist_submission"

_CREATE_SECONDS = 60.0
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that the service has.

    Attributes:
        name: Resource name.
        display_name: The name people gave it.
        state: Its state, for example "PENDING".
        console_url: Address of its page in Google's console.
        submission: The id in its label `tfdist_submission`.
        package_uri: Where its source distribution is, or None.
    """

    name: str
    display_name: str
    state: str
    console_url: str
    submission: str
    package_uri: str | None = None


def submit(
    spec: JobSpec,
    *,
    endpoint: str | None = None,
    credentials: Any = None,
    directory: str = ".",
    check_buckets: bool | None = None,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> SubmittedJob:
    """Checks a job, uploads its code where the image does not hold it, and creates it.

    Args:
        spec: The job.
        endpoint: Address of the job service, for example "http://127.0.0.1:8080"; by default
            `TFDIST_VERTEX_ENDPOINT`, that of `aiplatform.init`, or Google's in the region.
        credentials: Of google-auth; by default those of `aiplatform.init`, none for an endpoint
            with `http://`, or the application's default credentials.
        directory: What a source distribution is built from.
        check_buckets: Whether to ask where the buckets are; by default not for an endpoint with
            `http://`.
        environ: Where variables are looked up; by default the process's.
        say: Told what is done, one line each; by default absl's log.

    Raises:
        JobError: The job breaks a rule; nothing was sent.
        ConfigError: No such bucket, no permission, no code to upload, or the service refuses it.
        ServiceError: No quota, or no answer.
    """
    environ = os.environ if environ is None else environ
    say = _log if say is None else say
    spec = with_defaults(spec)
    for warning in check(spec):
        say(f"warning: {warning}")
    check_region(spec.region)
    _check_room_for_label(spec)
    access = client.connect(endpoint, credentials, environ)
    if check_buckets is None:
        check_buckets = not access.is_emulator
    if check_buckets and (spec.staging_bucket or spec.base_output_directory):
        storage = staging.Storage(spec.project, access.credentials, environ)
        staging.check_buckets(spec, storage, say)
    if spec.code == "package" and not spec.package_uri:
        spec = _upload(spec, directory, access, environ, say)
    submission = uuid.uuid4().hex
    body = rendered(spec)
    body["labels"] = {**body.get("labels", {}), SUBMISSION_LABEL: submission}
    service = client.JobService(spec.region, access)
    made = create_once(service, spec.parent, body, say=say)
    name = parse_job(made.name)
    return SubmittedJob(
        name=made.name,
        display_name=made.display_name or spec.display_name,
        state=made.state,
        # With the id of the project, which people know, instead of its number.
        console_url=dataclasses.replace(name, project=spec.project).console_url,
        submission=submission,
        package_uri=spec.package_uri if spec.code == "package" else None,
    )


def preview(
    spec: JobSpec, directory: str = ".", say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Returns what `submit` would send but for the label, and sends nothing.

    Args:
        spec: The job.
        directory: As for `submit`; a source distribution is built, to know its name.
        say: Told about doubts; by default absl's log.

    Raises:
        ConfigError: As `submit`.
    """
    say = _log if say is None else say
    spec = with_defaults(spec)
    for warning in check(spec):
        say(f"warning: {warning}")
    if spec.code == "package" and not spec.package_uri:
        built = package.build(directory, spec.module)
        spec = dataclasses.replace(spec, package_uri=_address(spec, built))
    return rendered(spec)


def with_defaults(spec: JobSpec) -> JobSpec:
    """Returns the job with the staging bucket of `aiplatform.init` where it names none."""
    bucket = client.initialized("staging_bucket")
    if spec.staging_bucket or not bucket:
        return spec
    bucket = bucket if bucket.startswith("gs://") else f"gs://{bucket}"
    return dataclasses.replace(spec, staging_bucket=bucket)


def _check_room_for_label(spec: JobSpec) -> None:
    most = facts().limits["labels"]
    if len(spec.labels) >= most:
        finding = Finding(
            "label-limit",
            f"at most {most - 1} labels, as submit adds {SUBMISSION_LABEL}",
            str(len(spec.labels)),
            "remove some of vertex.labels",
        )
        raise JobError([finding])


def create_once(
    service: client.JobService,
    parent: str,
    body: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    seconds: float = _CREATE_SECONDS,
    pause: float = _FIRST_PAUSE,
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
    submission = body["labels"][SUBMISSION_LABEL]
    try:
        return _create(service, parent, body, submission, say, seconds, pause)
    except KeyboardInterrupt:
        say(f"interrupted; look whether there is a job: {_lookup(parent, submission)}")
        raise


def _create(
    service: client.JobService,
    parent: str,
    body: Mapping[str, Any],
    submission: str,
    say: Callable[[str], None],
    seconds: float,
    pause: float,
) -> JobStatus:
    deadline = time.monotonic() + seconds
    in_doubt = False
    while True:
        try:
            made = service.create(parent, body)
            break
        except failures.UnavailableError as error:
            in_doubt = in_doubt or error.maybe_done
            say(f"no job yet: {failures.words(error)}; trying for {seconds:.0f} s")
            found = _found_after(service, parent, submission, deadline, pause, error, in_doubt)
            if found is not None:
                say("the job was created all the same")
                return found
            if time.monotonic() > deadline:
                raise _gave_up(parent, submission, error, in_doubt) from error
            pause = min(2 * pause, _LONGEST_PAUSE)
    return _only(service, parent, submission, made, say) if in_doubt else made


def _found_after(
    service: client.JobService,
    parent: str,
    submission: str,
    deadline: float,
    pause: float,
    error: failures.UnavailableError,
    in_doubt: bool,
) -> JobStatus | None:
    """Waits, then looks for the job; returns None once it is known not to be there."""
    while True:
        time.sleep(pause * random.uniform(0.8, 1.2))
        if not in_doubt:
            return None
        try:
            found = service.find(parent, SUBMISSION_LABEL, submission)
        except failures.UnavailableError:
            if time.monotonic() > deadline:
                raise _gave_up(parent, submission, error, in_doubt) from error
            pause = min(2 * pause, _LONGEST_PAUSE)
        except ConfigError as refused:
            raise _gave_up(parent, submission, error, in_doubt) from refused
        else:
            return found[0] if found else None


def _only(
    service: client.JobService,
    parent: str,
    submission: str,
    made: JobStatus,
    say: Callable[[str], None],
) -> JobStatus:
    """Cancels all but the first job of a submission: an earlier request may have come late."""
    try:
        first, *others = service.find(parent, SUBMISSION_LABEL, submission) or [made]
        for other in others:
            say(f"created twice: {other.name} is cancelled, {first.name} stays")
            service.cancel(other.name)
    except (failures.ServiceError, ConfigError) as error:
        say(
            f"warning: jobs with the label {SUBMISSION_LABEL}={submission} could not be counted "
            f"({failures.words(error)}): look that there is one"
        )
        return made
    return first


def _gave_up(
    parent: str, submission: str, error: failures.UnavailableError, in_doubt: bool
) -> failures.UnavailableError:
    if not in_doubt:
        return error
    return failures.UnavailableError(
        "an answer to the request to create a job",
        error.received,
        "look whether it is there before you submit again: " + _lookup(parent, submission),
    )


def _lookup(parent: str, submission: str) -> str:
    _, project, _, region = parent.split("/")
    return (
        f"gcloud ai custom-jobs list --project={project} --region={region} "
        f"--filter=labels.{SUBMISSION_LABEL}={submission}"
    )


def _upload(
    spec: JobSpec,
    directory: str,
    access: client.Access,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> JobSpec:
    built = package.build(directory, spec.module)
    uri = _address(spec, built)
    storage = staging.Storage(spec.project, access.credentials, environ)
    written = storage.upload(built.data, uri)
    say(f"{'uploaded' if written else 'found'} {uri} ({len(built.data) / 1024:.0f} KiB)")
    return dataclasses.replace(spec, package_uri=uri)


def _address(spec: JobSpec, built: package.Package) -> str:
    if not spec.staging_bucket:
        raise ConfigError(
            "vertex.staging_bucket, to upload the code to",
            "none",
            "set it to gs://BUCKET, or vertex.package_uri to what is uploaded already",
        )
    staging.parts(spec.staging_bucket)
    return f"{spec.staging_bucket.strip().rstrip('/')}/tfdist/{built.name}"


def _log(text: str) -> None:
    from absl import logging

    logging.info("%s", text)
