"""Watches the tasks of one start of the job until the last has ended, and decides who ends when.

- The first task that ends with anything but 0 has failed, and with it the job. The others get
  `grace` seconds to end by themselves, since they know best whom they miss; then SIGTERM; 5 s
  later SIGKILL, because a multi-worker TensorFlow process survives SIGTERM.
- When the tasks that train have ended with 0, those that serve them are stopped after a while, and
  that is no failure: servers (`ps`, and `worker` beside a `ps`) and the evaluator.
- A signal to the launcher goes to all tasks. Who is left after `grace` is killed; a second signal
  kills at once.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from collections.abc import Sequence

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.launch.processes import TaskProcess
from tfdist.launch.signals import Inbox

#: From SIGTERM to SIGKILL.
KILL_SECONDS = 5.0
#: For parameter servers to notice that chief and workers have ended.
PS_SECONDS = 10.0
#: For workers of a parameter-server cluster to notice that the chief has ended.
SERVER_SECONDS = 30.0
#: For the evaluator to score the last checkpoint.
EVALUATOR_SECONDS = 60.0

_POLL_SECONDS = 1.0
_SAME_REQUEST_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one start of the job ended.

    Attributes:
        failed: The task that failed first, or None.
        signal: The signal that stopped the launcher, or None.
    """

    failed: TaskProcess | None
    signal: int | None

    @property
    def code(self) -> int:
        """The exit code of the job. A task that failed before the signal came is the reason."""
        if self.failed is not None and self.failed.exit is not None:
            return self.failed.exit.code
        return 0 if self.signal is None else 128 + self.signal


class Supervisor:
    """Supervises running tasks.

    Args:
        processes: All tasks of the job, started.
        inbox: Signals of the launcher.
        grace: Seconds that tasks get to end by themselves after a failure or a signal.
        say: Shows a line.
    """

    def __init__(
        self,
        processes: Sequence[TaskProcess],
        inbox: Inbox,
        grace: float,
        say: Callable[[str], None],
    ):
        self._processes = processes
        self._inbox = inbox
        self._grace = grace
        self._say = say
        self._failed: TaskProcess | None = None
        self._signal: int | None = None
        self._signalled_at = 0.0

    def run(self) -> Outcome:
        """Returns when every task has ended."""
        while True:
            self._take_signals()
            self._notice_ends()
            if not self._running:
                return Outcome(self._failed, self._signal)
            wake_at = self._stop_overdue()
            self._inbox.wait(min(_POLL_SECONDS, wake_at - time.monotonic()))

    @property
    def _running(self) -> list[TaskProcess]:
        return [process for process in self._processes if process.exit is None]

    def _take_signals(self) -> None:
        while (number := self._inbox.take()) is not None:
            name = signal.Signals(number).name
            now = time.monotonic()
            if self._signal is not None:
                # timeout(1) and process managers signal the process and its group: one request.
                if number == self._signal and now - self._signalled_at < _SAME_REQUEST_SECONDS:
                    continue
                self._say(f"{name} again; killing all tasks")
                for process in self._running:
                    process.signal_group(signal.SIGKILL)
                continue
            self._signal, self._signalled_at = number, now
            limit = f"killed after {self._grace:g} s, or at a second signal"
            self._say(f"{name}; stopping all tasks ({limit})")
            for process in self._running:
                # A lost console or terminal is no reason that a task would know of.
                forwarded = number if number == signal.SIGINT else signal.SIGTERM
                process.signal_group(forwarded)
                process.stopped = True
                process.term_at = None
                process.kill_at = now + self._grace

    def _notice_ends(self) -> None:
        ended = [process for process in self._processes if process.poll()]
        for process in ended:
            if process.exit is None or process.exit.code == 0 or process.stopped:
                continue
            if self._failed is None:
                self._fail(process)
            else:
                self._say(f"{process.task} ended with {process.exit}")
        if ended and self._failed is None and self._signal is None:
            self._release_servers()

    def _fail(self, failed: TaskProcess) -> None:
        self._failed = failed
        running = self._running
        others = ", ".join(str(process.task) for process in running)
        wait = f"; the others ({others}) have {self._grace:g} s to end" if others else ""
        self._say(f"{failed.task} failed with {failed.exit}{wait}")
        for process in running:
            self._schedule_stop(process, self._grace)

    def _release_servers(self) -> None:
        """Sets a limit for tasks that are of no use any more."""
        roles = {process.task.type for process in self._running}
        if CHIEF in roles or (roles & {"worker"} and not self._has(PS)):
            return
        for process in self._running:
            if process.task.type == EVALUATOR:
                self._schedule_stop(process, EVALUATOR_SECONDS)
            elif "worker" in roles:
                self._schedule_stop(process, SERVER_SECONDS)
            else:
                self._schedule_stop(process, PS_SECONDS)

    def _has(self, role: str) -> bool:
        return any(process.task.type == role for process in self._processes)

    def _schedule_stop(self, process: TaskProcess, seconds: float) -> None:
        if process.stopped:
            return
        at = time.monotonic() + seconds
        process.term_at = at if process.term_at is None else min(at, process.term_at)

    def _stop_overdue(self) -> float:
        """Sends the signals that are due; returns when the next one is."""
        now = time.monotonic()
        for process in self._running:
            if process.term_at is not None and process.term_at <= now:
                self._say(f"stopping {process.task} (SIGTERM)")
                process.signal_group(signal.SIGTERM)
                process.stopped = True
                process.term_at = None
                process.kill_at = now + KILL_SECONDS
            elif process.kill_at is not None and process.kill_at <= now:
                self._say(f"{process.task} did not end; killing it (SIGKILL)")
                process.signal_group(signal.SIGKILL)
                process.kill_at = None
        times = [p.term_at for p in self._running] + [p.kill_at for p in self._running]
        return min((at for at in times if at is not None), default=now + _POLL_SECONDS)
