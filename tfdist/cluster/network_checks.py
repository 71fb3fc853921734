"""Checks of what lies between the tasks: names, ports, proxies. Part of `tfdist doctor`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import ipaddress
import os
import selectors
import shlex
import socket
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

from tfdist.cluster import rendezvous
from tfdist.cluster.checks import Check
from tfdist.cluster.checks import Status
from tfdist.cluster.checks import are
from tfdist.cluster.checks import in_thread
from tfdist.cluster.checks import some
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import TfdistError

#: What became of a connection, the best first.
Reach = Literal["connected", "refused", "timeout", "unreachable", "nameless"]
_SocketAddress = tuple[Any, ...]

#: Connections tried at a time, well below the usual limit of 1024 open files.
_AT_A_TIME = 256
#: The variables that gRPC reads; it does not know their upper-case spellings.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a host name resolves to.

    Attributes:
        addresses: Pairs of address family and socket address (with port 0).
        problem: Why there is none, or "".
    """

    addresses: tuple[tuple[int, _SocketAddress], ...] = ()
    problem: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(address[0]) for _, address in self.addresses))

    @property
    def only_loopback(self) -> bool:
        """Whether whoever uses the name reaches nobody but itself."""
        found = [ipaddress.ip_address(text.partition("%")[0]) for text in self.texts]
        return bool(found) and all(ip.is_loopback or ip.is_unspecified for ip in found)


def hosts_of(cluster: Cluster) -> tuple[str, ...]:
    """Returns the hosts that this task will talk to, itself included; none where it is alone."""
    if not peers_of(cluster) and len(cluster.hosts) < 2:
        return ()
    named = [rendezvous.split_address(address)[0] for _, address in _addressed(cluster)]
    return tuple(dict.fromkeys([*named, *cluster.hosts]))


def peers_of(cluster: Cluster) -> tuple[Task, ...]:
    """Returns the other tasks whose address is known; an evaluator meets nobody."""
    if cluster.is_evaluator:
        return ()
    return tuple(task for task, _ in _addressed(cluster) if task != cluster.task)


def resolve(
    hosts: Sequence[str],
    timeout: float,
    getaddrinfo: Callable[..., Sequence[tuple[Any, ...]]] = socket.getaddrinfo,
) -> dict[str, Resolved]:
    """Resolves host names side by side.

    Args:
        hosts: Names or IP addresses.
        timeout: Seconds; a resolver that does not answer has no limit of its own.
        getaddrinfo: Resolves one, as `socket.getaddrinfo` does.
    """

    def one(host: str) -> Resolved:
        try:
            found = getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            return Resolved(problem=error.strerror or str(error))
        except UnicodeError:
            return Resolved(problem="it cannot be a host name")
        return Resolved(tuple(dict.fromkeys((int(info[0]), info[4]) for info in found)))

    futures = {host: in_thread(functools.partial(one, host)) for host in hosts}
    concurrent.futures.wait(futures.values(), timeout)
    late = Resolved(problem=f"no answer within {timeout:g} s")
    return {host: f.result() if f.done() else late for host, f in futures.items()}


def check_names(cluster: Cluster, names: Mapping[str, Resolved]) -> Check:
    """Checks that every host resolves, and to an address that makes sense from here.

    Args:
        cluster: The cluster.
        names: Every host of the cluster and what it resolves to.
    """
    if not names:
        return Check("names", "skipped", "this task talks to no other")
    bad = [f"{host} ({found.problem})" for host, found in names.items() if found.problem]
    if bad:
        return Check(
            "names",
            "failed",
            f"{', '.join(bad)} {are(bad, 'does', 'do')} not resolve",
            "correct the name, or add it to DNS or /etc/hosts of this machine; on Kubernetes, a "
            "pod has a name only under a headless service and, until it is ready, with "
            "publishNotReadyAddresses",
        )
    own = _own_host(cluster)
    looped = [h for h, found in names.items() if h != own and found.only_loopback]
    hidden = [h for h in looped if not _means_loopback(h)]
    if hidden:
        return Check(
            "names",
            "warning",
            f"{', '.join(f'{h} is {names[h].texts[0]}' for h in hidden)} here, which is this "
            "machine itself",
            "unless all tasks run on this machine, remove "
            f"{are(hidden, 'that line', 'those lines')} from /etc/hosts",
        )
    if looped and not all(found.only_loopback for found in names.values()):
        return Check(
            "names",
            "warning",
            f"{', '.join(looped)} means each task's own machine, and other tasks are elsewhere",
            "give every task an address that all machines can reach",
        )
    if own in names and not any(_is_local(*address) for address in names[own].addresses):
        return Check(
            "names",
            "warning",
            f"{own}, the host of {cluster.task}, is {', '.join(names[own].texts)}, which is no "
            "address of this machine",
            f"look whether this machine is {cluster.task}; behind a load balancer or NAT this is "
            "as it should be",
        )
    shown = [
        host if (host,) == f.texts else f"{host} is {'/'.join(f.texts)}"
        for host, f in names.items()
    ]
    return Check("names", "ok", some(shown))


