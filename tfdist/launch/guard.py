"""The process that cleans up when the launcher cannot: it outlives a launcher killed by SIGKILL.

The launcher starts it as `python -I -S guard.py` and holds the other end of its standard input.
Each line there names something of the job (`mark NAME=VALUE`, `session PID`). When the pipe ends,
the launcher is gone, and everything that belongs to what was named is killed.

PR_SET_PDEATHSIG alone would not do: it reaches the tasks but not what they have started, and a
watcher inside a task would be killed before it could pass the news on, or could not run because
native code holds the interpreter or the task is stopped. So this is a process of its own, and it
imports nothing of tfdist: it must be small, start at once and hold no other open file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection


def members(marks: Collection[str], sessions: Collection[int]) -> list[int]:
    """Returns the live processes of a job.

    A process belongs to it if its environment carries one of the job's marks, which children
    inherit even when they detach into a session of their own, or if it is in one of the tasks'
    sessions, which it cannot leave by clearing its environment.

    Args:
        marks: `NAME=VALUE` of variables that only processes of the job have.
        sessions: Session ids of the tasks.
    """
    entries = [b"\0" + mark.encode() + b"\0" for mark in marks]
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            if state in b"ZX":
                continue
            belongs = int(session) in sessions
            if not belongs and entries:
                with open(f"/proc/{name}/environ", "rb") as file:
                    variables = b"\0" + file.read()
                belongs = any(entry in variables for entry in entries)
        except (OSError, ValueError):
            continue  # ended meanwhile, or another user's
        if belongs:
            found.append(int(name))
    return found


def sweep(marks: Collection[str], sessions: Collection[int], seconds: float = 3.0) -> None:
    """Kills every process of a job, also those that are being started meanwhile.

    Args:
        marks: `NAME=VALUE` of variables that only processes of the job have.
        sessions: Session ids of the tasks.
        seconds: After which to give up on processes that do not die (uninterruptible sleep).
    """
    deadline = time.monotonic() + seconds
    while (pids := members(marks, sessions)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    named: dict[str, list[str]] = {"mark": [], "session": []}
    for line in sys.stdin:
        kind, value = line.rstrip("\n").split(" ", 1)
        named[kind].append(value)
    sweep(named["mark"], [int(pid) for pid in named["session"]])


if __name__ == "__main__":
    _main()
