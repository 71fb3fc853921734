"""One task's process: started in a session of its own, watched, signalled, reaped."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.topology import Task
from tfdist.launch.output import TaskOutput
from tfdist.launch.spec import Command


def bootstrap_command(command: Command) -> list[str]:
    """Returns what runs the user's program under the eyes of this process (`bootstrap`)."""
    return [
        sys.executable,
        # By path: -m would put the current directory in front of the standard library.
        str(Path(__file__).resolve().with_name("bootstrap.py")),
        str(os.getpid()),
        "module" if command.is_module else "script",
        command.target,
        *command.args,
    ]


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a task's process ended.

    Attributes:
        code: Its exit code, 128 + n where signal n ended it, as shells count.
        signal: Name of that signal, or "".
    """

    code: int
    signal: str = ""

    def __str__(self) -> str:
        killed = f" (killed by {self.signal})" if self.signal else ""
        return f"exit code {self.code}{killed}"


class TaskProcess:
    """The process of one task, leader of its own session and process group.

    Args:
        task: The task.
        command: The program and its arguments.
        environ: Its whole environment.
        output: Where its lines are shown and kept.
        stdin: Whether it inherits the launcher's standard input; otherwise it reads nothing.
        directory: Where it is started; the launcher's own directory by default.

    Attributes:
        exit: How it ended, or None while it runs.
        stopped: Whether the launcher has told it to stop, so that its exit code means nothing.
        term_at: When to send SIGTERM, on the clock of `time.monotonic`, or None.
        kill_at: When to send SIGKILL, or None.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: TaskOutput,
        stdin: bool,
        directory: str | None = None,
    ):
        self.task = task
        self.output = output
        self.exit: Exit | None = None
        self.stopped = False
        self.term_at: float | None = None
        self.kill_at: float | None = None
        self._popen = subprocess.Popen(
            list(command),
            cwd=directory,
            env=dict(environ),
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def detach_pipes(self) -> tuple[int, int]:
        """Returns the reading ends of standard output and error; the caller closes them."""
        assert self._popen.stdout is not None and self._popen.stderr is not None
        # dup: the Popen object's own file objects would close their descriptors when collected.
        ends = os.dup(self._popen.stdout.fileno()), os.dup(self._popen.stderr.fileno())
        self._popen.stdout.close()
        self._popen.stderr.close()
        return ends

    def poll(self) -> bool:
        """Returns whether the process has ended just now, and sets `exit` if so.

        The process is left unreaped, so that its number, which is also that of its group, belongs
        to nobody else while the launcher may still signal the group.
        """
        if self.exit is not None:
            return False
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return False
        if seen.si_code == os.CLD_EXITED:
            self.exit = Exit(seen.si_status)
        else:
            self.exit = Exit(128 + seen.si_status, _signal_name(seen.si_status))
        return True

    def signal_main(self, number: int) -> None:
        """Sends a signal to the process alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process and all that it has started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Kills what is left of the group and waits for the process."""
        self.signal_group(signal.SIGKILL)
        self._popen.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