def check_port(cluster: Cluster) -> Check:
    """Checks that this task can listen on its own port, as TensorFlow will.

    Args:
        cluster: The cluster.
    """
    address = cluster.address(cluster.task)
    if cluster.is_evaluator or not address:
        return Check("port", "skipped", "this task listens on no port")
    try:
        rendezvous.listen(cluster).close()
    except TfdistError as error:
        port = rendezvous.split_address(address)[1]
        show = f"; `ss -ltnp 'sport = :{port}'` shows who has it"
        return Check("port", "failed", f"{address}: {error.received}", f"{error.fix}{show}")
    return Check("port", "ok", f"{address} is free")


def probe(
    targets: Mapping[Task, Sequence[tuple[int, _SocketAddress]]], timeout: float
) -> dict[Task, tuple[Reach, str]]:
    """Connects to every task, to all its addresses at once, and hangs up.

    Args:
        targets: Task to its address families and socket addresses.
        timeout: Seconds.

    Returns:
        Task to the best that one of its addresses did, and the system's words for it.
    """
    pairs = [(task, *address) for task, addresses in targets.items() for address in addresses]
    order: tuple[Reach, ...] = ("connected", "refused", "timeout", "unreachable", "nameless")
    best: dict[Task, tuple[Reach, str]] = dict.fromkeys(targets, ("nameless", ""))
    for first in range(0, len(pairs), _AT_A_TIME):
        for task, reach, why in _connect_all(pairs[first : first + _AT_A_TIME], timeout):
            if order.index(reach) < order.index(best[task][0]):
                best[task] = (reach, why)
    return best


