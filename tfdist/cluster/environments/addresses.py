"""Addresses (`host:port`) of tasks: checked here, because TensorFlow hangs on some wrong ones.

Port 0, a port above 65535 and a duplicate address make TensorFlow wait for ever; a scheme or a
missing port ends in a traceback after several seconds (tensorflow issue 57372).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tfdist.cluster.environments.base import head
from tfdist.errors import ClusterError

_PORT = re.compile(r"[0-9]{1,10}")
_BAD_IN_HOST = re.compile(r"[\s/\\@\[\],;\"'{}]")


def check_address(value: object, where: str) -> str:
    """Returns the address without surrounding blanks.

    Args:
        value: What the environment gives as address.
        where: Which task it belongs to, for example "TF_CONFIG, worker 1".

    Raises:
        ClusterError: If it is not `host:port` with a port between 1 and 65535.
    """
    received = f"{head(value)} ({where})"
    if not isinstance(value, str):
        raise ClusterError("each address to be a string host:port", received, "write host:port")
    address = value.strip()
    if not address:
        raise ClusterError(
            "each address to be host:port", f"an empty address ({where})", "write host:port"
        )
    if "://" in address:
        raise ClusterError(
            "each address to be host:port without a scheme such as grpc://",
            received,
            f"write {head(address.split('://', 1)[1])}",
        )
    host, colon, port = address.rpartition(":")
    if not colon or (address.startswith("[") and address.endswith("]")):
        raise ClusterError(
            "each address to be host:port, and found no port", received, "add the port"
        )
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise ClusterError(
            "each address to end in a port between 1 and 65535", received, "correct the port"
        )
    _check_host(host, received)
    return address


def check_host(value: str, where: str) -> str:
    """Returns a host name that stands without a port, without surrounding blanks."""
    host = value.strip()
    _check_host(host, f"{head(value)} ({where})")
    return host


def check_distinct(addresses: Iterable[tuple[str, str]], variable: str) -> None:
    """Raises ClusterError where two tasks have the same address.

    Args:
        addresses: Pairs of the task's name ("worker 1") and its address.
        variable: The variable that they come from.
    """
    seen: dict[str, str] = {}
    for name, address in addresses:
        key = _canonical(address)
        if key in seen:
            raise ClusterError(
                "an address of its own for each task",
                f"the duplicate address {head(address)} of {seen[key]} and {name} in {variable}",
                "give each task another host or another port",
            )
        seen[key] = name


def same(left: Iterable[str], right: Iterable[str]) -> bool:
    """Tells whether two lists hold the same addresses in the same order."""
    return [_canonical(item) for item in left] == [_canonical(item) for item in right]


def _check_host(host: str, received: str) -> None:
    if host.startswith("[") and host.endswith("]"):
        import ipaddress  # Only here: most clusters never need it.

        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ClusterError(
                "an IPv6 address between the brackets of an address",
                received,
                "write it like [::1]:2222",
            ) from None
        return
    if ":" in host:
        raise ClusterError(
            "each address to have one host and one port, an IPv6 address in brackets",
            received,
            "write an IPv6 address like [::1]:2222",
        )
    if not host or _BAD_IN_HOST.search(host):
        raise ClusterError(
            "each address to be host:port with a host name or an IP address",
            received,
            "correct the host",
        )


def _canonical(address: str) -> str:
    """Returns one spelling for all spellings of an address: host names ignore case."""
    host, _, port = address.lower().rpartition(":")
    if host.startswith("["):
        import ipaddress

        host = ipaddress.IPv6Address(host[1:-1]).compressed
    return f"{host}:{int(port)}" if port else address
