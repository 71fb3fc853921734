"""One task's connection to the hub: messages out, messages in, and a heart beat between them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from tfdist.cluster import wire


class Link:
    """A connection to the hub, past the barrier.

    Args:
        sock: The connected socket.
        decoder: Decoder that has read `sock` so far.
        silence_seconds: The connection has ended after so much silence.
        unread: Messages that have come already.

    Attributes:
        over: Whether this task is done with the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: wire.Decoder,
        silence_seconds: float,
        unread: Sequence[dict[str, Any]] = (),
    ):
        self.over = False
        self._sock = sock
        self._decoder = decoder
        self._silence = silence_seconds
        self._unread = unread
        self._send_lock = threading.Lock()

    def start(
        self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[str], None]
    ) -> None:
        """Begins to listen, and to say now and then that this task lives.

        Args:
            on_message: Called with each message, in their order, by one thread.
            on_end: Called with the reason when the connection has ended by itself; by any thread,
                and perhaps several times.
        """
        for name, run in (
            ("tfdist-group", lambda: self._read(on_message, on_end)),
            ("tfdist-heartbeat", lambda: self._beat(on_end)),
        ):
            threading.Thread(target=run, name=name, daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message.

        Raises:
            OSError: The connection has ended.
        """
        with self._send_lock:
            self._sock.sendall(wire.pack(message))

    def stop(self) -> None:
        """Ends the heart beat; the connection closes with the process, which tells the hub when."""
        self.over = True

    def close(self) -> None:
        """Closes the connection at once."""
        self.over = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def abandon(self) -> None:
        """Closes what a forked child has of the connection, which goes on in its parent."""
        self.over = True
        self._send_lock = threading.Lock()  # Another thread may have held it.
        with contextlib.suppress(OSError):
            self._sock.close()

    def _beat(self, on_end: Callable[[str], None]) -> None:
        while not self.over:
            time.sleep(self._silence / 8)
            if self.over:
                return
            try:
                self.send({"t": "beat"})
            except OSError as error:
                on_end(str(error))

    def _read(
        self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[str], None]
    ) -> None:
        for message in self._unread:
            on_message(message)
        self._sock.settimeout(self._silence)
        while not self.over:
            started = time.monotonic()
            try:
                data = self._sock.recv(65536)
                if not data:
                    raise wire.WireError("its connection closed")
                messages = self._decoder.feed(data)
            except TimeoutError:
                if time.monotonic() - started > 1.5 * self._silence:
                    continue  # This process itself was stopped for a while.
                on_end(f"it has said nothing for {self._silence:.0f} s")
                return
            except OSError as error:
                on_end(str(error))
                return
            for message in messages:
                on_message(message)
