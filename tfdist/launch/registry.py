"""What the guard of a job is told, so that it can clean up when this process cannot.

with guarded() as registry:
    registry.add_mark(f"TFDIST_JOB_ID={job_id}")
    registry.add_session(process.pid)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tfdist.launch import guard


class Registry:
    """The pipe to the guard (`tfdist.launch.guard`). May be used from any thread.

    Args:
        pipe: The guard's standard input.
    """

    def __init__(self, pipe: IO[bytes]):
        self._pipe = pipe
        self._lock = threading.Lock()

    def add_mark(self, mark: str) -> None:
        """Tells of a variable, `NAME=VALUE`, that only processes of the job have."""
        self._write(f"mark {mark}")

    def add_session(self, pid: int) -> None:
        """Tells of a process that leads a session of its own."""
        self._write(f"session {pid}")

    def _write(self, line: str) -> None:
        # Without its guard the job still runs, and ends cleanly unless this process is killed.
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._pipe.write(f"{line}\n".encode())


@contextlib.contextmanager
def guarded() -> Iterator[Registry]:
    """Runs the guard; yields what it is told through.

    Raises:
        OSError: The machine has no room for one more process.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve())],
        bufsize=0,
        # An outer launcher that cleans up must not take the guard of an inner one for a leftover.
        env={name: value for name, value in os.environ.items() if name != "TFDIST_JOB_ID"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield Registry(process.stdin)
    finally:
        process.kill()  # before the pipe ends: all is cleaned up, and process ids may be reused
        process.stdin.close()
        process.wait()
