"""The job service through Google's own client, made when it is needed.

The generated `JobServiceClient` is used rather than `aiplatform.CustomJob`: it sends the body it
is given and nothing else, raises what the service answers, never waits, and needs no staging
bucket. Always over REST, so that what the tests exercise is what runs.

Where the service is: the `endpoint` argument, `TFDIST_VERTEX_ENDPOINT`, what the program gave to
`aiplatform.init(api_endpoint=...)`, or the region's own. An endpoint that begins with `http://`,
or is a port of this machine, is an emulator: it gets no credentials unless some are given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import logging
import os
import sys
import urllib.parse
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdist._version import __version__
from tfdist.cluster.environments import vertex_job
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.vertex import failures
from tfdist.vertex.jobs import JobName
from tfdist.vertex.jobs import JobStatus
from tfdist.vertex.jobs import check_region

ENDPOINT_VARIABLE = "TFDIST_VERTEX_ENDPOINT"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)

_STATE_PREFIX = "JOB_STATE_"
_FIND_JOB = "check id, project and region, or find it with: gcloud ai custom-jobs list --region="


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """How Google's services are reached.

    Attributes:
        endpoint: Scheme and host of the job service, or None for the region's own.
        credentials: Of google-auth.
    """

    endpoint: str | None
    credentials: Any

    @property
    def is_emulator(self) -> bool:
        """Whether the job service is not Google's."""
        return self.endpoint is not None and self.endpoint.startswith("http://")


def connect(
    endpoint: str | None = None,
    credentials: Any = None,
    environ: Mapping[str, str] | None = None,
) -> Access:
    """Finds endpoint and credentials.

    Args:
        endpoint: Address of the job service: `https://host`, `http://host:port` or `host:port`.
        credentials: Of google-auth; by default those of `aiplatform.init`, none for an emulator,
            or the application's default credentials.
        environ: Where `TFDIST_VERTEX_ENDPOINT` is looked up; by default the process's.

    Raises:
        UnsupportedError: google-cloud-aiplatform is not installed.
        ConfigError: The endpoint is no address, or there are no credentials.
    """
    require()
    environ = os.environ if environ is None else environ
    endpoint = endpoint or environ.get(ENDPOINT_VARIABLE) or initialized("api_endpoint")
    access = Access(
        endpoint=normalized(endpoint, ENDPOINT_VARIABLE) if endpoint else None,
        # Its public property would look for the default ones, which an emulator does not need.
        credentials=credentials or initialized("_credentials"),
    )
    if access.credentials is None:
        found = anonymous() if access.is_emulator else default_credentials()
        access = dataclasses.replace(access, credentials=found)
    return access


def initialized(name: str) -> Any:
    """Returns what the program gave to `aiplatform.init`, or None."""
    # Only a program that imported it can have called it; to import it takes seconds.
    initializer = sys.modules.get("google.cloud.aiplatform.initializer")
    return getattr(getattr(initializer, "global_config", None), name, None)


