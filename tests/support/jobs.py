"""The job service on this machine, for the real client over REST.

    with FakeJobService() as service:
        tfdist.vertex.submit(spec, endpoint=service.endpoint)
        service.created[0]["displayName"]

It keeps what it receives, refuses what is not a `CustomJob`, and answers as Google's service does.
A job goes through the states of `script`, one step each time it is read; with `run` it is really
run by a `LocalJob`. Log entries in `service.entries`, and those of jobs that run, are served as
Cloud Logging serves them.
"""

from __future__ import annotations

import dataclasses
import datetime
import http.server
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJob
from google.protobuf import json_format

#: What a job does that goes well.
GOES_WELL = ("QUEUED", "PENDING", "RUNNING", "RUNNING", "SUCCEEDED")

_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
_JOBS = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+)/customJobs")
_JOB = re.compile(r"/v1/(projects/[^/]+/locations/[^/]+/customJobs/([^/:]+))(:cancel)?")
_LABEL = re.compile(r'labels\.([a-z_-]+)="?([^"]*)"?')
_NUMBER = "40556267596"


@dataclasses.dataclass
class Fault:
    """What goes wrong with requests of one kind.

    Attributes:
        method: "create", "get", "list", "cancel" or "logs".
        status: The HTTP status of the answer, 200 for an empty one, or None to break the
            connection without one.
        text: The service's words.
        times: How often.
        done: Whether the request is carried out all the same.
        reason: Code of the cause.
        raw: The whole answer, in place of one of Google's form.
    """

    method: str
    status: int | None = 503
    text: str = "The service is currently unavailable."
    times: int = 1
    done: bool = False
    reason: str = ""
    raw: str = ""


@dataclasses.dataclass
class Job:
    """A job of the service.

    Attributes:
        body: What was sent.
        states: What it still does, as a script.
    """

    name: str
    body: dict[str, Any]
    states: list[str | tuple[str, str]]
    running: Any = None
    state: str = "QUEUED"
    error: str = ""
    times: dict[str, float] = dataclasses.field(default_factory=dict)

    def step(self) -> None:
        """Goes on to its next state."""
        if self.running is not None:
            error = self.running.error
            self.go(self.running.state.value, "" if error is None else error.message)
        elif self.states:
            following = self.states.pop(0)
            self.go(*((following, "") if isinstance(following, str) else following))

    def go(self, state: str, error: str = "") -> None:
        self.state, self.error = state.removeprefix("JOB_STATE_"), error
        if self.state == "RUNNING":
            self.times.setdefault("startTime", time.time())
        if self.state in _ENDED:
            self.times.setdefault("endTime", time.time())

    def cancel(self) -> None:
        if self.running is not None:
            self.running.cancel()
        elif self.state not in _ENDED:
            self.states = ["CANCELLING", "CANCELLED"]

    def to_json(self) -> dict[str, Any]:
        if self.running is not None:
            return self.running.resource()
        answer = {**self.body, "name": self.name, "state": f"JOB_STATE_{self.state}"}
        answer |= {key: _rfc3339(moment) for key, moment in self.times.items()}
        if self.error:
            answer["error"] = {"code": 3, "message": self.error}
        return answer


