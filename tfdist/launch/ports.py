"""Ports that stay free until the task they are meant for listens on them.

Asking the kernel for a free port, closing the socket and handing the number on is a race: any
other process may get the same number before the task binds it. So a reservation keeps its sockets
open, bound but never listening, for as long as the job lives. Linux then gives these numbers to
nobody who asks for *any* port (port 0, or an outgoing connection), and still lets a process that
asks for exactly this number with SO_REUSEADDR bind it and listen, as gRPC, TensorFlow and Python's
servers all do.

    with reserve(2) as reservation:
        start_tasks(reservation.addresses)  # ("127.0.0.1:40001", "127.0.0.1:40002")
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Reservation:
    """Ports held for the tasks of one job.

    Attributes:
        ports: The reserved numbers, all different.
    """

    ports: tuple[int, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` of each reserved port."""
        return tuple(f"{HOST}:{port}" for port in self.ports)


@contextlib.contextmanager
def reserve(count: int) -> Iterator[Reservation]:
    """Holds `count` free ports until the context is left.

    Args:
        count: How many ports.

    Yields:
        The reservation. Its sockets are not inherited by child processes.

    Raises:
        OSError: The machine has no port or no file descriptor left.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_bound_socket()) for _ in range(count)]
        yield Reservation(tuple(sock.getsockname()[1] for sock in sockets))


def _bound_socket() -> socket.socket:
    # TensorFlow listens on [::], which covers both families. Held for IPv4 alone, the number could
    # still be given to a socket that is IPv6 only, and TensorFlow would find it in use.
    try:
        return _bind(socket.AF_INET6)
    except OSError:
        return _bind(socket.AF_INET)  # a machine without IPv6, as many containers are


def _bind(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Both sides need the option, and the holder before it binds: the kernel compares it on
        # every socket of the port when the task binds.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", 0))
    except OSError:
        sock.close()
        raise
    return sock
