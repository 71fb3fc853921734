"""How far an incarnation came: a few bytes beside `run.json`, written at every step.

One call of the system of some microseconds on local files; what is written is there after
`kill -9`. On object stores a heartbeat is an object, written every minute in a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import threading
import time
import zlib

from tfdist.state.filesystem import HIDDEN
from tfdist.state.filesystem import FileSystem

_FORM = struct.Struct("<qddqqd")
_REMOTE_SECONDS = 60.0


@dataclasses.dataclass
class Beat:
    """The last sign of life of an incarnation.

    Attributes:
        step: The last step that was done; -1 before the first.
        step_time: When, in seconds since 1970.
        first_time: When the first step of this incarnation was done; 0 before.
        saved_step: The step of the last state that was captured to be committed; -1 before.
        saved_number: How many were captured.
        saved_time: When the last one was.
    """

    step: int = -1
    step_time: float = 0.0
    first_time: float = 0.0
    saved_step: int = -1
    saved_number: int = 0
    saved_time: float = 0.0

    def to_bytes(self) -> bytes:
        """Returns the bytes of the file."""
        data = _FORM.pack(
            self.step,
            self.step_time,
            self.first_time,
            self.saved_step,
            self.saved_number,
            self.saved_time,
        )
        return data + zlib.crc32(data).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> Beat | None:
        """Reads the bytes of a file, None where they are not whole."""
        body = data[: _FORM.size]
        if data[_FORM.size :] != zlib.crc32(body).to_bytes(4, "little"):
            return None
        return cls(*_FORM.unpack(body))


class Heartbeat:
    """The heartbeat of this incarnation.

    Args:
        files: The file system.
        directory: Where `run.json` is.
        number: Number of the incarnation.
    """

    def __init__(self, files: FileSystem, directory: str, number: int):
        self.beat = Beat()
        self._files = files
        self._path = path_of(directory, number)
        self._descriptor = -1
        self._written = 0.0
        self._thread: threading.Thread | None = None
        if files.is_local:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._descriptor = os.open(self._path, flags, 0o644)

    def write(self, *, now: bool = False) -> None:
        """Writes `beat`; on object stores not more often than once a minute, unless `now`."""
        if self._descriptor >= 0:
            os.pwrite(self._descriptor, self.beat.to_bytes(), 0)
            return
        is_busy = self._thread is not None and self._thread.is_alive()
        if now and self._thread is not None:
            self._thread.join()
        elif is_busy or time.monotonic() < self._written + _REMOTE_SECONDS:
            return
        self._written = time.monotonic()
        data = self.beat.to_bytes()
        self._thread = threading.Thread(target=self._write_remote, args=[data], daemon=True)
        self._thread.start()
        if now:
            self._thread.join()

    def close(self) -> None:
        """Ends it and removes its file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._thread is not None:
            self._thread.join()
        remove(self._files, self._path)

    def _write_remote(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._files.replace(self._path, data)


def path_of(directory: str, number: int) -> str:
    """Returns the path of the heartbeat of an incarnation."""
    return os.path.join(directory, f"{HIDDEN}run-heartbeat-{number}")


def read(files: FileSystem, path: str) -> Beat | None:
    """Returns the last beat, None where there is none that is whole."""
    try:
        return Beat.from_bytes(files.read(path))
    except OSError:
        return None


def remove(files: FileSystem, path: str) -> None:
    """Removes a heartbeat, if it can be."""
    with contextlib.suppress(OSError):
        files.remove(path)
