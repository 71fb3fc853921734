"""Connecting to an address within a time limit, the look-up of its name included."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` (`[::1]:2222` for IPv6)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def connect_once(host: str, port: int, timeout: float) -> socket.socket:
    """Connects within `timeout` seconds, the look-up of the name included.

    Raises:
        OSError: The name was not found, or nobody answered, in that time.
    """
    box: list[Any] = []

    def look_up() -> None:
        try:
            box.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            box.append(error)

    # The look-up itself knows no limit.
    thread = threading.Thread(target=look_up, name="tfdist-lookup", daemon=True)
    deadline = time.monotonic() + timeout
    thread.start()
    thread.join(timeout)
    if not box:
        raise TimeoutError(f"the name {host!r} was not found within {timeout:.0f} s")
    if isinstance(box[0], Exception):
        raise box[0]
    problem: OSError = OSError(f"no address for {host!r}")
    for family, kind, protocol, _, address in box[0]:
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            problem = error
            continue
        # While nobody listens there, a connection to a port of this machine can meet itself.
        if sock.getsockname() != sock.getpeername():
            return sock
        sock.close()
        problem = ConnectionRefusedError("connection refused")
    raise problem
