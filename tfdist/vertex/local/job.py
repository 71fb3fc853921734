"""Runs a custom job on this machine as the service would: replicas, variables, rules of life.

    job = LocalJob(custom_job, directory="runs/local")
    job.start()
    if job.wait() is not JobState.SUCCEEDED:
        print(job.error)

Each job has a thread of its own, so that several may run in one process. In `directory` are
`logs/workerpool0-0.log` with the lines of each replica as they came, `logs/entries.jsonl` with the
log entries that the service would make of them, `gcs/BUCKET` in place of buckets, and at the end
`job.json`, the job as a Get call shows it. When this process dies, even by SIGKILL, nothing of the
job outlives it. Linux only.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any
from typing import Literal

from tfdist.errors import ConfigError
from tfdist.errors import TfdistError
from tfdist.launch import ports
from tfdist.launch.environment import bypass_proxies
from tfdist.launch.registry import guarded
from tfdist.vertex.local import rules as rules_module
from tfdist.vertex.local.bucket import CloudStorage
from tfdist.vertex.local.bucket import check_installed
from tfdist.vertex.local.custom_job import read_job
from tfdist.vertex.local.lines import Reader
from tfdist.vertex.local.replicas import ReplicaProcess
from tfdist.vertex.local.replicas import Replicas
from tfdist.vertex.local.rules import ErrorStatus
from tfdist.vertex.local.rules import JobState
from tfdist.vertex.local.rules import Lives
from tfdist.vertex.local.rules import Reaction
from tfdist.vertex.local.rules import Rules
from tfdist.vertex.local.runner import Host
from tfdist.vertex.local.runner import Runner
from tfdist.vertex.local.variables import Identity

Buckets = Literal["local", "emulator", "real"]

#: From SIGTERM to SIGKILL of replicas that are stopped.
GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_PROJECT_NUMBER = "123456789012"
_REGION = "us-central1"
_PARENT = re.compile(r"projects/([^/]+)/locations/([^/]+)")
_BUCKET = re.compile(r"gs://([a-z0-9][a-z0-9._-]*)")


class LocalJob:
    """A custom job on this machine.

    Args:
        custom_job: What a Create call carries, as a dict of JSON; its spec alone will do.
        directory: Receives logs, and what is written below the base output directory.
        environ: The environment that replicas inherit from, without what describes other
            clusters; this process's by default.
        parent: `projects/P/locations/R`, for the region and the number of the project; by default
            that in the job's name.
        runner: Where programs run; with this Python, from this directory, by default.
        buckets: What `gs://` in the job's base output directory stands for: "local" directories in
            `directory`, an "emulator" of Cloud Storage that runs with the job and holds all
            buckets that the job names, or "real" buckets.
        bucket_directory: With the emulator: a directory with one folder for each bucket, read
            before the job starts and written when it has ended. `directory/gcs` by default.
        rules: How often what is started again; the service's for this job by default.
        grace: Seconds that replicas have to end when they are stopped.
        say: Called with each piece of news of the job, from its threads.
        show: Called with each line of replicas, from one thread; `say` by default.

    Attributes:
        name: Resource name.
        job: What was received.

    Raises:
        ConfigError: The service would refuse the job, or the directory cannot be written.
    """

    def __init__(
        self,
        custom_job: Mapping[str, Any],
        *,
        directory: str | os.PathLike[str],
        environ: Mapping[str, str] | None = None,
        parent: str = "",
        runner: Runner | None = None,
        buckets: Buckets = "local",
        bucket_directory: str | os.PathLike[str] | None = None,
        rules: Rules | None = None,
        grace: float = GRACE_SECONDS,
        say: Callable[[str], None] = print,
        show: Callable[[str], None] | None = None,
    ):
        self.job = read_job(custom_job)
        self._custom_job = dict(custom_job)
        self._directory = Path(directory).absolute()
        self._environ = dict(os.environ if environ is None else environ)
        self._runner = Host() if runner is None else runner
        self._buckets = buckets
        self._bucket_directory = Path(bucket_directory or self._directory / "gcs").absolute()
        self._rules = Rules.of(self.job) if rules is None else rules
        self._grace = grace
        self._say = say
        self._show = say if show is None else show
        self._identity = self._identify(parent)
        parent = parent or self.job.name.partition("/customJobs/")[0]
        parent = parent or f"projects/{self._identity.project_number}/locations/{_REGION}"
        self.name = f"{parent}/customJobs/{self._identity.job_id}"
        self._lock = threading.RLock()
        self._state = JobState.QUEUED
        self._error: ErrorStatus | None = None
        self._times: dict[str, str] = {"createTime": _now()}
        self._replicas: Replicas | None = None
        self._cancelled = threading.Event()
        self._hurry = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> JobState:
        """Where the job is in its life."""
        with self._lock:
            return self._state

    @property
    def error(self) -> ErrorStatus | None:
        """Why it ended otherwise than it should have; None before that and after success."""
        with self._lock:
            return self._error

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the replicas that run, by the service's names ("workerpool1-0")."""
        replicas = self._replicas
        return {} if replicas is None else replicas.pids

    @property
    def log(self) -> Path:
        """File of log entries, one JSON object a line."""
        return self._directory / "logs" / "entries.jsonl"

    def resource(self) -> dict[str, Any]:
        """Returns the job as a Get call shows it: name, state, times, error."""
        with self._lock:
            found = {**self._custom_job, "name": self.name, "state": self._state.value}
            found.update(self._times)
            if self._error is not None:
                found["error"] = {"code": self._error.code, "message": self._error.message}
        return found

    def start(self) -> None:
        """Starts the job; returns at once.

        Raises:
            ConfigError: The directory cannot be written, or a program is not on this machine.
        """
        if self._thread is not None or self._ended.is_set():
            raise ConfigError("a job that has not been started", self.name, "make another one")
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "a directory that can be written",
                f"{str(self._directory)!r} ({error.strerror})",
                "name another directory, or correct its permissions",
            ) from error
        if self._buckets == "emulator":
            check_installed()
        for replica in self.job.replicas:
            if replica.runs_here:
                self._runner.launch(replica.program, self._runner.inherited(self._environ))
        self._thread = threading.Thread(target=self._run, name=f"tfdist-{self.name}", daemon=True)
        self._thread.start()

    def cancel(self, hurry: bool = False) -> None:
        """Stops all replicas; the job ends as cancelled. Returns at once.

        Args:
            hurry: Whether replicas are killed without time to end.
        """
        with self._lock:
            if hurry:
                self._hurry.set()
            if not self._state.is_final and not self._cancelled.is_set():
                self._cancelled.set()
                if self._thread is None:
                    self._finish(JobState.CANCELLED, None)
                else:
                    self._enter(JobState.CANCELLING)

    def wait(self, timeout: float | None = None) -> JobState:
        """Waits until the job has ended and nothing of it is left; returns its state.

        Args:
            timeout: Seconds after which to return in any case; None waits for ever.
        """
        self._ended.wait(timeout)
        return self.state

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                state, error = self._live(self._prepare(stack))
        except (TfdistError, OSError) as problem:
            state, error = JobState.FAILED, ErrorStatus(rules_module.INTERNAL, str(problem))
        except BaseException as problem:
            self._finish(JobState.FAILED, ErrorStatus(rules_module.INTERNAL, repr(problem)))
            raise
        self._finish(state, error)

    def _prepare(self, stack: contextlib.ExitStack) -> Replicas:
        """Gets ports, guard, logs and buckets, which live as long as the job."""
        job = self.job
        held = stack.enter_context(ports.reserve(len(job.replicas)))
        registry = stack.enter_context(guarded())
        environ = self._runner.inherited(self._environ)
        if self._buckets == "emulator":
            names = set(_BUCKET.findall(json.dumps(job.spec)))
            storage = CloudStorage(*sorted(names), scratch=self._directory, registry=registry)
            stack.enter_context(storage)
            storage.load(self._bucket_directory)
            stack.callback(storage.save, self._bucket_directory)
            environ.update(storage.environ)
            self._say(f"gs:// is an emulator; its buckets are in {self._bucket_directory} later")
        bypass_proxies(environ)
        logs = {
            replica: stack.enter_context(self._open_log(f"{replica.name}.log"))
            for replica in job.replicas
        }
        reader = Reader(
            self._show,
            stack.enter_context(self._open_log("entries.jsonl")),
            self._say,
            lambda: self.cancel(),
        )
        stack.callback(reader.close)
        replicas = Replicas(
            job,
            identity=self._identity,
            addresses=dict(zip(job.replicas, held.addresses, strict=True)),
            environ=environ,
            runner=self._runner,
            logs=logs,
            reader=reader,
            registry=registry,
            say=self._say,
        )
        stack.callback(replicas.stop, 0.0, self._hurry)
        self._replicas = replicas
        return replicas

    def _live(self, replicas: Replicas) -> tuple[JobState, ErrorStatus | None]:
        """Runs the job through all its lives; returns how it ends."""
        lives = Lives(self._rules)
        for replica in self.job.replicas:
            if not replica.runs_here:
                self._say(
                    f"{replica.name} is a Reduction Server of the vendor's image and is not "
                    "started here; gradients are added up without it"
                )
        if self._buckets == "local" and self._names_buckets():
            self._say(
                "gs:// in arguments and variables of the job is the real Cloud Storage; with "
                "--bucket-emulator it is an emulator"
            )
        self._enter(JobState.PENDING)
        replicas.start_all()
        self._enter(JobState.RUNNING)
        deadline = time.monotonic() + self.job.timeout
        while True:
            if self._cancelled.wait(_POLL_SECONDS):
                self._say("cancelled; stopping all replicas")
                replicas.stop(self._grace, self._hurry)
                error = ErrorStatus(rules_module.CANCELLED, "CANCELED")
                return JobState.CANCELLED, error
            if time.monotonic() > deadline:
                text = f"The job has run longer than its timeout of {self.job.timeout:g} s."
                self._say(f"{text[:-1]}; stopping all replicas")
                replicas.stop(self._grace, self._hurry)
                return JobState.EXPIRED, ErrorStatus(rules_module.DEADLINE_EXCEEDED, text)
            for process in replicas.ended():
                assert process.exit is not None
                replica = process.replica
                if process.exit.code == 0:
                    self._say(f"{replica} has ended with exit code 0")
                    if replica.pool == 0:
                        replicas.stop(self._grace, self._hurry)
                        return JobState.SUCCEEDED, None
                    continue
                reaction = lives.on_failure(replica)
                if reaction is Reaction.FAIL:
                    replicas.stop(self._grace, self._hurry)
                    return JobState.FAILED, self._failure(replicas, process)
                self._restart(replicas, process, reaction, lives)
                if reaction is not Reaction.RESTART_REPLICA:
                    break  # the others have been stopped, however they have ended

    def _names_buckets(self) -> bool:
        programs = [replica.program for replica in self.job.replicas]
        words = [word for program in programs for word in (*program.command, *program.args)]
        values = [value for program in programs for _, value in program.env]
        return any("gs://" in text for text in (*words, *values))

    def _restart(
        self, replicas: Replicas, process: ReplicaProcess, reaction: Reaction, lives: Lives
    ) -> None:
        replica, rules = process.replica, self._rules
        how = f"{replica} has ended with {process.exit}"
        if reaction is Reaction.RETRY_JOB:
            self._say(f"{how}; trying the job again, {lives.retries} of {rules.job_retries}")
            replicas.stop(self._grace, self._hurry)
            self._enter(JobState.PENDING)
            replicas.start_all()
            self._enter(JobState.RUNNING)
            return
        number = f"restart {lives.restarts(replica)} of {rules.replica_restarts}"
        if reaction is Reaction.RESTART_ALL:
            self._say(f"{how}; restarting all replicas, {number}")
            replicas.stop(self._grace, self._hurry)
            replicas.start_all()
        else:
            self._say(f"{how}; restarting it, {number}")
            replicas.restart(process)

    def _failure(self, replicas: Replicas, process: ReplicaProcess) -> ErrorStatus:
        assert process.exit is not None
        for line in process.output.tail:
            self._say(f"  | {line}")
        message = (
            f"The replica {process.replica.name} exited with a non-zero status of "
            f"{process.exit.code}. Termination reason: Error. To find out more about why your "
            f"job exited please check the logs: {self.log.parent}"
        )
        return ErrorStatus(rules_module.INVALID_ARGUMENT, message)

    def _enter(self, state: JobState) -> None:
        with self._lock:
            if self._state is JobState.CANCELLING and not state.is_final:
                return
            self._state = state
            self._times["updateTime"] = _now()
            if state is JobState.RUNNING:
                self._times.setdefault("startTime", self._times["updateTime"])
        self._say(f"{self.name.rpartition('/')[2]}: {state}")

    def _finish(self, state: JobState, error: ErrorStatus | None) -> None:
        with self._lock:
            self._error = error
            self._times["endTime"] = _now()
        self._enter(state)
        with contextlib.suppress(OSError):  # a full disk, or a job that was never started
            text = json.dumps(self.resource(), indent=2, ensure_ascii=False)
            (self._directory / "job.json").write_text(text + "\n", encoding="utf-8")
        self._ended.set()

    def _open_log(self, name: str) -> FileIO:
        return open(self.log.with_name(name), "ab", buffering=0)

    def _identify(self, parent: str) -> Identity:
        job = self.job
        place = _PARENT.match(parent or job.name)
        project, region = (place[1], place[2]) if place else ("", _REGION)
        number = project if project.isdecimal() else job.project_number or _PROJECT_NUMBER
        output = job.base_output_directory
        if self._buckets == "local" and output.startswith("gs://"):
            output = str(self._bucket_directory / output.removeprefix("gs://"))
        return Identity(
            job_id=job.name.partition("/customJobs/")[2] or str(secrets.randbelow(10**18) + 10**18),
            project_number=number,
            region=region,
            mark=secrets.token_hex(5),
            output=output,
        )


def _now() -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    return now.isoformat(timespec="microseconds").replace("+00:00", "Z")
