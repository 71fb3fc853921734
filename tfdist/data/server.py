"""The process that makes batches for those that train: `tf.data` service behind one port.

    python -m tfdist.data.server --port 7000

Whoever connects gets servers of its own, a dispatcher and a worker of TensorFlow's `tf.data`
service, for as long as the connection is open. So nothing is left of a reader that has gone, and a
reader sees at once when this process has: the connection ends with it, while the servers'
clients would wait for ever.

Both sides send one line of JSON, the reader first: the versions, and what it was answered. After
that this process sends an empty line every second, so that one which is stopped, or whose machine
is gone, is noticed too. It imports TensorFlow and no Keras, and uses no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

#: Between two signs of life.
BEAT_SECONDS = 1.0
#: For the first line of whoever connects.
_HELLO_SECONDS = 10.0
#: A line is no longer than that.
MAX_LINE = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is killed, or its parent has ended.

    Args:
        argv: Arguments after the program's name; those of the process by default.
    """
    parser = argparse.ArgumentParser(description="Makes batches for processes that train.")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--host", default="", help="to listen on; by default all")
    parser.add_argument("--parent", type=int, help="process to end with")
    parser.add_argument("--announce", type=int, help="file descriptor to write the port to")
    given = parser.parse_args(argv)
    # Who is interrupted at the terminal is the one that reads, and it ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if given.parent is not None:
        threading.Thread(target=_end_with, args=(given.parent,), daemon=True).start()
    _prepare()
    try:
        listener = _listener(given.host, given.port)
    except OSError as error:
        print(f"tfdist: error: cannot listen on port {given.port}: {error}", file=sys.stderr)
        return 2
    if given.announce is not None:
        with os.fdopen(given.announce, "w") as file:
            file.write(f"{listener.getsockname()[1]}\n")
    elif given.parent is None:
        print(f"makes batches at port {listener.getsockname()[1]}", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process, also while it still imports, when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(BEAT_SECONDS)
    # Without taking down TensorFlow, whose servers may be in the middle of a batch.
    os._exit(0)


def place() -> str:
    """Returns what processes have in common that see each other's memory in /proc, or ""."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
    except OSError:
        return ""


def _prepare() -> None:
    """Makes the settings of a process that trains on CPU, so that both compute the same bits."""
    from tfdist import tuning

    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    tuning.tune()
    import tensorflow  # noqa: F401  before it says that it is there


def _listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens, on IPv4 and IPv6 where no host is given."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
    elif socket.has_dualstack_ipv6():
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The launcher holds the number for it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener


def _serve(connection: socket.socket) -> None:
    """Runs the servers of one reader until it closes its connection."""
    servers: list[Any] = []
    with contextlib.suppress(OSError, ValueError), connection:
        connection.settimeout(_HELLO_SECONDS)
        _keep_alive(connection)
        if not _line(connection).startswith('{"tfdist":'):
            return
        try:
            connection.sendall(_answer(connection, servers))
            while not _has_ended(connection):
                connection.sendall(b"\n")
        finally:
            for server in reversed(servers):
                server.stop()


def _answer(connection: socket.socket, servers: list[Any]) -> bytes:
    """Starts the servers and says where they are."""
    import tensorflow as tf

    service = tf.data.experimental.service
    # The reader has reached this machine under this address, and so reaches its servers.
    host = connection.getsockname()[0].removeprefix("::ffff:")
    host = f"[{host}]" if ":" in host else host
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    servers.append(dispatcher)
    address = dispatcher.target.rpartition("://")[2]
    worker = service.WorkerServer(
        service.WorkerConfig(dispatcher_address=address, worker_address=f"{host}:%port%")
    )
    servers.append(worker)
    port = address.rpartition(":")[2]
    told = {
        "tensorflow": tf.__version__,
        "dispatcher": f"{host}:{port}",
        "pid": os.getpid(),
        "place": place(),
    }
    return json.dumps(told).encode() + b"\n"


def _has_ended(connection: socket.socket) -> bool:
    """Waits for the next beat; returns whether the reader has gone before it."""
    readable, _, _ = select.select([connection], [], [], BEAT_SECONDS)
    return bool(readable) and not connection.recv(MAX_LINE)


def _line(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_LINE:
        more = connection.recv(MAX_LINE)
        if not more:
            return ""
        data += more
    return data.decode()


def _keep_alive(connection: socket.socket) -> None:
    """Makes the system notice when the machine at the other end has gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


if __name__ == "__main__":
    sys.exit(main())
