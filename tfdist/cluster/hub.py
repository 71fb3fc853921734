"""The chief's side of the group: one thread that knows every task and answers all of them.

The hub listens on the chief's own TensorFlow address until every task has said hello, then stops
listening so that TensorFlow can, and lives on in the connections that are open. It relays three
things: gathers (everyone's value to everyone, in rounds whose names must agree), the loss of a
task (a closed connection, or silence), and orderly leaving. A worker that the others can do
without is called until it comes back (`recall`), and its silence is news but no loss.
"""

from __future__ import annotations

import dataclasses
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from tfdist.cluster import wire
from tfdist.cluster.recall import Answer
from tfdist.cluster.recall import Recall
from tfdist.cluster.topology import Task

log = logging.getLogger("absl")

#: A round of gathering that fewer than all tasks have joined names the missing ones this often.
REMIND_SECONDS = 30.0
_TICK_SECONDS = 1.0
#: Tasks at the barrier say something every 5 s; one that has not is taken to have ended if
#: another process comes with the same task.
_QUIET_SECONDS = 12.0


@dataclasses.dataclass
class _Member:
    sock: socket.socket
    decoder: wire.Decoder = dataclasses.field(default_factory=wire.Decoder)
    task: Task | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    heard: float = dataclasses.field(default_factory=time.monotonic)
    #: The gather this member waits in, or None.
    name: str | None = None
    value: Any = None
    round: Any = None
    left: bool = False
    silent: bool = False


