"""The living connection between the tasks of one job.

A `Group` comes out of the start barrier (`tfdist.cluster.rendezvous`). While the job runs it
carries small values that all tasks must agree on (`all_gather`) and tells at once when a task has
died: TensorFlow's own collectives notice late, do not say who it was, or wait for ever.

    >>> group = join(detect())
    >>> group.all_gather("how many rows", 640)      # every task calls it at the same point
    [640, 640]
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from tfdist.cluster import symptoms
from tfdist.cluster import words
from tfdist.cluster.doom import Doom
from tfdist.cluster.doom import Region
from tfdist.cluster.hub import Hub
from tfdist.cluster.link import Link
from tfdist.cluster.roster import Roster
from tfdist.cluster.roster import State
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import DisagreementError
from tfdist.errors import PeerLostError

log = logging.getLogger("absl")

#: Time the main thread has to notice by itself that a peer is gone (TensorFlow usually raises
#: within 10 s) before the process is ended for it.
NOTICE_SECONDS = 20.0
#: Longest wait of the chief, at a normal end, for the tasks that are still busy.
FAREWELL_SECONDS = 300.0
#: The same for servers, who have nothing to do any more.
SERVER_FAREWELL_SECONDS = 10.0
#: From an error that the loss of a peer may have caused to the news of that loss.
NEWS_SECONDS = 8.0
#: A task that failed has so long to end before the others do because of it.
LAST_WORDS_SECONDS = 5.0


class Group:
    """The tasks of a job, as one of them sees the others.

    Args:
        cluster: The cluster this process is part of.
        link: This task's connection to the hub.
        tasks: Every task of the group in the order of gathered values.
        facts: What each task said of itself at the barrier.
        hub: The hub, in the chief's process.
    """

    def __init__(
        self,
        cluster: Cluster,
        link: Link,
        tasks: tuple[Task, ...],
        facts: list[dict[str, Any]],
        hub: Hub | None,
    ):
        self.cluster = cluster
        self.tasks = tasks
        self.facts = facts
        self._link = link
        self._hub = hub
        self._state = threading.Condition()
        self._round = 0
        self._reply: dict[str, Any] | None = None
        self._roster = Roster(cluster)
        self._news: dict[str, list[Any]] = {}
        self._listeners: dict[str, Callable[[Any], None]] = {}
        self._region: str | Region = Region.UNMARKED
        self._broken: str | None = None
        self._examined: BaseException | None = None
        self._doom: Doom | None = None

    def start(self) -> Group:
        """Starts listening to the others; called once, by the barrier."""
        self._link.start(self._take, self._chief_is_gone)
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.leave)
        return self

    @property
    def size(self) -> int:
        return len(self.tasks)

    @property
    def rank(self) -> int:
        """Index of this task in `tasks`, and so of its value among those gathered."""
        return self.tasks.index(self.cluster.task)

    @property
    def chief_rank(self) -> int:
        """Index of the chief in `tasks`."""
        return self.tasks.index(self.cluster.chief)

    def all_gather(self, name: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Returns the value of every task, in the order of `tasks`.

        Args:
            name: The point in the program; every task must be at the same one.
            value: Anything that JSON can hold.
            timeout: Seconds to wait for the others; None waits as long as they live, and the
                log names those missing every 30 s.

        Raises:
            DisagreementError: Another task is at another point, or has ended.
            PeerLostError: Another task died, or did not come within `timeout`.
        """
        if self.size == 1:
            return [value]
        with self._state:
            self._raise_if_lost(name)
            self._reply = None
        self._round += 1
        self._send({"t": "gather", "name": name, "value": value, "round": self._round})
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._state:
            while self._reply is None:
                self._raise_if_lost(name)
                left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if left <= 0:
                    raise PeerLostError(
                        f"every task at {name!r} within {timeout:.0f} s",
                        "no answer from some",
                        "look at the logs of the other tasks",
                    )
                self._state.wait(left)
            reply = self._reply
        if reply.get("error") == "places":
            # Who has ended may have died of something that says more. Who was at another place may
            # have died since, of this very disagreement.
            if not all(place for _, _, place in reply["places"]):
                with self._state:
                    self._raise_if_lost(name)
            raise words.disagreement(reply["places"])
        if "error" in reply:
            with self._state:
                self._state.wait_for(lambda: bool(self._roster.lost), timeout=5.0)
                self._raise_if_lost(name)
        values: list[Any] = reply["values"]
        return values

    def raise_if_lost(self, name: str) -> None:
        """Raises `PeerLostError` if a task is known to be lost, to have failed or to have ended.

        Args:
            name: The point in the program, for the message.
        """
        with self._state:
            self._raise_if_lost(name)
            if self._roster.missed:
                raise self._peer_error(name)

    def announce(self, topic: str, value: Any) -> None:
        """Tells every task something that they may want to know; waits for nobody."""
        if self.size > 1:
            self._send({"t": "news", "topic": topic, "value": value})

    def listen(self, topic: str, hear: Callable[[Any], None] | None) -> None:
        """Has `hear` called with all that is announced on `topic`, by a thread; None ends it."""
        with self._state:
            if hear is None:
                self._listeners.pop(topic, None)
                return
            self._listeners[topic] = hear

    def wait_for_news(
        self, topic: str, enough: Callable[[list[Any]], bool], timeout: float
    ) -> bool:
        """Waits until `enough` is true of all values announced so far on `topic`.

        Returns:
            Whether it came true within `timeout` seconds, before a task was lost and before the
            chief left.
        """
        deadline = time.monotonic() + timeout
        with self._state:
            while not enough(self._news.get(topic, [])):
                left = deadline - time.monotonic()
                if left <= 0 or self._roster.lost or self.cluster.chief in self._roster.left:
                    return False
                self._state.wait(min(1.0, left))
        return True

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Marks work that needs every task, so that it cannot outlive one of them.

        An error raised inside, after a task was lost, comes out as `PeerLostError`. If the code
        inside is stuck in native code and cannot raise, the process ends with exit code 1 and the
        same message, 20 s after the loss was seen.
        """
        outer, self._region = self._region, name
        try:
            yield
            self._broken = self._examined = None
        except BaseException as error:
            # Should this end the process by sys.exit(), nothing else would tell why.
            self._broken = words.in_one_line(error)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, (PeerLostError, DisagreementError)):
                raise
            # The news of a death may be a moment behind the error that it caused. An outer mark
            # need not wait for it again.
            if symptoms.is_of_lost_peer(error) and error is not self._examined:
                self._examined = error
                with self._state:
                    self._state.wait_for(self._somebody_is_missed, timeout=NEWS_SECONDS)
            with self._state:
                self._raise_if_lost(name, error)
                if self._roster.missed and symptoms.is_of_lost_peer(error):
                    raise self._peer_error(name) from error
            raise
        finally:
            self._region = outer

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Marks work inside of `together` that needs nobody and must not be cut short by a loss."""
        outer, self._region = self._region, Region.ALONE
        try:
            yield
        finally:
            self._region = outer

    def leave(self, reason: str | None = None) -> None:
        """Leaves the group in order; the others are told. The chief waits for those still busy.

        Args:
            reason: What went wrong in this task, or None at a normal end.
        """
        with self._state:
            if self._link.over:
                return
        if reason is None:
            reason = words.uncaught() or self._broken
        with contextlib.suppress(OSError):
            self._link.send({"t": "bye", "reason": reason})
        if self._hub is not None and reason is None:
            self._wait_for_farewells()
        elif self._hub is not None:
            # The hub, which ends with this process, tells the chief last.
            with self._state:
                self._state.wait_for(lambda: self.cluster.task in self._roster.left, timeout=1.0)
        with self._state:  # Who notes a loss has looked whether this task is done.
            self._link.stop()
        if reason is None:
            self._link.close()
        # After a failure the connection closes with the process, which tells the others when.

    def wait_until_left(self, task: Task) -> str | None:
        """Waits until `task` has left or is lost; returns what went wrong there, or None."""
        roster = self._roster
        with self._state:
            self._state.wait_for(lambda: task in roster.left or task in roster.lost)
            problem = roster.lost.get(task) or roster.left.get(task)
            if problem:
                # The first process of a job to end with an error is taken for its reason.
                self._state.wait_for(
                    lambda: task in roster.lost or task in roster.gone, LAST_WORDS_SECONDS
                )
            return problem

    # Single tasks, for those who can go on without some.

    def state_of(self, task: Task) -> State:
        """Returns what is known of `task`: "alive", "silent", "lost" or "left".

        A worker of a cluster with parameter servers is silent while it is stopped or cannot be
        reached, lost when its process has ended, and alive again when it was started again.
        """
        with self._state:
            return self._roster.state_of(task)

    def starts_of(self, task: Task) -> int:
        """Returns which start of `task` is in the group: 1, then one more after every return."""
        with self._state:
            return self._roster.starts_of(task)

    def silent_for(self, task: Task) -> float:
        """Returns how many seconds ago `task` was last heard of; known to the chief, else 0.

        A living task says something every `TFDIST_SILENCE_TIMEOUT` / 8 seconds (4.4 by default).
        """
        return self._hub.silent_for(task) if self._hub is not None else 0.0

    @property
    def cannot_be_taken_down(self) -> bool:
        """Whether TensorFlow in this process may wait for tasks that are gone when it ends."""
        with self._state:
            return self._coordinates and self._roster.has_missed_any

    @property
    def _coordinates(self) -> bool:
        return self.cluster.has_parameter_servers and self._hub is not None

    def _somebody_is_missed(self) -> bool:
        return bool(self._roster.lost or self._roster.missed)

    def _wait_for_farewells(self) -> None:
        """TensorFlow's coordination lives in the chief: it must not end before the others."""
        serving = self.cluster.has_parameter_servers
        limit = SERVER_FAREWELL_SECONDS if serving else FAREWELL_SECONDS
        deadline = time.monotonic() + limit
        remind = time.monotonic() + 30.0
        with self._state:
            while not self._roster.lost:
                busy = sorted(self._roster.present - {self.cluster.task})
                now = time.monotonic()
                if not busy or now > deadline:
                    return
                if now > remind:
                    remind = now + 30.0
                    log.info("done; waiting for %s to end", ", ".join(map(str, busy)))
                self._state.wait(0.5)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._link.send(message)
        except OSError as error:
            self._chief_is_gone(str(error))

    # What the threads of the link do.

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.get("t")
        hear = None
        with self._state:
            if kind == "gathered":
                if message.get("round") == self._round:  # Not one that came after its timeout.
                    self._reply = message
            elif kind == "news":
                self._news.setdefault(message["topic"], []).append(message["value"])
                hear = self._listeners.get(message["topic"])
            elif "task" in message and self._roster.hear(message) and not self._link.over:
                self._arm()
            self._state.notify_all()
        if hear is not None:
            hear(message["value"])

    def _chief_is_gone(self, reason: str) -> None:
        chief = self.cluster.chief
        with self._state:
            if self._link.over:
                return
            self._roster.gone.add(chief)
            self._state.notify_all()
            if chief in self._roster.left:
                self._link.stop()
                return
            if self._roster.note_loss(chief, reason):
                self._arm()
            self._state.notify_all()

    def _arm(self) -> None:
        """Gives the main thread time to notice; then ends the process in its place."""
        if self._doom is None:
            self._doom = Doom(
                NOTICE_SECONDS,
                region=self._where,
                waits=symptoms.is_in_operation,
                error=self._locked_peer_error,
                over=lambda: self._link.over,
            )
            self._doom.start()

    def _where(self) -> str | Region:
        # Whatever a coordinator does, its variables are gone with the server.
        doomed = self._region is Region.UNMARKED and self._coordinates
        return "the coordinator's work" if doomed else self._region

    def _locked_peer_error(self, name: str) -> PeerLostError:
        with self._state:
            return self._peer_error(name)

    # Messages to the user.

    def _name(self, task: Task) -> str:
        return words.name_of(self.cluster, task)

    def _peer_error(self, name: str) -> PeerLostError:
        return words.lost_peer(self.cluster, name, self._roster.lost, self._roster.left)

    def _raise_if_lost(self, name: str, cause: BaseException | None = None) -> None:
        """Raises if a task is lost or failed; called with the state held."""
        failed = self._roster.failed
        if not self._roster.lost and not failed:
            return
        # Let the task that failed end first: its exit code and last lines are the job's.
        self._state.wait_for(lambda: failed <= self._roster.gone, timeout=LAST_WORDS_SECONDS)
        raise self._peer_error(name) from cause

    def _after_fork(self) -> None:
        # A forked child would keep the connections open after this task has died.
        self._state = threading.Condition()  # Another thread may have held it.
        self._link.abandon()
        for sock in self._hub.sockets() if self._hub else ():
            with contextlib.suppress(OSError):
                sock.close()
        # TensorFlow's own handler of SIGTERM is inherited and does nothing in a child, which then
        # cannot be ended: a multiprocessing pool waits for ever for its workers.
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
