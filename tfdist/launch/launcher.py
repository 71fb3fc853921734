"""Runs a whole cluster on this machine: one process per task, with ports, output and restarts.

    launch(LaunchSpec(command=Command("train.py"), workers=2))

What it takes care of, and where:

| | |
|---|---|
| free ports, held while the job lives | `ports` |
| the environment of each task | `environment` |
| lines under the task's name, logs | `output` |
| who failed first, who is stopped when | `supervisor` |
| what the failure of a task means | `policy` |
| whether and how soon to start again | `restarts` |
| what launcher and tasks tell each other | `notice` |
| nothing of the job outlives it, even if this process is killed | `guard`, `bootstrap` |

A job of several tasks gets prefixed lines and an empty standard input. A job of one task is shown
as it is, without a prefix, and reads the launcher's standard input, like `python script.py`.
Linux only.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from collections.abc import Mapping
from io import FileIO

from tfdist.cluster.notice import PROGRESS
from tfdist.cluster.notice import SILENT_TASKS
from tfdist.cluster.notice import TRAINING_ENDED
from tfdist.cluster.notice import Notices
from tfdist.cluster.notice import Preempted
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import DATA
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import Task
from tfdist.errors import EXIT_USAGE
from tfdist.errors import ConfigError
from tfdist.errors import TfdistError
from tfdist.launch import guard
from tfdist.launch import ports
from tfdist.launch.environment import Incarnation
from tfdist.launch.environment import child_environment
from tfdist.launch.output import Pump
from tfdist.launch.output import TaskOutput
from tfdist.launch.policy import Policy
from tfdist.launch.processes import TaskProcess
from tfdist.launch.processes import bootstrap_command
from tfdist.launch.registry import Registry
from tfdist.launch.registry import guarded
from tfdist.launch.restarts import Restarts
from tfdist.launch.signals import Inbox
from tfdist.launch.signals import inbox
from tfdist.launch.spec import Command
from tfdist.launch.spec import LaunchSpec
from tfdist.launch.supervisor import Outcome
from tfdist.launch.supervisor import Supervisor

#: For pipes that somebody outside the job holds open.
_DRAIN_SECONDS = 2.0


def launch(spec: LaunchSpec, environ: Mapping[str, str] | None = None) -> int:
    """Runs the job to its end, restarts included.

    Args:
        spec: What to run.
        environ: Environment that the tasks inherit from; this process's by default.

    Returns:
        The exit code: 0, that of the task that failed first, or 128 + n for signal n.

    Raises:
        ConfigError: The command does not exist or the log directory cannot be written. Nothing
            has been started.
        TfdistError: The machine has no room for the processes.
    """
    spec.command.check()
    _open_standard_streams()
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(_logs(spec))
        try:
            held = stack.enter_context(ports.reserve(len(spec.tasks)))
            received = stack.enter_context(inbox())
            registry = stack.enter_context(guarded())
        except OSError as error:
            raise TfdistError("room for one more job on this machine", str(error)) from error
        addresses = dict(zip(spec.tasks, held.addresses, strict=True))
        pump = Pump(on_broken_console=lambda: received.put(signal.SIGPIPE))
        stack.callback(pump.close)
        job = _Job(spec, os.environ if environ is None else environ, addresses, logs)
        return job.run(pump, received, registry)


class _Job:
    def __init__(
        self,
        spec: LaunchSpec,
        environ: Mapping[str, str],
        addresses: Mapping[Task, str],
        logs: Mapping[Task, FileIO],
    ):
        self._spec = spec
        self._environ = environ
        self._addresses = addresses
        self._logs = logs
        self._policy = Policy(spec.tasks, spec.max_restarts)
        self._restarts = Restarts(spec.backoff, spec.max_backoff)
        self._starts: collections.Counter[Task] = collections.Counter()
        self._preempted: Preempted | None = None

    def run(self, pump: Pump, received: Inbox, registry: Registry) -> int:
        while True:
            outcome = self._run_once(pump, received, registry)
            if outcome.failed is None or outcome.signal is not None:
                break
            number = None
            if not self._restarts.is_stalled:
                number = self._policy.start_again(outcome.failed.task, outcome.code)
            if number is None:
                break
            why = f" after {outcome.failed.task} failed with {outcome.failed.exit}"
            if self._preempted is not None:
                why = f": {self._preempted}"
            _say(pump, f"restart {number} of {self._spec.max_restarts}{why}")
            if self._restarts.seconds > self._spec.backoff:
                _say(pump, f"starting in {self._restarts.seconds:g} s")
            resume_at = time.monotonic() + self._restarts.seconds
            while (left := resume_at - time.monotonic()) > 0:
                received.wait(left)
                if (stop := received.take()) is not None:
                    return 128 + stop
        self._summarise(outcome, pump)
        while not pump.wait(0.1) and outcome.signal is None and received.take() is None:
            pass  # a console that is slow to read gets all of it, unless the user loses patience
        return outcome.code

    def _run_once(self, pump: Pump, received: Inbox, registry: Registry) -> Outcome:
        """Starts all tasks and returns when nothing of them is left."""
        job_id = secrets.token_hex(8)
        registry.add_mark(f"TFDIST_JOB_ID={job_id}")
        processes: list[TaskProcess] = []
        outcome: Outcome | None = None
        with contextlib.ExitStack() as stack:
            notices = stack.enter_context(Notices())

            def start(task: Task) -> TaskProcess:
                processes.append(self._start(task, job_id, notices, pump))
                registry.add_session(processes[-1].pid)
                return processes[-1]

            def say(text: str) -> None:
                _say(pump, text)

            try:
                for task in self._spec.tasks:
                    start(task)
                supervisor = Supervisor(
                    processes, self._policy, start, notices, received, self._spec.grace, say
                )
                outcome = supervisor.run()
            finally:
                killed = outcome is not None and outcome.code == 128 + signal.SIGKILL
                self._restarts.note_end(notices.committed(), was_killed=killed)
                self._preempted = notices.preempted()
                # Also what the tasks have started and left behind.
                guard.sweep([f"TFDIST_JOB_ID={job_id}"], [process.pid for process in processes])
                for process in processes:
                    process.reap()
                _drain(pump, received, hurry=outcome is None or outcome.signal is not None)
        return outcome

    def _start(self, task: Task, job_id: str, notices: Notices, pump: Pump) -> TaskProcess:
        alone = len(self._spec.tasks) == 1
        incarnation = Incarnation(self._starts[task], job_id, self._addresses)
        self._starts[task] += 1
        position = self._spec.tasks.index(task)
        output = TaskOutput(task, position, labelled=not alone, log=self._logs.get(task))
        output.begin(incarnation.number)
        environ = child_environment(self._environ, incarnation, task, self._spec.rendezvous_timeout)
        if task.type == EVALUATOR:
            environ[TRAINING_ENDED] = notices.training_ended
        else:
            environ[PROGRESS] = notices.progress
        if task.type == CHIEF:
            environ[SILENT_TASKS] = notices.silent_tasks
        command = self._spec.command
        if task.type == DATA:
            host, _, port = self._addresses[task].rpartition(":")
            command = Command(
                "tfdist.data.server", ("--host", host, "--port", port), is_module=True
            )
        try:
            process = TaskProcess(task, bootstrap_command(command), environ, output, stdin=alone)
        except OSError as error:
            raise TfdistError(f"room for the process of {task}", str(error)) from error
        pump.add(output, *process.detach_pipes())
        where = "" if task.type == EVALUATOR else f" at {incarnation.addresses[task]}"
        _say(pump, f"{task} is process {process.pid}{where}")
        return process

    def _summarise(self, outcome: Outcome, pump: Pump) -> None:
        failed = outcome.failed
        if failed is not None and self._preempted is None:
            self._show_end(failed, pump)
        reason = self._reason(outcome)
        if reason:
            _say(pump, f"stopped: {reason}")

    def _show_end(self, failed: TaskProcess, pump: Pump) -> None:
        log = f" (all of them: {_log_path(self._spec, failed.task)})" if self._logs else ""
        if not failed.output.labelled:
            return  # its last lines are the last on the screen
        tail = failed.output.tail
        if not tail:
            _say(pump, f"{failed.task} failed first with {failed.exit}; it printed nothing")
            return
        _say(pump, f"{failed.task} failed first with {failed.exit}; its last lines{log}:")
        for line in tail:
            pump.say(f"  | {line}")

    def _reason(self, outcome: Outcome) -> str:
        """Returns why there is no further start, where that needs to be said."""
        most = self._spec.max_restarts
        newest = f"; newest commit: {self._restarts.newest}" if self._restarts.newest else ""
        if self._preempted is not None and outcome.code:
            used = f"; all {most} restarts are used" if most and outcome.signal is None else ""
            return f"{self._preempted}{used}. The same command goes on from there"
        if outcome.failed is None or outcome.signal is not None or not most:
            return ""
        if outcome.code == EXIT_USAGE:
            return f"exit code {EXIT_USAGE} says that the same would happen again"
        if self._restarts.is_stalled:
            return f"no progress in {self._restarts.stalled} starts{newest}"
        if outcome.failed.task.type == EVALUATOR:
            return ""
        return f"all {most} restarts are used{newest}"


def _say(pump: Pump, text: str) -> None:
    pump.say(f"tfdist run: {text}")


def _drain(pump: Pump, received: Inbox, hurry: bool) -> None:
    """Waits until the output of ended tasks is shown.

    A console that does not read is waited for, unless a signal has said to stop (`hurry`).
    """
    seen, since, abandoned = pump.received, time.monotonic(), False
    while not pump.wait(0.05):
        if pump.received != seen or (pump.writing and not hurry):
            seen, since = pump.received, time.monotonic()
        if time.monotonic() - since > _DRAIN_SECONDS:
            if abandoned:
                return
            pump.abandon()
            since, abandoned = time.monotonic(), True
        if pump.writing and received.take() is not None:
            return


@contextlib.contextmanager
def _logs(spec: LaunchSpec) -> Iterator[dict[Task, FileIO]]:
    """Opens the log of every task for appending."""
    with contextlib.ExitStack() as stack:
        logs: dict[Task, FileIO] = {}
        if spec.log_dir is not None:
            try:
                os.makedirs(spec.log_dir, exist_ok=True)
                for task in spec.tasks:
                    logs[task] = stack.enter_context(open(_log_path(spec, task), "ab", buffering=0))
            except OSError as error:
                raise ConfigError(
                    "--log-dir to be a directory that can be written",
                    f"{spec.log_dir!r} ({error.strerror})",
                    "name another directory, or correct its permissions",
                ) from error
        yield logs


def _log_path(spec: LaunchSpec, task: Task) -> str:
    return os.path.join(spec.log_dir or "", f"{task.type}-{task.index}.log")


def _open_standard_streams() -> None:
    # A daemon may start us with 0, 1 or 2 closed: the next pipe would get that number.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None where it was closed
            stream.flush()