class Hub(threading.Thread):
    """Serves the tasks of one cluster until they have all left.

    Args:
        tasks: Every task that must arrive, in the order in which values are gathered.
        listener: Listening socket, closed once all have arrived.
        local: The hub's end of the chief's own connection.
        digest: Identifies the job; a hello with another digest is turned away.
        silence_seconds: A task that says nothing for so long is lost.
        recall: Knows and calls the tasks that may come back.
    """

    def __init__(
        self,
        tasks: tuple[Task, ...],
        listener: socket.socket,
        local: socket.socket,
        digest: str,
        silence_seconds: float,
        recall: Recall,
    ):
        super().__init__(name="tfdist-hub", daemon=True)
        self._tasks = tasks
        self._listener: socket.socket | None = listener
        self._digest = digest
        self._silence = silence_seconds
        self._recall = recall
        self._selector = selectors.DefaultSelector()
        self._members: dict[socket.socket, _Member] = {}
        self._here: dict[Task, _Member] = {}
        self._lost: dict[Task, str] = {}
        self._announced = False
        self._given_up = threading.Event()
        self._stopped = threading.Event()
        self._reminded = 0.0
        self._sockets = [listener, local]
        self._local = local
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._add(local)

    def sockets(self) -> list[socket.socket]:
        """Returns every socket held, to be closed in a forked child."""
        return [*self._sockets, *self._members]

    def silent_for(self, task: Task) -> float:
        """Returns how many seconds ago `task` was last heard of."""
        member = self._here.get(task)
        return time.monotonic() - member.heard if member is not None else 0.0

    def stop(self) -> None:
        """Ends the hub and closes every connection."""
        self._stopped.set()
        self.join(2 * _TICK_SECONDS)

    def give_up(self) -> bool:
        """Ends the barrier: those who are here are told who was missing, in the chief's words.

        Returns:
            False if the barrier has just opened after all, in which case nothing ends.
        """
        self._given_up.set()
        self.join(2 * _TICK_SECONDS)
        return not self._announced

    def run(self) -> None:
        try:
            self._serve()
        finally:
            self._recall.stop()
            for sock in self.sockets():
                sock.close()

    def _serve(self) -> None:
        tick = min(_TICK_SECONDS, self._silence / 4)
        last = time.monotonic()
        while self._members or self._listener is not None:
            events = self._selector.select(tick)
            if self._given_up.is_set() and not self._announced:
                missing = [[t.type, t.index] for t in self.missing]
                self._tell_all({"t": "failed", "tasks": missing})
                return
            if self._stopped.is_set():
                return
            now = time.monotonic()
            if now - last > self._silence / 2:
                # This very thread was asleep (the machine was suspended, the process stopped):
                # the silence of the others says nothing about them.
                for member in self._members.values():
                    member.heard = now
            last = now
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            for task, answer in self._recall.arrived():
                self._welcome_back(task, answer)
            self._check_silence(now)
            self._remind(now)

    # Connections.

    def _add(self, sock: socket.socket) -> _Member:
        wire.keep_private(sock).settimeout(10.0)
        self._members[sock] = member = _Member(sock)
        self._selector.register(sock, selectors.EVENT_READ)
        return member

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._add(sock)

    def _read(self, sock: socket.socket) -> None:
        member = self._members.get(sock)
        if member is None:
            return
        try:
            data = sock.recv(65536)
            if not data:
                raise wire.WireError("its connection closed")
            messages = member.decoder.feed(data)
        except OSError as error:
            self._drop(member, str(error))
            return
        member.heard = time.monotonic()
        if member.silent and member.task is not None:
            member.silent = False
            self._recall.forget(member.task)
            self._tell_all({"t": "heard", "task": [member.task.type, member.task.index]})
        for message in messages:
            self._handle(member, message)

    def _drop(self, member: _Member, reason: str) -> None:
        """Forgets a connection; a task that had not left is lost, and the others are told."""
        if member.sock not in self._members:
            return
        self._forget(member)
        task = member.task
        if task is None or self._here.get(task) is not member:
            return
        if not self._announced:
            del self._here[task]  # It may come back before the barrier opens.
            self._tell_missing()
            return
        if member.left:
            self._tell_all({"t": "gone", "task": [task.type, task.index]})
        else:
            self._lost[task] = reason
            self._tell_all({"t": "lost", "task": [task.type, task.index], "reason": reason})
        self._recall.want(task)
        self._settle()

    def _welcome_back(self, task: Task, answer: Answer) -> None:
        """Takes a task in again that was started again."""
        hello, problem = answer.message, None
        if hello.get("digest") != self._digest:
            problem = "it belongs to another job or describes another cluster"
        elif hello.get("task") != [task.type, task.index]:
            problem = f"{task} was expected at its address"
        member = self._add(answer.sock)
        if problem:
            self._tell(member, {"t": "refused", "reason": problem})
            self._drop(member, problem)
            self._recall.want(task)
            return
        old = self._here.get(task)
        if old is not None and old.sock in self._members:
            # It was silent because its machine is gone; nobody has told of its end.
            self._forget(old)
        member.decoder, member.task, member.facts = answer.decoder, task, hello.get("facts") or {}
        self._here[task] = member
        self._lost.pop(task, None)
        self._tell(member, {"t": "go", "facts": [self._here[t].facts for t in self._tasks]})
        self._tell_all({"t": "back", "task": [task.type, task.index]})

    def _forget(self, member: _Member) -> None:
        del self._members[member.sock]
        self._selector.unregister(member.sock)
        member.sock.close()

    def _tell(self, member: _Member, message: dict[str, Any]) -> None:
        try:
            member.sock.sendall(wire.pack(message))
        except ConnectionError:
            pass  # It may still hold a last word (a bye): `_read` finds it, and the end.
        except OSError as error:
            self._drop(member, str(error))

    def _tell_all(self, message: dict[str, Any]) -> None:
        for member in self._chief_last(self._members.values()):
            # What nobody reads fills up, and then holds up this thread.
            if member.task is not None and not (member.silent and message["t"] == "news"):
                self._tell(member, message)

    def _chief_last(self, members: Iterable[_Member]) -> list[_Member]:
        # It may end the process, and this thread with it, once it knows.
        return sorted(members, key=lambda member: member.sock is self._local)

    def _check_silence(self, now: float) -> None:
        for member in list(self._members.values()):
            silent = now - member.heard
            if silent <= self._silence or member.silent:
                continue
            task = member.task
            if task is None or not self._recall.covers(task) or not self._announced:
                self._drop(member, f"it has said nothing for {silent:.0f} s")
                continue
            member.silent = True
            self._tell_all({"t": "silent", "task": [task.type, task.index]})
            self._recall.want(task)

    # Messages.

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        kind = message.get("t")
        if kind == "hello":
            self._hello(member, message)
        elif member.task is None:
            self._drop(member, "it did not say hello")
        elif kind == "beat":
            self._tell(member, {"t": "beat"})
        elif kind == "gather":
            member.name, member.value = str(message.get("name")), message.get("value")
            member.round = message.get("round")
            self._settle()
        elif kind == "news":
            self._tell_all(message)
        elif kind == "bye":
            member.left = True
            if member.sock is self._local:
                self._recall.stop()
            self._tell_all(
                {
                    "t": "left",
                    "task": [member.task.type, member.task.index],
                    "reason": message.get("reason"),
                }
            )
            self._settle()

    def _hello(self, member: _Member, message: dict[str, Any]) -> None:
        try:
            kind, index = message["task"]
            task = Task(str(kind), int(index))
        except (KeyError, TypeError, ValueError):
            self._drop(member, "it did not say which task it is")
            return
        problem, retry = None, False
        if message.get("digest") != self._digest:
            problem = "it belongs to another job or describes another cluster"
        elif task not in self._tasks:
            problem = f"{task} is not in this cluster"
        elif task in self._here and not self._announced:
            # It may have started again on a machine whose end nobody was told of.
            if time.monotonic() - self._here[task].heard > _QUIET_SECONDS:
                self._drop(self._here[task], "it started again")
            else:
                problem = f"{task} is already here; two processes have the same task"
                retry = True
        if problem:
            self._tell(member, {"t": "refused", "reason": problem, "retry": retry})
            self._drop(member, problem)
            return
        member.task, member.facts = task, message.get("facts") or {}
        self._here[task] = member
        if self.missing:
            self._tell_missing()
        else:
            # TensorFlow of this process needs the port before any other task may try it.
            if self._listener is not None:
                self._selector.unregister(self._listener)
                self._listener.close()
                self._listener = None
            self._announced = True
            facts = [self._here[t].facts for t in self._tasks]
            self._tell_all({"t": "go", "facts": facts})

    def _tell_missing(self) -> None:
        self._tell_all({"t": "missing", "tasks": [[t.type, t.index] for t in self.missing]})

    @property
    def missing(self) -> tuple[Task, ...]:
        """Tasks that have not said hello yet."""
        return tuple(t for t in self._tasks if t not in self._here)

    def _settle(self) -> None:
        """Answers the gather in which tasks wait, once it is decided."""
        waiting = [m for m in self._here.values() if m.name is not None]
        if not waiting:
            return
        gone = {t: m for t, m in self._here.items() if m.name is None and m.left}
        names = {m.name for m in waiting}
        if self._lost:
            reply: dict[str, Any] = {"t": "gathered", "error": "lost"}
        elif len(names) > 1 or gone:
            places = [[t.type, t.index, m.name] for t, m in self._here.items() if m.name or m.left]
            reply = {"t": "gathered", "error": "places", "places": places}
        elif len(waiting) == len(self._tasks):
            values = [self._here[t].value for t in self._tasks]
            reply = {"t": "gathered", "values": values}
        else:
            return
        for member in self._chief_last(waiting):
            member.name = member.value = None
            self._tell(member, {**reply, "round": member.round})

    def _remind(self, now: float) -> None:
        waiting = [m for m in self._here.values() if m.name is not None]
        if not waiting:
            self._reminded = now
        elif now - self._reminded > REMIND_SECONDS:
            self._reminded = now
            missing = [str(t) for t, m in self._here.items() if m.name is None]
            log.warning("still waiting for %s at %r", ", ".join(missing), waiting[0].name)
