"""Watches the tasks of one start of the job until the last has ended, and decides who ends when.

- A task that ends with anything but 0 has failed, and `policy` knows whether the job has with it.
  If so, the others get `grace` seconds to end by themselves, since they know best whom they miss;
  then SIGTERM; 5 s later SIGKILL, because a multi-worker TensorFlow process survives SIGTERM.
- When the tasks that train have ended with 0, those that serve them are stopped after a while, and
  that is no failure: servers (`ps`, and `worker` beside a `ps`) and the evaluator. An evaluator
  that has heard the news (`notice`) is given the time it needs.
- A worker beside a `ps` that says nothing any more (it is stopped, its disk hangs) is killed: as
  long as it is there, TensorFlow waits for it wherever it tells all workers something.
- A process that makes batches is stopped when nobody is left who may read them.
- A signal to the launcher goes to all tasks; SIGTERM to servers only when the chief has ended, who
  needs them to save, and not to what tasks have started themselves. Who is left after `grace` is
  killed; a second signal kills at once.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from collections.abc import Sequence

from tfdist.cluster.notice import Notices
from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import DATA
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Task
from tfdist.errors import EXIT_PREEMPTED
from tfdist.launch.policy import Policy
from tfdist.launch.policy import Reaction
from tfdist.launch.processes import Exit
from tfdist.launch.processes import TaskProcess
from tfdist.launch.signals import Inbox

#: From SIGTERM to SIGKILL.
KILL_SECONDS = 5.0
#: For parameter servers and their workers to notice that the chief has ended.
SERVER_SECONDS = 10.0
#: For the evaluator to notice that training has ended.
EVALUATOR_SECONDS = 60.0
#: Before a worker is started again alone.
REPLACE_SECONDS = 1.0

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
        policy: Decides what the failure of a task means.
        start: Starts a task again.
        notices: What tasks and launcher tell each other.
        inbox: Signals of the launcher.
        grace: Seconds that tasks get to end by themselves after a failure or a signal.
        say: Shows a line.
    """

    def __init__(
        self,
        processes: Sequence[TaskProcess],
        policy: Policy,
        start: Callable[[Task], TaskProcess],
        notices: Notices,
        inbox: Inbox,
        grace: float,
        say: Callable[[str], None],
    ):
        self._processes = list(processes)
        self._policy = policy
        self._start = start
        self._notices = notices
        self._inbox = inbox
        self._grace = grace
        self._say = say
        self._coming: dict[Task, float] = {}
        self._failed: TaskProcess | None = None
        self._signal: int | None = None
        self._signalled_at = 0.0

    def run(self) -> Outcome:
        """Returns when every task has ended."""
        while True:
            self._take_signals()
            self._kill_stuck()
            self._notice_ends()
            self._start_due()
            self._stop_data()
            if not self._running and not self._coming:
                return Outcome(self._failed, self._signal)
            wake_at = min([self._stop_overdue(), *self._coming.values()])
            self._inbox.wait(min(_POLL_SECONDS, wake_at - time.monotonic()))

    @property
    def _running(self) -> list[TaskProcess]:
        return [process for process in self._processes if process.exit is None]

    @property
    def _has_servers(self) -> bool:
        return any(process.task.type == PS for process in self._processes)

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
            self._coming.clear()
            limit = f"killed after {self._grace:g} s, or at a second signal"
            self._say(f"{name}; stopping all tasks ({limit})")
            has_chief = any(process.task.type == CHIEF for process in self._running)
            for process in self._running:
                if process.task.type == DATA:
                    continue  # stopped when nobody is left who may read
                serves = has_chief and process.task.type in (WORKER, PS) and self._has_servers
                if number == signal.SIGINT:
                    process.signal_group(number)
                elif not serves:
                    # A lost console or terminal is no reason that a task would know of. Its own
                    # children, who may read its data, are its own to end: it may need them to save.
                    process.signal_main(signal.SIGTERM)
                process.stopped = True
                process.term_at = None
                process.kill_at = now + self._grace

    def _kill_stuck(self) -> None:
        for task in self._notices.fallen_silent():
            for process in self._running:
                if process.task == task and not process.stopped:
                    self._say(f"{task} says nothing any more; killing it (SIGKILL)")
                    process.signal_group(signal.SIGKILL)

    def _notice_ends(self) -> None:
        ended = [process for process in self._processes if process.poll()]
        for process in ended:
            if process.exit is None or process.exit.code == 0 or process.stopped:
                continue
            if self._is_released(process):
                process.stopped = True
            elif self._failed is None:
                self._react(process, process.exit)
            else:
                self._say(f"{process.task} ended with {process.exit}")
        if ended and self._failed is None and self._signal is None:
            self._release_servers()
        elif self._signal is not None and any(each.task.type == CHIEF for each in ended):
            for process in self._running:
                process.term_at = time.monotonic() + KILL_SECONDS

    def _is_released(self, process: TaskProcess) -> bool:
        """Whether it is a server that has ended because the chief was preempted."""
        serves = self._has_servers and process.task.type in (WORKER, PS)
        is_preempted = process.exit == Exit(EXIT_PREEMPTED)
        return serves and is_preempted and self._notices.preempted() is not None

    def _react(self, failed: TaskProcess, how: Exit) -> None:
        task = failed.task
        others = [process.task for process in self._running] + list(self._coming)
        reaction = self._policy.on_failure(task, how.code, others)
        if reaction is Reaction.FAIL:
            self._fail(failed)
        elif reaction is Reaction.CARRY_ON:
            served = self._has_servers and all(other.type != CHIEF for other in others)
            rest = (
                "the chief had ended, and the job with it"
                if served
                else "the others go on without it"
            )
            self._say(f"{task} ended with {how}; {rest}")
        else:
            failed.signal_group(signal.SIGKILL)  # what it has started and left behind
            times = f"{self._policy.replacements(task)} of {self._policy.most_replacements(task)}"
            self._say(f"{task} ended with {how}; starting it again, {times}")
            self._coming[task] = time.monotonic() + REPLACE_SECONDS

    def _start_due(self) -> None:
        now = time.monotonic()
        due = [task for task, at in self._coming.items() if at <= now]
        for task in due:
            del self._coming[task]
            self._processes.append(self._start(task))
        if due:
            self._release_servers()

    def _fail(self, failed: TaskProcess) -> None:
        self._failed = failed
        self._coming.clear()
        running = self._running
        others = ", ".join(str(each.task) for each in running if each.task.type != DATA)
        wait = f"; the others ({others}) have {self._grace:g} s to end" if others else ""
        what = f"failed with {failed.exit}"
        if failed.exit == Exit(EXIT_PREEMPTED):
            what = f"was preempted ({failed.exit})"
        self._say(f"{failed.task} {what}{wait}")
        for process in running:
            self._schedule_stop(process, self._grace)

    def _stop_data(self) -> None:
        """Stops the processes that make batches when nobody is left who may read them."""
        tasks = [process.task for process in self._running] + list(self._coming)
        if all(task.type == DATA for task in tasks):
            self._coming.clear()
            for process in self._running:
                # It holds nothing that could be lost, and ends at once.
                process.stopped = True
                process.signal_group(signal.SIGKILL)

    def _release_servers(self) -> None:
        """Sets a limit for tasks that are of no use any more."""
        roles = {process.task.type for process in self._running}
        roles |= {task.type for task in self._coming}
        if CHIEF in roles or (WORKER in roles and not self._has_servers):
            return
        self._coming = {t: at for t, at in self._coming.items() if t.type == EVALUATOR}
        self._notices.tell_end()
        for process in self._running:
            if process.task.type == DATA:
                continue
            evaluates = process.task.type == EVALUATOR
            self._schedule_stop(process, EVALUATOR_SECONDS if evaluates else SERVER_SECONDS)

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
                if self._is_at_its_last(process):
                    process.term_at = now + _POLL_SECONDS
                    continue
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

    def _is_at_its_last(self, process: TaskProcess) -> bool:
        """Whether it is an evaluator that knows that training has ended."""
        if process.task.type != EVALUATOR or self._failed is not None:
            return False
        return self._notices.end_was_heard
