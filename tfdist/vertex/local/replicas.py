"""The processes of a job's replicas: started, watched, stopped, started again."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from io import FileIO

from tfdist.errors import TfdistError
from tfdist.launch import guard
from tfdist.launch.output import TaskOutput
from tfdist.launch.processes import TaskProcess
from tfdist.launch.registry import Registry
from tfdist.vertex.local.custom_job import ReceivedJob
from tfdist.vertex.local.custom_job import Replica
from tfdist.vertex.local.lines import Reader
from tfdist.vertex.local.runner import Launch
from tfdist.vertex.local.runner import Runner
from tfdist.vertex.local.variables import Identity
from tfdist.vertex.local.variables import replica_environment
from tfdist.vertex.local.variables import service_variables

_STEP_SECONDS = 0.02
#: For pipes that somebody outside the job holds open.
_DRAIN_SECONDS = 2.0


class ReplicaProcess(TaskProcess):
    """The process of one life of a replica.

    Args:
        replica: Whose.
        launch: How it is started.
        output: Where its lines are kept.

    Attributes:
        replica: Whose.
    """

    def __init__(self, replica: Replica, launch: Launch, output: TaskOutput):
        super().__init__(
            *(replica.task, launch.words, launch.environ, output),
            stdin=False,
            directory=launch.directory,
        )
        self.replica = replica


class Replicas:
    """All replicas of a job. Used by one thread, except for `pids`.

    Args:
        job: The job.
        identity: Who it is.
        addresses: Address of every replica.
        environ: What environments of replicas are built upon.
        runner: Where programs run.
        logs: Unbuffered file for the lines of each replica.
        reader: Reads what they print.
        registry: Of the job's guard.
        say: Shows a line.
    """

    def __init__(
        self,
        job: ReceivedJob,
        *,
        identity: Identity,
        addresses: Mapping[Replica, str],
        environ: Mapping[str, str],
        runner: Runner,
        logs: Mapping[Replica, FileIO],
        reader: Reader,
        registry: Registry,
        say: Callable[[str], None],
    ):
        self._job = job
        self._identity = identity
        self._addresses = addresses
        self._environ = environ
        self._runner = runner
        self._logs = logs
        self._reader = reader
        self._registry = registry
        self._say = say
        self._lives = dict.fromkeys(job.replicas, 0)
        self._processes: dict[Replica, ReplicaProcess] = {}
        for replica in job.replicas:
            registry.add_mark(self._mark(replica))

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of those that run, by the service's names."""
        running = list(self._processes.values())
        return {each.replica.name: each.pid for each in running if each.exit is None}

    def start_all(self) -> None:
        """Starts every replica that runs here.

        Raises:
            TfdistError: The machine has no room for the processes.
        """
        for replica in self._job.replicas:
            if replica.runs_here:
                self._start(replica)

    def ended(self) -> list[ReplicaProcess]:
        """Returns the processes that have ended since the last call, the primary first."""
        return [process for process in self._processes.values() if process.poll()]

    def restart(self, process: ReplicaProcess) -> None:
        """Starts a replica that has ended again, after all that it has left behind is gone."""
        self._clear([process])
        self._start(process.replica)

    def stop(self, grace: float, hurry: threading.Event) -> None:
        """Stops all that runs: SIGTERM, then SIGKILL.

        Args:
            grace: Seconds between the two.
            hurry: Ends the wait when it is set.
        """
        processes = list(self._processes.values())
        running = [process for process in processes if not process.poll() and process.exit is None]
        for process in running:
            process.signal_main(signal.SIGTERM)  # as to the first process of a container
        until = time.monotonic() + grace
        while running and time.monotonic() < until and not hurry.is_set():
            time.sleep(_STEP_SECONDS)
            running = [process for process in running if not process.poll()]
        self._clear(processes)
        self._reader.drain(_DRAIN_SECONDS, hurry)
        self._processes.clear()

    def _start(self, replica: Replica) -> None:
        service = service_variables(self._job, self._identity, self._addresses, replica)
        environ = replica_environment(self._environ, service, replica)
        launch = self._runner.launch(replica.program, environ)
        output = TaskOutput(replica.task, replica.pool, labelled=True, log=self._logs[replica])
        output.begin(self._lives[replica])
        self._lives[replica] += 1
        try:
            process = ReplicaProcess(replica, launch, output)
        except OSError as error:
            raise TfdistError(f"room for the process of {replica}", str(error)) from error
        self._registry.add_session(process.pid)
        self._processes[replica] = process
        self._reader.add(replica, output, *process.detach_pipes())
        self._say(f"{replica} is process {process.pid} at {self._addresses[replica]}")

    def _clear(self, processes: list[ReplicaProcess]) -> None:
        """Kills the processes and what they have started."""
        for process in processes:
            process.signal_group(signal.SIGKILL)
        marks = [self._mark(process.replica) for process in processes]
        guard.sweep(marks, [process.pid for process in processes])
        for process in processes:
            with contextlib.suppress(ChildProcessError):
                process.poll()
            process.reap()

    def _mark(self, replica: Replica) -> str:
        return f"HOSTNAME={self._identity.host_name(replica)}"
