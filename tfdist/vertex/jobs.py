"""A custom job that is there: its name, and what the service says about it."""

from __future__ import annotations

import dataclasses
import os
import re
import urllib.parse
from collections.abc import Mapping

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.errors import ConfigError
from tfdist.vertex.spec import REDUCTION_SERVER

_RESOURCE = re.compile(r"projects/([^/\s]+)/locations/([^/\s]+)/customJobs/([^/\s]+)")
_CONSOLE = re.compile(
    r"https://console\.cloud\.google\.com/.*/locations/([^/?]+)/training/([^/?]+)"
)
#: As Google writes them. Host names are made from it, to which tokens are sent.
_REGION = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # Google's are numbers.
_REPLICA = re.compile(r"workerpool([0-3])-([0-9]+)")


@dataclasses.dataclass(frozen=True)
class JobName:
    """Where a job is.

    Attributes:
        project: Id or number of the project.
        region: For example "us-central1".
        id: The job's number.
    """

    project: str
    region: str
    id: str

    def __str__(self) -> str:
        return f"projects/{self.project}/locations/{self.region}/customJobs/{self.id}"

    @property
    def console_url(self) -> str:
        """Address of the job's page in Google's console."""
        return (
            f"https://console.cloud.google.com/agent-platform/locations/{self.region}"
            f"/training/{self.id}?project={self.project}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the service says about a job. Times are seconds since 1970, None until they are known.

    Attributes:
        name: Resource name.
        display_name: The name people gave it.
        state: The service's state without its prefix, for example "RUNNING".
        create_time: When it was created.
        start_time: When it first ran.
        end_time: When it ended.
        error: Why it failed, in the service's words, or "".
        labels: Its labels.
        has_reduction_server: Whether the third pool adds up gradients; else it holds parameter
            servers.
    """

    name: str
    display_name: str = ""
    state: str = "UNSPECIFIED"
    create_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    error: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_reduction_server: bool = False


def parse_job(
    text: str,
    project: str | None = None,
    region: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> JobName:
    """Reads which job is meant.

    Args:
        text: The resource name, the address of the job's page in the console, or the id alone.
        project: Project of an id; by default `GOOGLE_CLOUD_PROJECT`.
        region: Region of an id; by default `GOOGLE_CLOUD_REGION`.
        environ: Where those are looked up; by default the process's.

    Raises:
        ConfigError: It names no job, or an id comes without its project and region.
    """
    environ = os.environ if environ is None else environ
    text = text.strip()
    if match := _RESOURCE.fullmatch(text):
        name = JobName(*match.groups())
    elif match := _CONSOLE.match(text):
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(text).query)
        name = JobName((query.get("project") or [project or ""])[0], *match.groups())
    else:
        name = JobName(
            project or environ.get("GOOGLE_CLOUD_PROJECT", ""),
            region or environ.get("GOOGLE_CLOUD_REGION", ""),
            text,
        )
    if not _ID.fullmatch(name.id):
        raise ConfigError(
            "a job: projects/P/locations/R/customJobs/ID, or its id",
            repr(text),
            "copy the name that tfdist vertex submit printed",
        )
    for what, value in (("project", name.project), ("region", name.region)):
        if not value:
            raise ConfigError(
                f"the {what} of job {name.id}",
                "none",
                f"give --{what}, a --config that names it, or the job's full resource name",
            )
    check_region(name.region)
    return name


def check_region(region: str) -> None:
    """Refuses what cannot be a region.

    Raises:
        ConfigError: It is no region's name.
    """
    if not _REGION.fullmatch(region):
        raise ConfigError("a region such as us-central1", repr(region), "correct the region")


def task_of(replica: str, has_reduction_server: bool = False) -> str:
    """Returns role and index of a replica: "worker 0" for "workerpool1-0"; others stay.

    Args:
        replica: Its name in the service's logs.
        has_reduction_server: As in `JobStatus`.
    """
    match = _REPLICA.fullmatch(replica)
    if match is None:
        return replica
    roles = (CHIEF, WORKER, REDUCTION_SERVER if has_reduction_server else PS, EVALUATOR)
    return f"{roles[int(match[1])]} {match[2]}"
