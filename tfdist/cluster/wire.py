"""Messages between tasks: length-prefixed JSON over a stream socket, nothing executed or unpickled.

Each frame is the four bytes of `MAGIC`, the length of the body as four bytes big-endian, and a
JSON object in UTF-8. The magic tells a stranger apart at once: TensorFlow listens on the same port
later in the life of a task, and a task of an earlier run may still be talking to it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAGIC = b"tfd1"
_HEADER = struct.Struct(">4sI")
#: Far above any message of ours (a weights digest is 64 bytes), far below what could hurt.
MAX_BODY = 64 * 2**20


class WireError(ConnectionError):
    """The other side closed the connection or does not speak this protocol."""


def pack(message: dict[str, Any]) -> bytes:
    """Returns the frame that carries `message`."""
    body = json.dumps(message, separators=(",", ":"), default=_plain).encode()
    if len(body) > MAX_BODY:
        raise ValueError(f"message of {len(body)} bytes, at most {MAX_BODY} are allowed")
    return _HEADER.pack(MAGIC, len(body)) + body


def _plain(value: Any) -> Any:
    # NumPy's numbers and arrays, without importing it.
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


class Decoder:
    """Turns the bytes of one connection back into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Returns the messages completed by `data`.

        Raises:
            WireError: The bytes are not frames of this protocol.
        """
        self._buffer += data
        messages: list[dict[str, Any]] = []
        while True:
            head = bytes(self._buffer[: len(MAGIC)])
            if head != MAGIC[: len(head)]:
                raise WireError("the other side does not speak tfdist's protocol")
            if len(self._buffer) < _HEADER.size:
                return messages
            _, length = _HEADER.unpack_from(self._buffer)
            if length > MAX_BODY:
                raise WireError(f"a message of {length} bytes was announced")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return messages
            try:
                message = json.loads(bytes(self._buffer[_HEADER.size : end]))
            except ValueError as error:
                raise WireError("a message was not JSON") from error
            if not isinstance(message, dict):
                raise WireError("a message was not a JSON object")
            messages.append(message)
            del self._buffer[:end]


def keep_private(sock: socket.socket) -> socket.socket:
    """Prepares a connected socket: small frames go at once, programs we start do not inherit it."""
    sock.set_inheritable(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
