"""How a worker that was started again finds its way back into a group that runs already.

The barrier is gone by then: TensorFlow listens on the chief's address. But the worker's own port
is free until it starts TensorFlow, so it listens there (`Door`), and the hub, which knows whom it
misses and where, calls it (`Recall`). No further port is needed, only connections from the chief
to the workers, which TensorFlow needs too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any

from tfdist.cluster import wire
from tfdist.cluster.dial import connect_once
from tfdist.cluster.dial import split_address
from tfdist.cluster.topology import Task

_CONNECT_SECONDS = 2.0
#: For the first message of whoever answers. TensorFlow's is not ours, and is known at once.
_GREETING_SECONDS = 3.0
_PAUSES = (0.2, 0.5, 1.0, 2.0)
_ACCEPT_SECONDS = 0.5


@dataclasses.dataclass
class Answer:
    """A connection on which the other side has said something.

    Attributes:
        sock: The connection.
        decoder: Decoder that has read it so far.
        message: The message.
        rest: Messages that came with it.
    """

    sock: socket.socket
    decoder: wire.Decoder
    message: dict[str, Any]
    rest: list[dict[str, Any]]


class Recall:
    """Calls missing workers at their own addresses until they answer; used by the hub.

    Args:
        addresses: The tasks that may come back, with their addresses.
    """

    def __init__(self, addresses: Mapping[Task, str]):
        self._addresses = addresses
        self._arrived: queue.SimpleQueue[tuple[Task, Answer]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wanted: set[Task] = set()
        self._called: set[Task] = set()
        self._stopped = threading.Event()

    def covers(self, task: Task) -> bool:
        """Whether the group can do without `task`, and takes it back."""
        return task in self._addresses

    def want(self, task: Task) -> None:
        """Begins to call `task`, if it may come back."""
        if task not in self._addresses or self._stopped.is_set():
            return
        with self._lock:
            self._wanted.add(task)
            if task in self._called:
                return
            self._called.add(task)
        name = f"tfdist-recall-{task}"
        threading.Thread(target=self._call, args=(task,), name=name, daemon=True).start()

    def forget(self, task: Task) -> None:
        """Stops calling `task`: it was here all the time."""
        with self._lock:
            self._wanted.discard(task)

    def arrived(self) -> list[tuple[Task, Answer]]:
        """Returns who has answered since the last call, with its hello."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def stop(self) -> None:
        """Stops calling anybody."""
        self._stopped.set()

    def _call(self, task: Task) -> None:
        turn = 0
        while True:
            with self._lock:
                if task not in self._wanted or self._stopped.is_set():
                    self._called.discard(task)
                    return
            answer = self._try(task)
            if answer is not None:
                self._arrived.put((task, answer))
                self.forget(task)
                continue
            self._stopped.wait(_PAUSES[min(turn, len(_PAUSES) - 1)])
            turn += 1

    def _try(self, task: Task) -> Answer | None:
        try:
            sock = connect_once(*split_address(self._addresses[task]), _CONNECT_SECONDS)
        except (OSError, UnicodeError):
            return None
        wire.keep_private(sock)
        answer = _first_message(sock, _GREETING_SECONDS)
        if answer is None or answer.message.get("t") != "hello":
            sock.close()
            return None
        return answer


class Door(threading.Thread):
    """Waits on this task's own port for the hub of a group that runs already.

    Args:
        listener: Listening socket on the task's own port.
        hello: What to say to who comes.

    Attributes:
        answer: The hub's welcome, once it has come.
        refusal: Why the hub did not want this task, or "".
    """

    def __init__(self, listener: socket.socket, hello: dict[str, Any]):
        super().__init__(name="tfdist-door", daemon=True)
        self.answer: Answer | None = None
        self.refusal = ""
        self._listener = listener
        self._hello = hello
        self._guest: socket.socket | None = None
        self._closed = False

    def run(self) -> None:
        self._listener.settimeout(_ACCEPT_SECONDS)
        while not self._closed and self.answer is None:
            with contextlib.suppress(OSError):
                self._guest, _ = self._listener.accept()
                wire.keep_private(self._guest)
                self._greet(self._guest)

    def close(self) -> None:
        """Frees the port for TensorFlow; the connection of `answer` stays."""
        self._closed = True
        # The port is in use as long as a thread waits on it.
        for sock in (self._listener, None if self.answer else self._guest):
            with contextlib.suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)
        self.join()
        self._listener.close()

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(_GREETING_SECONDS)
        sock.sendall(wire.pack(self._hello))
        answer = _first_message(sock, _GREETING_SECONDS)
        if answer is not None and answer.message.get("t") == "go":
            self.answer = answer
            return
        if answer is not None and answer.message.get("t") == "refused":
            self.refusal = str(answer.message.get("reason"))
        sock.close()


def _first_message(sock: socket.socket, timeout: float) -> Answer | None:
    decoder = wire.Decoder()
    sock.settimeout(timeout)
    try:
        while data := sock.recv(65536):
            if messages := decoder.feed(data):
                return Answer(sock, decoder, messages[0], messages[1:])
    except OSError:
        pass
    return None
