"""What the replicas of a job print, from Cloud Logging, in order and each line once.

    for line in LogReader(name, access).read():
        print(line)                     # [worker 0] Epoch 1/3

Entries are read through the REST API `entries:list` with google-auth's session, which comes with
google-cloud-aiplatform; no further package is needed. A second `read` brings what has come since.
Entries reach Cloud Logging in another order than they were written in, some of them seconds late,
so each `read` asks again for the last minute and leaves out what it has shown.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError
from tfdist.vertex import client
from tfdist.vertex import failures
from tfdist.vertex.jobs import JobName
from tfdist.vertex.jobs import task_of

ENDPOINT_VARIABLE = "TFDIST_LOGGING_ENDPOINT"

_ENDPOINT = "https://logging.googleapis.com"
_PAGE = 1000
_SECONDS = 20.0
#: How late an entry may come and still be shown.
_LATE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class LogLine:
    """One entry.

    Attributes:
        time: Seconds since 1970.
        task: Role and index, for example "worker 0", or "service" for the service itself.
        severity: For example "INFO"; what a program writes to its standard error is "ERROR".
        text: What was printed, perhaps several lines.
    """

    time: float
    task: str
    severity: str
    text: str

    def __str__(self) -> str:
        return "\n".join(f"[{self.task}] {line}" for line in self.text.splitlines() or [""])


class LogReader:
    """The log of one job.

    Args:
        name: The job.
        access: How Google's services are reached.
        endpoint: Address of Cloud Logging; by default `TFDIST_LOGGING_ENDPOINT`, or Google's.
        has_reduction_server: As in `JobStatus`.
        environ: Where the variable is looked up; by default the process's.

    Raises:
        ConfigError: The job service is an emulator, and none of Cloud Logging is named.

    Attributes:
        has_reduction_server: May be set once the job is known.
    """

    def __init__(
        self,
        name: JobName,
        access: client.Access,
        *,
        endpoint: str | None = None,
        has_reduction_server: bool = False,
        environ: Mapping[str, str] | None = None,
    ):
        from google.auth.transport.requests import AuthorizedSession

        given = logging_endpoint(endpoint, environ)
        if given is None and access.is_emulator:
            raise ConfigError(
                f"{ENDPOINT_VARIABLE}, to read the log of a job of {access.endpoint}",
                "none",
                "set it, or do without the log",
            )
        self._url = f"{given or _ENDPOINT}/v2/entries:list"
        self._name = name
        self.has_reduction_server = has_reduction_server
        plain = self._url.startswith("http://")  # No place for a token.
        self._session = AuthorizedSession(client.anonymous() if plain else access.credentials)
        self._seen: dict[str, int] = {}  # Key of an entry to its time.
        self._latest = 0

    def read(self) -> Iterator[LogLine]:
        """Yields what has come since the last `read`, oldest first.

        Raises:
            TfdistError: As `failures` says; what was yielded is not yielded again.
        """
        since = _earlier(self._latest, _LATE_SECONDS) if self._latest else ""
        for page in self._pages(since):
            new = {_key(entry): entry for entry in page if _key(entry) not in self._seen}
            for key, entry in sorted(new.items(), key=lambda item: _order(item[1])):
                self._seen[key] = _nanoseconds(entry.get("timestamp"))
                self._latest = max(self._latest, self._seen[key])
                yield self._line(entry)
            oldest = self._latest - int(2e9 * _LATE_SECONDS)
            self._seen = {key: moment for key, moment in self._seen.items() if moment >= oldest}

    def _pages(self, since: str) -> Iterator[list[dict[str, Any]]]:
        wanted = f'resource.type="ml_job" AND resource.labels.job_id="{self._name.id}"'
        if since:
            wanted += f' AND timestamp>="{since}"'
        body: dict[str, Any] = {
            "resourceNames": [f"projects/{self._name.project}"],
            "filter": wanted,
            "orderBy": "timestamp asc",
            "pageSize": _PAGE,
        }
        while True:
            answer = self._post(body)
            yield answer.get("entries", [])
            if not answer.get("nextPageToken"):
                return
            body["pageToken"] = answer["nextPageToken"]

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        doing = f"to read the log of job {self._name.id}"
        with client.translated(doing, "roles/logging.viewer"):
            answer = self._session.post(self._url, json=body, timeout=_SECONDS)
            content = _json(answer) if answer.status_code < 400 else {}
        if answer.status_code >= 400:
            error = _json(answer).get("error", {})
            raise failures.from_status(
                answer.status_code,
                str(error.get("message", answer.reason)),
                doing,
                role="roles/logging.viewer",
            )
        return content

    def _line(self, entry: Mapping[str, Any]) -> LogLine:
        payload = entry.get("jsonPayload", {})
        text = payload.get("message") or entry.get("textPayload") or ""
        labels = entry.get("resource", {}).get("labels", {})
        replica = labels.get("task_name") or payload.get("attrs", {}).get("tag")
        replica = replica or str(entry.get("logName", "")).rsplit("/", 1)[-1]
        return LogLine(
            time=_nanoseconds(entry.get("timestamp")) / 1e9,
            task=task_of(str(replica), self.has_reduction_server),
            severity=str(entry.get("severity", "DEFAULT")),
            text=str(text).rstrip("\n"),
        )


def read_all(
    reader: LogReader, say: Callable[[str], None], *, outage: float = 180.0, pause: float = 5.0
) -> Iterator[LogLine]:
    """Yields what is there now, through overload and broken connections.

    Args:
        reader: The job's log.
        say: Told about them.
        outage: Seconds without a line after which it gives up.
        pause: Seconds before it asks again.

    Raises:
        TfdistError: As `failures` says.
    """
    since = time.monotonic()
    while True:
        try:
            for entry in reader.read():
                since = time.monotonic()
                yield entry
            return
        except failures.ServiceError as error:
            if time.monotonic() - since > outage:
                raise
            say(f"no log for now: {failures.words(error)}; trying again")
        time.sleep(pause)


def logging_endpoint(
    endpoint: str | None = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """Returns scheme and host of Cloud Logging where it is not Google's.

    Args:
        endpoint: As the user wrote it, or None for `TFDIST_LOGGING_ENDPOINT`.
        environ: Where that is looked up; by default the process's.
    """
    environ = os.environ if environ is None else environ
    given = endpoint or environ.get(ENDPOINT_VARIABLE)
    return client.normalized(given, ENDPOINT_VARIABLE) if given else None


def _json(answer: Any) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _key(entry: Mapping[str, Any]) -> str:
    return f"{entry.get('logName')} {entry.get('timestamp')} {entry.get('insertId')}"


def _order(entry: Mapping[str, Any]) -> tuple[int, str]:
    return _nanoseconds(entry.get("timestamp")), str(entry.get("insertId", ""))


def _nanoseconds(timestamp: str | None) -> int:
    """Reads RFC 3339, with up to nine digits after the point."""
    if not timestamp:
        return 0
    whole, _, fraction = timestamp.rstrip("Z").partition(".")
    read = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.timezone.utc)
    return int(read.timestamp()) * 10**9 + int(f"{fraction:0<9.9}")


def _earlier(moment: int, seconds: float) -> str:
    utc = datetime.datetime.fromtimestamp(moment / 1e9 - seconds, datetime.timezone.utc)
    return utc.isoformat(timespec="microseconds").replace("+00:00", "Z")
