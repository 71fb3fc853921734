"""What the replicas print: shown under their names, kept raw per replica, and as log entries.

The service takes a line that is one JSON object with a `message` for an entry of its own, with the
`severity` that the object names; other lines are INFO from standard output and ERROR from standard
error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import selectors
import threading
import time
from collections.abc import Callable
from io import FileIO
from typing import Any

from tfdist.launch.output import LineAssembler
from tfdist.launch.output import TaskOutput
from tfdist.vertex.local.custom_job import Replica

SEVERITIES = (
    *("DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR"),
    *("CRITICAL", "ALERT", "EMERGENCY"),
)
_PLAIN = ("DEFAULT", "DEBUG", "INFO", "NOTICE")
_READ = 64 * 1024
_STEP_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the log.

    Attributes:
        severity: One of `SEVERITIES`.
        message: The text.
        payload: The other fields of a line that is JSON; None for plain text.
    """

    severity: str
    message: str
    payload: dict[str, Any] | None = None

    def __str__(self) -> str:
        if self.payload is None or self.severity in _PLAIN:
            return self.message
        return f"{self.severity} {self.message}"


def parse_line(line: str, is_error: bool = False) -> Entry:
    """Returns the entry that the service makes of a line.

    Args:
        line: Without its end.
        is_error: Whether it was written to standard error.
    """
    default = "ERROR" if is_error else "INFO"
    if line.startswith("{") and line.rstrip().endswith("}"):
        try:
            fields = json.loads(line)
        except ValueError:
            fields = {}
        if isinstance(fields.get("message"), str):
            severity = str(fields.pop("severity", default)).upper()
            known = severity if severity in SEVERITIES else default
            return Entry(known, fields.pop("message"), fields)
    return Entry(default, line)


class _Stream:
    def __init__(self, replica: Replica, output: TaskOutput, read_end: int, is_error: bool):
        self.replica = replica
        self.output = output
        self.read_end = read_end
        self.is_error = is_error
        self.lines = LineAssembler()


class Reader:
    """Reads the pipes of all replicas of a job, in a thread of its own.

    Args:
        show: Called with each line to show, under the name of its replica.
        log: Unbuffered file for entries as JSON lines.
        complain: Called with a sentence when a log cannot be written.
        broken: Called once when `show` raises OSError, as a closed console does.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        log: FileIO,
        complain: Callable[[str], None],
        broken: Callable[[], None],
    ):
        self._show: Callable[[str], None] | None = show
        self._log: FileIO | None = log
        self._complain = complain
        self._broken = broken
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._added: list[_Stream] = []
        self._open = 0
        self._count = 0  # of what was read
        self._is_showing = False
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tfdist-replicas", daemon=True)
        self._thread.start()

    def add(self, replica: Replica, output: TaskOutput, stdout: int, stderr: int) -> None:
        """Takes over the reading ends of a replica's pipes."""
        with self._lock:
            for read_end, is_error in ((stdout, False), (stderr, True)):
                os.set_blocking(read_end, False)
                self._added.append(_Stream(replica, output, read_end, is_error))
                self._open += 1
            self._idle.clear()
        self._wake()

    def drain(self, seconds: float, hurry: threading.Event) -> None:
        """Waits until all pipes have ended and all is shown.

        Args:
            seconds: How long to wait for pipes from which nothing comes: somebody outside of the
                job holds them. A console that is slow to read is waited for.
            hurry: Ends the wait when it is set.
        """
        seen, since = self._count, time.monotonic()
        while not self._idle.wait(_STEP_SECONDS) and not hurry.is_set():
            if self._count != seen or self._is_showing:
                seen, since = self._count, time.monotonic()
            elif time.monotonic() - since > seconds:
                return

    def close(self) -> None:
        """Ends the thread. Pipes that somebody outside the job still holds are closed."""
        self._closed = True
        self._wake()
        self._thread.join(1.0)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, 4096)
                else:
                    self._read(key.data)
            with self._lock:
                added, self._added = self._added, []
                for stream in added:
                    self._selector.register(stream.read_end, selectors.EVENT_READ, stream)
                if not self._open:
                    self._idle.set()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.data.read_end)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.read_end, _READ)
        except BlockingIOError:
            return
        self._count += 1
        lines = stream.lines.feed(data) if data else stream.lines.finish()
        if lines:
            self._take(stream, lines)
        if not data:
            self._selector.unregister(stream.read_end)
            os.close(stream.read_end)
            with self._lock:
                self._open -= 1

    def _take(self, stream: _Stream, lines: list[bytes]) -> None:
        complaint = stream.output.record(lines)
        if complaint is not None:
            self._complain(complaint)
        entries = [parse_line(line.decode("utf-8", "replace"), stream.is_error) for line in lines]
        self._keep(stream.replica, entries)
        for entry in entries:
            self._print(f"[{stream.replica}] {entry}")

    def _keep(self, replica: Replica, entries: list[Entry]) -> None:
        if self._log is None:
            return
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        records = [
            {
                **(entry.payload or {}),
                "timestamp": now.replace("+00:00", "Z"),
                "severity": entry.severity,
                "task": replica.name,
                "message": entry.message,
            }
            for entry in entries
        ]
        try:
            self._log.write("".join(json.dumps(record) + "\n" for record in records).encode())
        except OSError as error:
            self._log = None
            self._complain(f"the log of the job ends here: {error}")

    def _print(self, text: str) -> None:
        if self._show is None:
            return
        self._is_showing = True
        try:
            self._show(text)
        except OSError:
            self._show = None
            self._broken()
        self._is_showing = False
