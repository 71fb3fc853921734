"""The start barrier: nobody starts TensorFlow before everybody is there, and nobody waits for ever.

TensorFlow's own start-up waits without a limit and without a word for a task that never comes
(tensorflow issues 39922 and 98217). So before it, every task meets the chief at the chief's own
address: the chief listens on the port that TensorFlow will use a moment later, the others connect
and say who they are and which versions they run. Until all are there, those who wait are told
every 30 s who is missing; at the deadline all fail and name the missing with their addresses.
The connections stay open afterwards as the `Group`.

A worker of a cluster with parameter servers may come when the others have long begun, because it
was started again. It cannot know, so it waits at the chief's door and at its own (`recall`).
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import logging
import os
import platform
import random
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from tfdist._version import __version__
from tfdist.cluster import wire
from tfdist.cluster import words
from tfdist.cluster.dial import connect_once
from tfdist.cluster.dial import split_address as split_address
from tfdist.cluster.group import Group
from tfdist.cluster.hub import Hub
from tfdist.cluster.link import Link
from tfdist.cluster.recall import Answer
from tfdist.cluster.recall import Door
from tfdist.cluster.recall import Recall
from tfdist.cluster.roster import is_replaceable
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import ClusterError
from tfdist.errors import RendezvousError

log = logging.getLogger("absl")

DEFAULT_TIMEOUT = 300.0
DEFAULT_PATIENCE = 1800.0
#: A task that says nothing for so long is lost. With the 20 s that the main thread then has to
#: notice (`group.NOTICE_SECONDS`), a job ends within a minute of losing a task.
SILENCE_SECONDS = 35.0
REMIND_SECONDS = 30.0
_CHIEF_FIRST_SECONDS = 3.0
#: A task that seems to be there already is tried again so often, 3 s apart: longer than
#: `hub._QUIET_SECONDS`, so that a task that has started again gets its place.
_REFUSALS = 5


def timeout_from(environ: Mapping[str, str]) -> float:
    """Returns the barrier's deadline in seconds: `TFDIST_RENDEZVOUS_TIMEOUT`, or 300.

    Raises:
        ClusterError: The variable is not a positive number.
    """
    return _seconds(environ, "TFDIST_RENDEZVOUS_TIMEOUT", DEFAULT_TIMEOUT)


def patience_from(environ: Mapping[str, str]) -> float:
    """Returns how late a task may be for an agreement: `TFDIST_AGREEMENT_TIMEOUT`, or 1800 s.

    Raises:
        ClusterError: The variable is not a positive number.
    """
    return _seconds(environ, "TFDIST_AGREEMENT_TIMEOUT", DEFAULT_PATIENCE)


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    text = environ.get(variable, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ClusterError(
            f"{variable} to be a positive number of seconds",
            repr(text),
            f"write for example {variable}={default:.0f}",
        )
    return seconds


def versions() -> dict[str, str]:
    """Returns the versions that must be the same in every task, without importing anything."""
    found = {"tfdist": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for package, names in {
        "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly"),
        "keras": ("keras",),
    }.items():
        for name in names:
            try:
                found[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def join(cluster: Cluster, timeout: float = DEFAULT_TIMEOUT, job: str = "") -> Group:
    """Waits at the barrier and returns the group of all tasks.

    Args:
        cluster: The cluster; every address of it must be known.
        timeout: Seconds until the barrier fails.
        job: Name of this run; tasks of another run are turned away. May be empty.

    Raises:
        RendezvousError: Tasks were missing at the deadline, or this task's port is in use.
        ClusterError: Tasks run different versions, or describe different clusters.
    """
    deadline = time.monotonic() + timeout
    silence = _seconds(os.environ, "TFDIST_SILENCE_TIMEOUT", SILENCE_SECONDS)
    listener = listen(cluster)
    tasks = cluster.tasks
    hub = door = None
    sock: socket.socket | None = None
    if cluster.task == cluster.chief:
        sock, hubs = socket.socketpair()
        again = {t: cluster.address(t) for t in tasks if is_replaceable(cluster, t)}
        hub = Hub(tasks, listener, hubs, digest(cluster, job), silence, Recall(again))
        hub.start()
    elif is_replaceable(cluster, cluster.task):
        door = Door(listener, _hello(cluster, job))
        door.start()
    else:
        # Only the chief listens; the port was bound to see that TensorFlow will get it.
        listener.close()
    try:
        if sock is None:
            sock = _connect(cluster, deadline, timeout, door)
        answer = _wait_for_all(cluster, sock, hub, door, deadline, timeout, job)
        link = Link(answer.sock, answer.decoder, silence, answer.rest)
        group = Group(cluster, link, tasks, answer.message["facts"], hub)
        _check_versions(group)
    except BaseException:
        if hub is not None:
            hub.stop()
        raise
    finally:
        if door is not None:
            door.close()
    return group.start()


def digest(cluster: Cluster, job: str) -> str:
    """Returns what the tasks of one run have in common: its name and all addresses."""
    text = repr([job, [(task.type, task.index, cluster.address(task)) for task in cluster.tasks]])
    return hashlib.sha256(text.encode()).hexdigest()


def _hello(cluster: Cluster, job: str) -> dict[str, Any]:
    return {
        "t": "hello",
        "task": [cluster.task.type, cluster.task.index],
        "digest": digest(cluster, job),
        "facts": {
            "versions": versions(),
            "host": socket.gethostname(),
            "nonce": secrets.token_hex(8),
        },
    }


def listen(cluster: Cluster) -> socket.socket:
    """Binds this task's own port, on every interface, as TensorFlow will.

    Raises:
        RendezvousError: The port is in use or may not be bound.
    """
    address = cluster.address(cluster.task)
    _, port = split_address(address)
    # TensorFlow binds [::] for both families; a host without IPv6 has 0.0.0.0 only.
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            # Without it, connections of an earlier run in TIME_WAIT would look like a user of the
            # port; with it, a live listener still does.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind((host, port))
            sock.listen(128)
            return sock
        except OSError as error:
            sock.close()
            if family == socket.AF_INET6 and error.errno in (
                errno.EAFNOSUPPORT,
                errno.EADDRNOTAVAIL,
                errno.ENOPROTOOPT,
            ):
                continue
            if error.errno == errno.EADDRINUSE:
                raise RendezvousError(
                    f"port {port} of {cluster.task} ({address}) to be free",
                    "it is in use by another process on this host",
                    "stop that process, or give the task another port",
                ) from error
            raise RendezvousError(
                f"to listen on port {port} of {cluster.task} ({address})",
                str(error),
                "give the task a port that this user may bind",
            ) from error
    raise RendezvousError(f"to listen on port {port} of {cluster.task}", "no network at all")


def _connect(
    cluster: Cluster, deadline: float, timeout: float, door: Door | None
) -> socket.socket | None:
    """Connects to the chief; names that do not resolve yet and refused connections are retried.

    Returns None if the hub has come to this task's own door meanwhile.
    """
    chief = cluster.chief
    host, port = split_address(cluster.address(chief))
    remind = time.monotonic() + REMIND_SECONDS
    pause = 0.05
    while door is None or door.answer is None:
        now = time.monotonic()
        try:
            return wire.keep_private(connect_once(host, port, max(0.1, min(5.0, deadline - now))))
        except (OSError, UnicodeError) as error:
            problem = str(error)
        now = time.monotonic()
        if now >= deadline:
            raise _missing(cluster, (chief,), timeout, problem)
        if now >= remind:
            remind += REMIND_SECONDS
            log.warning("still waiting for %s: %s", _describe(cluster, (chief,)), problem)
        time.sleep(min(pause * random.uniform(0.5, 1.0), max(0.0, deadline - now)))
        pause = min(pause * 1.5, 2.0)
    return None


def _wait_for_all(
    cluster: Cluster,
    sock: socket.socket | None,
    hub: Hub | None,
    door: Door | None,
    deadline: float,
    timeout: float,
    job: str,
) -> Answer:
    chief = cluster.chief
    missing: tuple[Task, ...] = (chief,) if hub is None else cluster.tasks
    remind = time.monotonic() + REMIND_SECONDS
    beat = 0.0
    problem = ""
    decoder = wire.Decoder()
    greeted = False
    refusals = 0
    while True:
        if door is not None and door.answer is not None:
            if sock is not None:
                sock.close()
            return door.answer
        if door is not None and door.refusal:
            raise _refused(cluster, door.refusal)
        assert sock is not None
        now = time.monotonic()
        # The chief knows best who is missing, so the others give it a moment to say so.
        if now >= deadline + (0.0 if hub else _CHIEF_FIRST_SECONDS):
            if hub is None or hub.give_up():
                sock.close()
                raise _missing(cluster, missing, timeout, problem)
            deadline = now + 5.0  # All came in the last moment: "go" is on its way.
        if now >= remind:
            remind += REMIND_SECONDS
            log.warning("still waiting for %s", _describe(cluster, missing))
        try:
            if not greeted:
                sock.sendall(wire.pack(_hello(cluster, job)))
                greeted, beat = True, now + 5.0
            elif now >= beat:
                sock.sendall(wire.pack({"t": "beat"}))
                beat = now + 5.0
            sock.settimeout(min(1.0, max(0.05, deadline - now)))
            data = sock.recv(65536)
            if not data:
                raise wire.WireError("it closed the connection")
            messages = decoder.feed(data)
        except TimeoutError:
            continue
        except OSError as error:
            # Not the barrier: TensorFlow of an earlier run still has the port, or the chief
            # restarts. Come back later.
            sock.close()
            problem = str(error)
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
            missing = (chief,)
            if time.monotonic() >= deadline:
                raise _missing(cluster, missing, timeout, problem) from error
            sock, decoder = _connect(cluster, deadline, timeout, door), wire.Decoder()
            greeted = False
            continue
        for position, message in enumerate(messages):
            kind = message.get("t")
            if kind == "missing":
                missing, problem = tuple(Task(*t) for t in message["tasks"]), ""
            elif kind == "failed":
                sock.close()
                raise _missing(cluster, tuple(Task(*t) for t in message["tasks"]), timeout, "")
            elif kind == "refused" and message.get("retry") and refusals < _REFUSALS:
                refusals += 1
                problem = str(message.get("reason"))
                time.sleep(3.0)
                sock.close()
                sock, decoder = _connect(cluster, deadline, timeout, door), wire.Decoder()
                greeted = False
                break
            elif kind == "refused":
                sock.close()
                raise _refused(cluster, str(message.get("reason")))
            elif kind == "go":
                return Answer(sock, decoder, message, messages[position + 1 :])


def _check_versions(group: Group) -> None:
    seen: dict[str, list[str]] = {}
    for task, facts in zip(group.tasks, group.facts, strict=True):
        text = ", ".join(f"{k} {v}" for k, v in sorted((facts.get("versions") or {}).items()))
        seen.setdefault(text, []).append(str(task))
    if len(seen) > 1:
        raise ClusterError(
            "the same versions in every task",
            "; ".join(f"{', '.join(tasks)}: {text}" for text, tasks in seen.items()),
            "start every task from the same image",
        )


def _describe(cluster: Cluster, tasks: tuple[Task, ...]) -> str:
    return ", ".join(words.name_of(cluster, task) for task in tasks)


def _refused(cluster: Cluster, reason: str) -> ClusterError:
    return ClusterError(
        f"{_describe(cluster, (cluster.chief,))} to accept {cluster.task}",
        reason,
        "give every task the same cluster and its own task, and stop tasks of earlier runs",
    )


def _missing(
    cluster: Cluster, tasks: tuple[Task, ...], timeout: float, problem: str
) -> RendezvousError:
    return RendezvousError(
        f"all {len(cluster.tasks)} tasks of the cluster within {timeout:.0f} s",
        f"still missing {_describe(cluster, tasks)}" + (f" ({problem})" if problem else ""),
        "look whether these tasks were started and whether their addresses can be reached from "
        "here (`tfdist doctor`), or wait longer with --rendezvous-timeout or "
        "TFDIST_RENDEZVOUS_TIMEOUT",
    )


def job_name(environ: Mapping[str, str] | None = None) -> str:
    """Returns the name of this run that the launcher gave it, or ""."""
    return (os.environ if environ is None else environ).get("TFDIST_JOB_ID", "")
