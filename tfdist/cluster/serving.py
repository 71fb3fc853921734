"""What a server does until its coordinator has ended, and what SIGTERM means to it meanwhile.

In a cluster with parameter servers the chief alone trains and saves. For that it needs the
variables, which are in the `ps` tasks, and workers to finish what is under way. So a server that
gets SIGTERM does not end at once, as far as it can be of use:

| who got SIGTERM | what follows |
|---|---|
| a `ps` | it says so. A chief that can save answers, saves and ends; then the server ends |
| a `worker` | the others can do without it: it ends, unless the chief says that all of them end |
| the chief, who can save | it says so; servers stay until it has ended |
| any of them, again | it ends at once |

Servers whose chief was preempted end with its exit code, 143, which means: start again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tfdist.cluster.group import Group
from tfdist.cluster.topology import WORKER
from tfdist.errors import EXIT_FAILED
from tfdist.errors import EXIT_OK
from tfdist.errors import EXIT_PREEMPTED

log = logging.getLogger("absl")

#: A server says {"wish": task} here, the chief {"stops": sources}.
TOPIC = "preemption of servers"
#: For the chief to answer a `ps`. It does so from a thread that listens, whatever else it does.
ANSWER_SECONDS = 5.0
#: For a worker to learn that the chief was signalled as well, as where all machines are taken away.
LINGER_SECONDS = 2.0
#: timeout(1) and process managers signal the process and its group: one request.
SAME_REQUEST_SECONDS = 0.3

_SIGNAL, _LEFT = "signal", "left"


class Server:
    """A task that serves, in its main thread.

    Args:
        group: The cluster, of which this process is a `ps`, or a `worker` beside one.
    """

    def __init__(self, group: Group):
        self._group = group
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._signalled_at: float | None = None
        self._ends_at: float | None = None
        self._stops = False

    def run(self) -> int:
        """Waits until the coordinator has ended; returns the exit code for this process."""
        self._group.listen(TOPIC, lambda news: self._inbox.put(("news", news)))
        threading.Thread(target=self._watch, name="tfdist-coordinator", daemon=True).start()
        with self._noting():
            while True:
                kind, value = self._next()
                if kind == _LEFT:
                    return self._code(value)
                if kind == _SIGNAL:
                    self._take_signal()
                elif "stops" in value:
                    self._stop(value["stops"])

    def _watch(self) -> None:
        self._inbox.put((_LEFT, self._group.wait_until_left(self._group.cluster.chief)))

    def _next(self) -> tuple[str, Any]:
        left = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
        try:
            return self._inbox.get(timeout=left)
        except queue.Empty:
            return self._end()

    def _take_signal(self) -> None:
        now = time.monotonic()
        if self._signalled_at is not None:
            if now - self._signalled_at > SAME_REQUEST_SECONDS:
                self._end()
            return
        self._signalled_at = now
        task = self._group.cluster.task
        if not self._stops:
            self._ends_at = now + (LINGER_SECONDS if task.type == WORKER else ANSWER_SECONDS)
        if task.type != WORKER:
            self._group.announce(TOPIC, {"wish": str(task)})

    def _stop(self, sources: list[str]) -> None:
        if not self._stops:
            who = ", ".join(sources)
            log.info("the coordinator saves (SIGTERM to %s); serving until then", who)
        self._stops, self._ends_at = True, None

    def _code(self, problem: str | None) -> int:
        if problem:
            log.error("the coordinator ended: %s", problem)
            return EXIT_FAILED
        return EXIT_PREEMPTED if self._stops else EXIT_OK

    def _end(self) -> tuple[str, Any]:
        """Ends this process as the signal does where nobody takes it over."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return "", {}  # Another thread may have been chosen to die of it.

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            # It runs between any two instructions; this is one of few things that are safe there.
            del number, frame
            self._inbox.put((_SIGNAL, None))

        previous = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