class FakeJobService:
    """The service, from `with` on.

    Args:
        script: States of a job, one for each time it is read; a pair has an error message.
        run: Makes the `LocalJob` of a job and its parent.

    Attributes:
        endpoint: Its address.
        created: The jobs that it was sent, as JSON with names of enumerations.
        jobs: The jobs that are there, by resource name.
        requests: Kind of each request, in their order.
        faults: What goes wrong.
        entries: Log entries.
    """

    def __init__(
        self,
        script: Sequence[str | tuple[str, str]] = GOES_WELL,
        run: Callable[[Mapping[str, Any], str], Any] | None = None,
    ):
        self.script = list(script)
        self.run = run
        self.created: list[dict[str, Any]] = []
        self.jobs: dict[str, Job] = {}
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault] = []
        self.entries: list[dict[str, Any]] = []
        self.endpoint = ""
        self._lock = threading.Lock()

    def __enter__(self) -> FakeJobService:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs.values():
            if job.running is not None:
                job.running.cancel(hurry=True)
                job.running.wait(20)

    @property
    def job(self) -> Job:
        """The only job."""
        (job,) = self.jobs.values()
        return job

    def count(self, kind: str) -> int:
        return self.requests.count(kind)

    def add(self, script: Sequence[str | tuple[str, str]], project: str = "demo") -> str:
        """Puts a job there that nobody sent, and returns its name."""
        return self._add(f"projects/{project}/locations/us-central1", {}, script).name

    def _add(
        self, parent: str, body: dict[str, Any], script: Sequence[str | tuple[str, str]]
    ) -> Job:
        name = f"{parent}/customJobs/{7_000_000_000_000_000_000 + len(self.jobs)}"
        job = Job(name, body, list(script), times={"createTime": time.time()})
        if self.run is not None:
            job.running = self.run(body, parent)
            job.name = job.running.name
            job.running.start()
        self.jobs[job.name] = job
        return job

    def answer(
        self, method: str, path: str, query: Mapping[str, list[str]], body: bytes
    ) -> tuple[int | None, dict[str, Any] | str]:
        """Returns status and JSON of the answer to a request; no status breaks the connection."""
        kind = self._kind(method, path)
        with self._lock:
            self.requests.append(kind)
            fault = next((f for f in self.faults if f.method == kind and f.times > 0), None)
            if fault is not None:
                fault.times -= 1
                if fault.done:
                    self._carry_out(kind, path, query, body)
                error = _error(fault.status or 0, fault.text, fault.reason)
                return fault.status, fault.raw or error
            return self._carry_out(kind, path, query, body)

    def _kind(self, method: str, path: str) -> str:
        if _JOBS.fullmatch(path):
            return {"POST": "create", "GET": "list"}.get(method, "unknown")
        if match := _JOB.fullmatch(path):
            return "cancel" if match[3] else "get"
        return "logs" if path == "/v2/entries:list" else "unknown"

    def _carry_out(
        self, kind: str, path: str, query: Mapping[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, Any]]:
        if kind == "create":
            return self._create(path, body)
        if kind == "list":
            return self._list(query)
        if kind == "logs":
            return self._logs(json.loads(body))
        match = _JOB.fullmatch(path)
        if match is None:
            return 404, _error(404, f"no method {path}")
        job = self.jobs.get(match[1])
        if job is None:
            return 404, _error(404, f"The CustomJob does not exist: {match[1]}")
        if kind == "cancel":
            job.cancel()
            return 200, {}
        job.step()
        return 200, job.to_json()

    def _create(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            job = CustomJob.from_json(body, ignore_unknown_fields=False)
        except json_format.ParseError as error:
            return 400, _error(400, f"Invalid JSON payload received. {error}")
        content = json.loads(
            CustomJob.to_json(
                job, use_integers_for_enums=False, always_print_fields_with_no_presence=False
            )
        )
        if not job.display_name or not job.job_spec.worker_pool_specs:
            return 400, _error(400, "List of found errors: 1.Field: display_name or job_spec")
        self.created.append(content)
        parent = _JOBS.fullmatch(path)[1]  # type: ignore[index]
        # As Google does, with the number of the project in place of its id.
        parent = re.sub("projects/[^/]+", f"projects/{_NUMBER}", parent)
        made = self._add(parent, content, self.script)
        return 200, {**made.to_json(), "state": "JOB_STATE_PENDING"}

    def _list(self, query: Mapping[str, list[str]]) -> tuple[int, dict[str, Any]]:
        wanted = _LABEL.fullmatch((query.get("filter") or [""])[0])
        jobs = [
            job.to_json()
            for job in self.jobs.values()
            if wanted is None or job.body.get("labels", {}).get(wanted[1]) == wanted[2]
        ]
        return 200, {"customJobs": jobs}

    def _logs(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        text = body["filter"]
        since = re.search(r'timestamp>="([^"]+)"', text)
        job = re.search(r'resource\.labels\.job_id="([^"]+)"', text)
        found = [
            entry
            for entry in self.entries + self._printed()
            if (since is None or entry["timestamp"] >= since[1])
            and (job is None or entry["resource"]["labels"]["job_id"] == job[1])
        ]
        found.sort(key=lambda entry: (entry["timestamp"], entry["insertId"]))
        begin, size = int(body.get("pageToken") or 0), int(body.get("pageSize") or 50)
        answer: dict[str, Any] = {"entries": found[begin : begin + size]}
        if begin + size < len(found):
            answer["nextPageToken"] = str(begin + size)
        return 200, answer

    def log(
        self, name: str, replica: str, text: str, moment: float, severity: str = "INFO"
    ) -> None:
        """Adds a log entry of a replica."""
        self.entries.append(
            _entry(name, replica, text, _rfc3339(moment), severity, f"id{len(self.entries):05}")
        )

    def _printed(self) -> list[dict[str, Any]]:
        """Returns what replicas of jobs that run have printed."""
        entries = []
        for job in self.jobs.values():
            if job.running is None or not job.running.log.exists():
                continue
            for number, text in enumerate(job.running.log.read_text().splitlines()):
                line = json.loads(text)
                told = (line["task"], line["message"], line["timestamp"], line["severity"])
                entries.append(_entry(job.name, *told, f"id{number:05}"))
        return entries

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def respond(self) -> None:
                parts = urllib.parse.urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                service.headers.append(dict(self.headers.items()))
                query = urllib.parse.parse_qs(parts.query)
                path = urllib.parse.unquote(parts.path)
                status, answer = service.answer(self.command, path, query, body)
                if status is None:
                    self.close_connection = True
                    return
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json; charset=UTF-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = respond

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _entry(
    name: str, replica: str, text: str, timestamp: str, severity: str, insert_id: str
) -> dict[str, Any]:
    labels = {"job_id": name.rsplit("/", 1)[1], "project_id": "demo", "task_name": replica}
    return {
        "insertId": insert_id,
        "timestamp": timestamp,
        "severity": severity,
        "logName": f"projects/demo/logs/{replica}",
        "resource": {"type": "ml_job", "labels": labels},
        "jsonPayload": {"message": text, "attrs": {"tag": replica}},
    }


def _error(status: int, text: str, reason: str = "") -> dict[str, Any]:
    if status == 200:
        return {}
    error: dict[str, Any] = {"code": status, "message": text}
    if reason:
        error["details"] = [
            {
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": reason,
                "domain": "googleapis.com",
            }
        ]
    return {"error": error}


def _rfc3339(moment: float) -> str:
    utc = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc)
    return utc.isoformat(timespec="microseconds").replace("+00:00", "Z")