def require() -> None:
    """Refuses to go on without google-cloud-aiplatform.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import google.cloud.aiplatform_v1.services.job_service  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "the package google-cloud-aiplatform",
            f"an installation without it ({error})",
            "pip install 'tfdist[vertex]'",
        ) from error


def default_credentials() -> Any:
    """Returns the application's default credentials.

    Raises:
        AccessError: There are none.
    """
    import google.auth
    import google.auth.exceptions

    logger = logging.getLogger("google.auth")
    level = logger.level
    logger.setLevel(logging.ERROR)  # That it looked elsewhere first is no news.
    try:
        credentials, _ = google.auth.default(scopes=SCOPES)
    except google.auth.exceptions.GoogleAuthError as error:
        raise failures.translate(error, "for Google Cloud") from error
    finally:
        logger.setLevel(level)
    return credentials


def normalized(endpoint: str, name: str) -> str:
    """Returns scheme and host of an endpoint; without a scheme, this machine speaks plain HTTP.

    Args:
        endpoint: As the user wrote it.
        name: What to correct, for the error.

    Raises:
        ConfigError: It is no address.
    """
    text = endpoint.strip()
    try:
        if "://" not in text:
            scheme = "http" if _is_here(urllib.parse.urlsplit(f"//{text}").hostname) else "https"
            text = f"{scheme}://{text}"
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            "an endpoint such as http://127.0.0.1:8080", repr(endpoint), f"correct {name}"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _is_here(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def anonymous() -> Any:
    """Returns credentials that say nothing."""
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()


class JobService:
    """The custom jobs of one region. Each method is one request, never sent twice by itself.

    Args:
        region: Region of the jobs.
        access: How the service is reached.
        timeout: Seconds that one request may take.
    """

    def __init__(self, region: str, access: Access, *, timeout: float = 60.0):
        from google.api_core.client_options import ClientOptions
        from google.api_core.gapic_v1.client_info import ClientInfo
        from google.cloud.aiplatform_v1.services.job_service import JobServiceClient

        check_region(region)
        host = access.endpoint or f"{region}-aiplatform.googleapis.com"
        self.endpoint = host
        self._timeout = timeout
        with translated("to reach the job service"):
            self._client = JobServiceClient(
                credentials=access.credentials,
                transport="rest",
                client_options=ClientOptions(api_endpoint=host),
                client_info=ClientInfo(user_agent=f"tfdist/{__version__}"),
            )

    def create(self, parent: str, body: Mapping[str, Any]) -> JobStatus:
        """Creates a job.

        Args:
            parent: `projects/P/locations/R`.
            body: The job in the service's JSON.

        Raises:
            UnsupportedError: The installed client does not know a field or a value of the body.
            TfdistError: As `failures` says.
        """
        job = message(body)
        with translated("to create a job", for_machines=True):
            made = self._client.create_custom_job(
                parent=parent, custom_job=job, timeout=self._timeout
            )
        return _status(made)

    def get(self, name: JobName | str) -> JobStatus:
        """Returns what the service says about a job.

        Raises:
            NotThereError: No such job.
            TfdistError: As `failures` says.
        """
        with translated(f"to read {name}", role="roles/aiplatform.viewer", missing=_no_job(name)):
            return _status(self._client.get_custom_job(name=str(name), timeout=self._timeout))

    def find(self, parent: str, label: str, value: str) -> list[JobStatus]:
        """Returns the jobs with a label, oldest first.

        Raises:
            TfdistError: As `failures` says.
        """
        with translated("to list jobs", role="roles/aiplatform.viewer"):
            request = {"parent": parent, "filter": f'labels.{label}="{value}"'}
            found = [
                _status(job)
                for job in self._client.list_custom_jobs(request=request, timeout=self._timeout)
            ]
        found = [job for job in found if job.labels.get(label) == value]
        return sorted(found, key=lambda job: job.create_time or 0.0)

    def cancel(self, name: JobName | str) -> None:
        """Asks the service to stop a job; it is stopped when its state says so.

        Raises:
            TfdistError: As `failures` says.
        """
        with translated(f"to cancel {name}", missing=_no_job(name)):
            self._client.cancel_custom_job(name=str(name), timeout=self._timeout)


def message(body: Mapping[str, Any]) -> Any:
    """Returns a job in the service's JSON as the client's `CustomJob`.

    Raises:
        UnsupportedError: The installed client does not know a field or a value of it.
    """
    from google.cloud.aiplatform_v1.types import CustomJob
    from google.protobuf import json_format

    try:
        return CustomJob.from_json(json.dumps(body), ignore_unknown_fields=False)
    except json_format.ParseError as error:
        raise UnsupportedError(
            "a google-cloud-aiplatform that knows every field of the job",
            " ".join(str(error).split()),
            "pip install --upgrade 'tfdist[vertex]'",
        ) from error


@contextlib.contextmanager
def translated(
    doing: str,
    role: str = "roles/aiplatform.user",
    missing: tuple[str, str] = failures.MISSING,
    for_machines: bool = False,
) -> Iterator[None]:
    """Raises errors of the client libraries as ours; the arguments are `failures.translate`'s."""
    import google.auth.exceptions
    import requests
    from google.api_core import exceptions
    from google.protobuf import json_format

    try:
        yield
    except (
        exceptions.GoogleAPICallError,
        google.auth.exceptions.GoogleAuthError,
        json_format.ParseError,
        requests.RequestException,
        ConnectionError,
        AttributeError,
        KeyError,
    ) as error:
        raise failures.translate(
            error, doing, role=role, missing=missing, for_machines=for_machines
        ) from error


def _no_job(name: JobName | str) -> tuple[str, str]:
    region = name.region if isinstance(name, JobName) else str(name).split("/")[3]
    return f"job {name} to be there", f"{_FIND_JOB}{region}"


def _status(job: Any) -> JobStatus:
    name = getattr(job.state, "name", f"number {int(job.state)}")  # A later service knows more.
    return JobStatus(
        name=job.name,
        display_name=job.display_name,
        state=name.removeprefix(_STATE_PREFIX),
        create_time=_seconds(job.create_time),
        start_time=_seconds(job.start_time),
        end_time=_seconds(job.end_time),
        error=_error(job.error) if "error" in job else "",
        labels=dict(job.labels),
        has_reduction_server=bool(vertex_job.is_reduction_server(type(job).to_dict(job))),
    )


def _error(status: Any) -> str:
    return " ".join(status.message.split()) or (f"code {status.code}" if status.code else "")


def _seconds(time: Any) -> float | None:
    return time.timestamp() if time else None
