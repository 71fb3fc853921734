"""A connection to a process that makes batches, and the servers that it gives for as long.

See `tfdist.data.server` for the other side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._version import __version__
from tfdist.cluster.dial import connect_once
from tfdist.cluster.dial import split_address
from tfdist.data.server import MAX_LINE
from tfdist.data.server import place
from tfdist.errors import UnsupportedError

log = logging.getLogger("absl")

#: Without a sign of life for so long, a process is lost: it is stopped, or its machine is gone.
SILENCE_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
#: To import nothing more, but to start two servers on a busy machine.
_ANSWER_SECONDS = 30.0


class Lease:
    """The servers of one process, for one reader.

    Args:
        address: `host:port` where it listens.

    Attributes:
        address: As given.
        dispatcher: Address of the dispatcher, `host:port`.
        pid: Number of the process there.
        is_near: Whether it is on this host, and sees the memory of this process.
        lost: Why the process is lost, or "".
        on_beat: Called at every sign of life, in another thread.

    Raises:
        OSError: It is not there, or not yet.
        UnsupportedError: It runs another TensorFlow, or is something else.
    """

    def __init__(self, address: str):
        self.address = address
        self.lost = ""
        self.on_beat: Callable[[], None] | None = None
        self._closed = False
        self._on_loss: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._socket = connect_once(*split_address(address), _CONNECT_SECONDS)
        try:
            self._socket.settimeout(_ANSWER_SECONDS)
            self._socket.sendall(f'{{"tfdist": "{__version__}"}}\n'.encode())
            self._file = self._socket.makefile("rb")
            told = _told(self._file.readline(MAX_LINE), address)
            self._socket.settimeout(SILENCE_SECONDS)
        except BaseException:
            self._socket.close()
            raise
        self.dispatcher = str(told["dispatcher"])
        self.pid = int(told["pid"])
        self.is_near = bool(place()) and told.get("place") == place()
        threading.Thread(target=self._watch, name="tfdist-data-service", daemon=True).start()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Has a function called when the process is lost, in another thread; at once if it is."""
        with self._lock:
            self._on_loss = call
            if not self.lost:
                return
        call()

    def close(self) -> None:
        """Gives the servers back."""
        self._closed = True
        # The thread that reads holds the descriptor open; it is to end, too.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _watch(self) -> None:
        try:
            while self._file.readline(MAX_LINE):
                if (call := self.on_beat) is not None:
                    call()
            why = "its process has ended"
        except TimeoutError:
            why = f"it has said nothing for {SILENCE_SECONDS:g} s"
        except (OSError, ValueError) as error:
            why = str(error)
        if self._closed:
            return
        with self._lock:
            self.lost = why
            call = self._on_loss
        if call is not None:
            call()


def _told(line: bytes, address: str) -> dict[str, Any]:
    if not line:
        raise ConnectionError("the connection was closed before an answer came")
    try:
        told = json.loads(line)
        there = str(told["tensorflow"])
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedError(
            f"a process of `tfdist data-service` at {address}",
            repr(line[:80]),
            "give the port that it was started with, not those of its servers",
        ) from error
    if there.split(".")[:2] != tf.__version__.split(".")[:2]:
        raise UnsupportedError(
            f"the same TensorFlow in the data service at {address} as here, {tf.__version__}",
            there,
            "install the same version in both",
        )
    assert isinstance(told, dict)
    return told