def _connect_all(
    pairs: Sequence[tuple[Task, int, _SocketAddress]], timeout: float
) -> Iterator[tuple[Task, Reach, str]]:
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for task, family, address in pairs:
            try:
                sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError as error:  # This machine does not have the address family.
                yield task, "unreachable", os.strerror(error.errno or 0)
                continue
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code == errno.EINPROGRESS:
                selector.register(sock, selectors.EVENT_WRITE, task)
            else:
                yield task, *_outcome(sock, code)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]
                selector.unregister(sock)
                yield key.data, *_outcome(sock, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        for key in selector.get_map().values():
            yield key.data, "timeout", f"no answer within {timeout:g} s"


def _outcome(sock: socket.socket, code: int) -> tuple[Reach, str]:
    if code == 0:
        # A port that is free on this machine may be given to the connection itself, which then
        # meets itself.
        with contextlib.suppress(OSError):
            if sock.getsockname() == sock.getpeername():
                code = errno.ECONNREFUSED
    if code == 0:
        return "connected", ""
    if code == errno.ECONNREFUSED:
        return "refused", os.strerror(code)
    return ("timeout" if code == errno.ETIMEDOUT else "unreachable"), os.strerror(code)


REACH_FIX: dict[Reach, str] = {
    "connected": "",
    "refused": "start that task, whose port opens when its TensorFlow starts; if it runs already, "
    "look whether it has this address",
    "timeout": "look whether that host is up and whether a firewall, security group or network "
    "policy lets this port through",
    "unreachable": "look whether that address is right and in a network that this machine can "
    "reach",
    "nameless": "make its name resolve first",
}


def check_peers(cluster: Cluster, seen: Mapping[Task, tuple[Reach, str]], timeout: float) -> Check:
    """Checks that the ports of the other tasks can be reached; they need not have started.

    Args:
        cluster: The cluster.
        seen: What became of a connection to each of the other tasks.
        timeout: The deadline the connections had, in seconds.
    """
    if not seen:
        return Check("peers", "skipped", "no other task has an address")
    status: Status = "ok"
    details, fixes = [], []
    words: dict[Reach, str] = {
        "unreachable": "cannot be reached",
        "timeout": f"gave no answer within {timeout:g} s",
        "nameless": "not tried, because the name does not resolve",
        "refused": "not started yet? The host answers and refuses the connection",
        "connected": "answers",
    }
    for reach, text in words.items():
        tasks = [task for task, (how, _) in seen.items() if how == reach]
        if not tasks:
            continue
        why = sorted({reason for how, reason in seen.values() if how == reach == "unreachable"})
        who = some([f"{task} ({cluster.address(task)})" for task in tasks])
        details.append(f"{who}: {text}" + (f" ({', '.join(why)})" if why else ""))
        if reach != "connected":
            fixes.append(REACH_FIX[reach])
            bad: Status = "warning" if reach == "refused" else "failed"
            status = "failed" if "failed" in (status, bad) else bad
    return Check("peers", status, "; ".join(details), "; ".join(fixes))


def targets_of(
    cluster: Cluster, names: Mapping[str, Resolved]
) -> dict[Task, list[tuple[int, _SocketAddress]]]:
    """Returns the addresses to connect to for each of the other tasks."""
    found = {}
    for task in peers_of(cluster):
        host, port = rendezvous.split_address(cluster.address(task))
        addresses = names[host].addresses
        found[task] = [(family, (a[0], port, *a[2:])) for family, a in addresses]
    return found


def check_proxies(hosts: Sequence[str], environ: Mapping[str, str]) -> Check:
    """Checks that connections between the tasks do not go through a proxy.

    gRPC sends even those to 127.0.0.1 through it, unless the host ends in an entry of `no_proxy`.

    Args:
        hosts: Hosts of the cluster, none for a task that is alone.
        environ: Environment variables.
    """
    proxies = [name for name in _PROXIES if environ.get(name)]
    if not proxies:
        return Check("proxy", "ok", "no proxy is set")
    name = "no_grpc_proxy" if "no_grpc_proxy" in environ else "no_proxy"
    # gRPC reads the lower-case name alone, but who wrote the other one meant it too.
    listed = environ.get(name, environ.get("NO_PROXY", "") if name == "no_proxy" else "")
    entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
    effective = entries if name in environ else []
    bare = [host for host in hosts if not any(_covers(entry, host) for entry in effective)]
    if not bare:
        why = f"{name} covers every host of the cluster" if hosts else "this task talks to no other"
        return Check("proxy", "ok", f"{', '.join(proxies)} {are(proxies, 'is', 'are')} set; {why}")
    value = ",".join(dict.fromkeys([*entries, *bare]))
    return Check(
        "proxy",
        "warning",
        f"{', '.join(proxies)} {are(proxies, 'is', 'are')} set and {name} does not cover "
        f"{some(bare)}; TensorFlow then tries to reach the other tasks through the proxy and "
        "never starts",
        f"export {name}={shlex.quote(value)}",
    )


def _addressed(cluster: Cluster) -> list[tuple[Task, str]]:
    found = [(task, cluster.address(task)) for task in cluster.tasks]
    return [(task, address) for task, address in found if address]


def _own_host(cluster: Cluster) -> str:
    address = cluster.address(cluster.task)
    if address:
        return rendezvous.split_address(address)[0]
    return cluster.hosts[cluster.task.index] if cluster.task.index < len(cluster.hosts) else ""


def _means_loopback(host: str) -> bool:
    """Whether the name itself says that it is this machine."""
    if host.lower() == "localhost" or host.lower().startswith("localhost."):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(family: int, address: _SocketAddress) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(address)  # Only an address of this machine can be bound.
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _covers(entry: str, host: str) -> bool:
    """Whether gRPC takes `host` for one that an entry of `no_proxy` names."""
    if host.lower().endswith(entry.lower()):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
