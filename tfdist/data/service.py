"""Where batches are made, if not in the process that trains: `shard(..., service=...)`.

| `service=` | the processes |
|---|---|
| `True` | those of `TFDIST_DATA_SERVICE`; else one of our own |
| a number | those of `TFDIST_DATA_SERVICE`; else so many of our own |
| `"host:port,host:port"`, or a list | `tfdist data-service --port PORT` on those hosts |

`tfdist run --data-workers N` starts processes and sets the variable. Our own are children of this
process: they end with it, and one that has died is started again.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import numbers
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import rendezvous
from tfdist.cluster.dial import split_address
from tfdist.data.lease import Lease
from tfdist.errors import ConfigError
from tfdist.errors import PeerLostError
from tfdist.errors import UnsupportedError

log = logging.getLogger("absl")

#: The variable with the addresses of processes, `host:port,host:port`.
ADDRESSES = "TFDIST_DATA_SERVICE"
#: After so long it is said who is waited for.
_REMIND_SECONDS = 15.0
_AGAIN_SECONDS = 0.1
#: For the others, where one of them is enough.
_OTHERS_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Service:
    """The processes that make batches.

    Attributes:
        addresses: Where they listen; empty where they are children of this process.
        children: How many children there are.
    """

    addresses: tuple[str, ...] = ()
    children: int = 0

    def __str__(self) -> str:
        count = self.children or len(self.addresses)
        where = f" ({', '.join(self.addresses)})" if self.addresses else " of this one's own"
        return f"{count} process{'es' * (count > 1)}{where}"

    @property
    def size(self) -> int:
        """How many processes there are when all are."""
        return self.children or len(self.addresses)

    @property
    def is_near(self) -> bool:
        """Whether all of them seem to be on this host."""
        hosts = {split_address(address)[0] for address in self.addresses}
        return hosts <= {"127.0.0.1", "localhost", "::1"}

    def start(self) -> None:
        """Starts the children that are to be there and are not; does not wait for them."""
        for number in range(self.children):
            _child(number)

    def leases(self, *, all_of_them: bool) -> list[Lease]:
        """Returns servers of the processes; waits as long as tasks wait for each other at start-up.

        Args:
            all_of_them: Whether to wait until all are there, or until there is any.

        Raises:
            PeerLostError: They are not there, and did not come in time.
            UnsupportedError: One is something else.
        """
        calls = [_Call(self, number) for number in range(self.size)]
        try:
            begun, has_told = time.monotonic(), False
            patience = rendezvous.timeout_from(os.environ)
            while True:
                for call in calls:
                    if call.refused is not None:
                        raise call.refused
                found = [call for call in calls if call.lease is not None]
                waited = time.monotonic() - begun
                # One that is stopped takes the call, and never answers.
                told = all(call.lease or call.problem for call in calls)
                enough = not all_of_them and found and (told or waited > _OTHERS_SECONDS)
                if enough or len(found) == len(calls):
                    return [call.take() for call in found]
                missing = [str(call) for call in calls if call.lease is None]
                if waited > patience:
                    raise _lost(missing, patience)
                if waited > _REMIND_SECONDS and not has_told:
                    has_told = True
                    log.warning("data service: waiting for %s", "; ".join(missing))
                time.sleep(0.005)
        finally:
            for call in calls:
                call.end()

    def call(self, number: int) -> Lease:
        """Returns servers of one process.

        Raises:
            OSError: It is not there, or not yet.
        """
        return Lease(self.name(number) if self.addresses else _child(number).address())

    def name(self, number: int) -> str:
        """Returns what a process is called in messages."""
        return self.addresses[number] if self.addresses else f"child {number} of this process"


class _Call:
    """Calls a process until it answers.

    Attributes:
        lease: What it has given, or None.
        problem: Why it has not yet, or "".
        refused: Why it never will, or None.
    """

    def __init__(self, service: Service, number: int):
        self.lease: Lease | None = None
        self.problem = ""
        self.refused: UnsupportedError | None = None
        self._service = service
        self._number = number
        self._lock = threading.Lock()
        self._has_ended = False
        threading.Thread(target=self._run, name="tfdist-data-service", daemon=True).start()

    def __str__(self) -> str:
        return f"{self._service.name(self._number)}: {self.problem or 'no answer'}"

    def take(self) -> Lease:
        """Returns the lease, which from now on belongs to the caller."""
        lease, self.lease = self.lease, None
        assert lease is not None
        return lease

    def end(self) -> None:
        """Gives up, and gives back what nobody has taken."""
        with self._lock:
            self._has_ended = True
        if self.lease is not None:
            self.lease.close()

    def _run(self) -> None:
        while not self._has_ended:
            try:
                lease = self._service.call(self._number)
            except UnsupportedError as error:
                self.refused = error
                return
            except OSError as error:
                self.problem = str(error)
                time.sleep(_AGAIN_SECONDS)
                continue
            with self._lock:
                if not self._has_ended:
                    self.lease = lease
                    return
            lease.close()


def service_of(wanted: Any, environ: Mapping[str, str]) -> Service | None:
    """Returns the processes that are meant by `shard`'s argument `service`, or None.

    Raises:
        ConfigError: It means none.
    """
    if wanted is None or wanted is False:
        return None
    if isinstance(wanted, numbers.Integral):
        if wanted < 1:
            raise ConfigError("service=True, a number of processes or addresses", repr(wanted))
        given = environ.get(ADDRESSES, "").strip()
        if given:
            return Service(_addresses(given.split(","), f"{ADDRESSES}={given!r}"))
        return Service(children=int(wanted))
    is_list = isinstance(wanted, Sequence) and all(isinstance(each, str) for each in wanted)
    if not is_list or not wanted:
        raise ConfigError("service=True, a number of processes or addresses", repr(wanted))
    listed = wanted.split(",") if isinstance(wanted, str) else wanted
    return Service(_addresses(listed, repr(wanted)))


def _addresses(listed: Sequence[str], received: str) -> tuple[str, ...]:
    found = tuple(each.strip().removeprefix("grpc://") for each in listed if each.strip())
    for address in found:
        try:
            host, port = split_address(address)
        except ValueError:
            host, port = "", 0
        if not host or not 0 < port < 2**16:
            raise ConfigError(
                "addresses of data service processes, as in 'host:7000,other:7000'",
                received,
                "write host:port, the port given to `tfdist data-service --port`",
            )
    if not found or len(set(found)) < len(found):
        raise ConfigError("addresses of data service processes, each once", received)
    return found


def _lost(problems: list[str], patience: float) -> PeerLostError:
    return PeerLostError(
        "the processes of the data service to be there",
        f"none of these within {patience:g} s: {'; '.join(problems)}",
        "start them with `tfdist data-service --port PORT` or `tfdist run --data-workers N`, look "
        "at why they ended, leave service= out, or raise TFDIST_RENDEZVOUS_TIMEOUT",
    )


class _Child:
    """A process of our own."""

    def __init__(self, number: int):
        self._owner = os.getpid()
        self._address = ""
        self._read, write = os.pipe()
        # Not -m, nor by path: the directory of either would come before the standard library.
        root = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path[0] = {root!r}; from tfdist.data.server import main; "
            "sys.exit(main(sys.argv[1:]))"
        )
        options = ["--host", "127.0.0.1", "--parent", str(self._owner), "--announce", str(write)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *options],
                env={**os.environ, "TFDIST_ENGINE": "0"},
                stdin=subprocess.DEVNULL,
                pass_fds=[write],
            )
        finally:
            os.close(write)
        log.info("data service: child %d is process %d", number, self.process.pid)

    @property
    def is_mine(self) -> bool:
        """Whether it was started by this process, not by the one that this was forked from."""
        return self._owner == os.getpid()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def address(self) -> str:
        """Returns where it listens.

        Raises:
            OSError: It does not yet.
        """
        if not self._address:
            if not select.select([self._read], [], [], 0)[0]:
                raise ConnectionRefusedError("it is still starting")
            port = os.read(self._read, 64).decode().strip()
            if not port:
                raise ConnectionResetError("it has ended at its start")
            self._address = f"127.0.0.1:{port}"
        return self._address

    def end(self) -> None:
        if self.is_mine:
            self.process.kill()
            self.process.wait()
        os.close(self._read)


_children: dict[int, _Child] = {}
_lock = threading.Lock()


def _child(number: int) -> _Child:
    """Returns a child that runs, as far as is known."""
    with _lock:
        child = _children.get(number)
        if child is not None and not (child.is_mine and child.has_ended):
            return child
        if child is None:
            _spare_loopback()
        else:
            code = child.process.returncode
            log.warning("data service: child %d ended with %d; starting it again", number, code)
            child.end()
        _children[number] = _Child(number)
        return _children[number]


@atexit.register
def _end_children() -> None:
    # Registered before what closes the connections, and so called after it.
    while _children:
        _children.popitem()[1].end()


def _spare_loopback() -> None:
    """Keeps gRPC from sending what is for this machine through a proxy, where it would be lost."""
    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        for name in ("no_grpc_proxy", "no_proxy"):
            known = os.environ.get(name, "")
            if name == "no_proxy" or known:
                os.environ[name] = ",".join(filter(None, [known, "127.0.0.1", "localhost"]))
