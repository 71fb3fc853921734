"""Submits a job: checks, uploads what it needs, and creates it exactly once.

job = tfdist.vertex.submit(spec)
job.name                                # projects/P/locations/R/customJobs/ID
tfdist.vertex.wait(job)
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError
from tfdist.vertex import client
from tfdist.vertex import package
from tfdist.vertex import staging
from tfdist.vertex.checks import check
from tfdist.vertex.checks.finding import Finding
from tfdist.vertex.checks.finding import JobError
from tfdist.vertex.create import SUBMISSION_LABEL
from tfdist.vertex.create import create_once
from tfdist.vertex.facts import facts
from tfdist.vertex.jobs import check_region
from tfdist.vertex.jobs import parse_job
from tfdist.vertex.render import body as rendered
from tfdist.vertex.spec import JobSpec


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
