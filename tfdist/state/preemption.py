"""SIGTERM during a training: all tasks that train stop after the same step.

    preemption = Preemption(group, "fit #1")
    preemption.open()                       # from here on SIGTERM is noted
    for each step:
        ...
        if preemption.stops_here():         # at every boundary, on every task
            commit()
            end(preemption.sources, Preempted(step, saved, directory))
    preemption.close()

How the tasks agree, when one or several of them got the signal:

| who | does |
|---|---|
| a task that got it | says so, at its next boundary |
| the chief, at its next boundary | asks all where they are, and waits |
| each task | answers from the thread that listens: its last boundary; waits at its next one |
| the chief | names the first boundary that nobody has passed |

Nobody waits for a step, so nothing is held up, and no step costs anything before a signal comes.

With parameter servers the chief stops alone, for itself or for a server that says that it got the
signal, and the servers wait for it (`tfdist.cluster.serving`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any
from typing import NoReturn

from tfdist.cluster import current
from tfdist.cluster import serving
from tfdist.cluster.group import Group
from tfdist.cluster.notice import Preempted
from tfdist.cluster.notice import report_preemption
from tfdist.errors import EXIT_PREEMPTED

log = logging.getLogger("absl")

_LOOK_SECONDS = 1.0
#: For what runs at the exit of a process that was preempted, and for taking TensorFlow down.
_EXIT_SECONDS = 15.0
_CLOCK_MONOTONIC = 1


class Preemption:
    """Notes SIGTERM while a training is under way, and agrees with the others where to stop.

    Args:
        group: The tasks that train together, None where there is one.
        name: The training, the same name on all of them and no other training's.

    Attributes:
        sources: The tasks that got the signal, as text, as far as they are known here; "this
            process" where there is one.
    """

    def __init__(self, group: Group | None, name: str):
        self.sources: list[str] = []
        self._group = group if group is not None and group.size > 1 else None
        self._servers = current.group() if self._group is None else None
        if self._servers is not None and not self._servers.cluster.has_parameter_servers:
            self._servers = None
        self._name = name
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._topic = f"preemption of {name}"
        self._signalled_at: float | None = None
        self._previous: Any = None
        self._is_installed = False
        self._has_told = False
        self._changed = threading.Condition()
        self._boundary = 0
        self._is_asked = False
        self._answers: dict[int, int] = {}
        self._stop: int | None = None

    def open(self) -> None:
        """Takes over SIGTERM, if this is the main thread and the signal is not ignored."""
        if self._group is not None:
            self._group.listen(self._topic, self._hear)
        if self._servers is not None:
            self._servers.listen(serving.TOPIC, self._hear_server)
            threading.Thread(target=self._tell_servers, name="tfdist-preempt", daemon=True).start()
        if threading.current_thread() is not threading.main_thread():
            log.info("%s is not in the main thread: SIGTERM is not noted", self._name)
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is signal.SIG_IGN:
            return
        # A handler of another language cannot be put back; what it would do is the default.
        self._previous = signal.SIG_DFL if previous is None else previous
        # TensorFlow catches SIGTERM once a multi-worker strategy exists, and lives on: this comes
        # after it.
        signal.signal(signal.SIGTERM, self._note)
        self._is_installed = True
        _let_children_die()

    def close(self, *, pass_on: bool = False) -> None:
        """Gives SIGTERM back.

        Args:
            pass_on: Whether a signal that came meanwhile is sent again.
        """
        if self._group is not None:
            self._group.listen(self._topic, None)
        if self._servers is not None:
            self._servers.listen(serving.TOPIC, None)
            self._signals.put(False)
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGTERM, self._previous)
            if pass_on and self.is_signalled:
                signal.raise_signal(signal.SIGTERM)

    @property
    def is_signalled(self) -> bool:
        """Whether this process got the signal."""
        return self._signalled_at is not None

    def stops_here(self) -> bool:
        """Returns whether to stop at this boundary: the same one on every task.

        Every task calls it at every boundary.

        Raises:
            PeerLostError: Another task was lost while they agreed.
        """
        group = self._group
        if group is None:
            if self.is_signalled and not self.sources:
                self._add_source(self._own_name)
            return bool(self.sources)
        with self._changed:
            self._boundary += 1
            here = self._boundary
        if self.is_signalled and not self._has_told:
            self._has_told = True
            group.announce(self._topic, {"wish": str(group.cluster.task)})
            with self._changed:
                self._add_source(str(group.cluster.task))
        if group.cluster.is_chief and self.sources and self._stop is None:
            self._choose(group)
        with self._changed:
            while self._is_asked and self._stop is None:
                self._wait(group)
            return self._stop is not None and here >= self._stop

    def _choose(self, group: Group) -> None:
        """Names the boundary; on the chief."""
        group.announce(self._topic, {"ask": self._boundary})
        with self._changed:
            while len(self._answers) < group.size:
                self._wait(group)
            stop = 1 + max(self._answers.values())
        group.announce(self._topic, {"stop": stop, "sources": self.sources})
        with self._changed:
            while self._stop is None:
                self._wait(group)

    def _wait(self, group: Group) -> None:
        """Waits for news; called with the lock held."""
        if not self._changed.wait(_LOOK_SECONDS):
            group.raise_if_lost(f"{self._name}: the agreement on where to stop")

    def _hear(self, news: dict[str, Any]) -> None:
        """Takes what a task has announced; in the thread that listens."""
        assert self._group is not None
        answer = None
        with self._changed:
            if "wish" in news:
                self._add_source(news["wish"])
            elif "ask" in news:
                self._is_asked = True
                answer = {"rank": self._group.rank, "at": self._boundary}
            elif "at" in news:
                self._answers[news["rank"]] = news["at"]
            elif "stop" in news:
                for source in news["sources"]:
                    self._add_source(source)
                self._stop = news["stop"]
            self._changed.notify_all()
        if answer is not None:
            self._group.announce(self._topic, answer)

    def _hear_server(self, news: dict[str, Any]) -> None:
        """Takes what a server has announced; in the thread that listens."""
        if "wish" in news:
            self._add_source(news["wish"])
            assert self._servers is not None
            self._servers.announce(serving.TOPIC, {"stops": list(self.sources)})

    def _tell_servers(self) -> None:
        """Tells servers of the signal to this process at once; in a thread of its own."""
        if self._signals.get():
            self._add_source(self._own_name)
            assert self._servers is not None
            self._servers.announce(serving.TOPIC, {"stops": list(self.sources)})

    @property
    def _own_name(self) -> str:
        return "this process" if self._servers is None else str(self._servers.cluster.task)

    def _add_source(self, task: str) -> None:
        if task not in self.sources:
            self.sources.append(task)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # It runs between any two instructions, whoever holds which lock: it does no work.
        del frame
        now = time.monotonic()
        if self._signalled_at is None:
            first = self._signalled_at = now
            self._signals.put(True)
        else:
            first = self._signalled_at
        if now - first > serving.SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_held = threading.local()


@functools.cache
def _let_children_die() -> None:
    """Gives SIGTERM its meaning back in forked children, once for this process.

    They train nothing, and who ends a pool of them waits until they have died of it. A handler of
    Python's would not do: it waits for the next instruction, which a child that is about to wait
    for work does not come to. A signal that comes while a child is made waits until it means that.
    """
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_release_signals, after_in_child=_die_of_signals
    )


def _hold_signals() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _die_of_signals() -> None:
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Preemption):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_signals()


def end(sources: Sequence[str], told: Preempted) -> NoReturn:
    """Ends this process in order, with the exit code that means: start again.

    All tasks that train call it together, when all is written.

    Args:
        sources: The tasks that got the signal, as far as they are known.
        told: Where training has ended.

    Raises:
        SystemExit: In any case; the program may clean up.
    """
    who = f" (SIGTERM to {', '.join(sources)})" if sources else ""
    log.warning(
        "%s%s. Ending with exit code %d: started again, it goes on from there",
        told,
        who,
        EXIT_PREEMPTED,
    )
    group = current.group()
    if group is None or group.cluster.is_chief:
        report_preemption(os.environ, told)
    if group is not None:
        group.leave()  # In order: for the others this is no failure.
    atexit.register(_end_for_certain)
    raise SystemExit(EXIT_PREEMPTED)


class _SignalEvent(ctypes.Structure):
    """`struct sigevent`, of which the rest is padding."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 96),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every", "every_ns", "seconds", "nanoseconds")
    )


def _end_for_certain() -> None:
    """Has the system send SIGTERM, which counts as 143, if this process does not come to its end.

    What reads data in Python may be waited for by native code that is taken down, for ever: a
    generator whose processes have ended. No thread of Python runs any more by then.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    event = _SignalEvent(number=int(signal.SIGTERM), notify=0)
    timer = ctypes.c_void_p()
    spec = _TimerSpec(seconds=int(_EXIT_SECONDS))
    with contextlib.suppress(
        AttributeError
    ):  # Not on all systems; there it may take until SIGKILL.
        libc = ctypes.CDLL(None)
        if not libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            libc.timer_settime(timer, 0, ctypes.byref(spec), None)
