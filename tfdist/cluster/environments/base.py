"""What every environment is made of: a function from variables to a cluster, or None.

An environment is one module with one function:

    def detect(environ: Environ) -> Cluster | None: ...

It answers None where its variables are not set, a `Cluster` where they are right, and raises
`ClusterError` where they are set and wrong. `tfdist.cluster.detect` asks them in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Mapping

from tfdist.cluster.topology import Cluster
from tfdist.errors import ClusterError

Environ = Mapping[str, str]
Detector = Callable[[Environ], Cluster | None]

_HEAD = 120
_DIGITS = re.compile(r"[0-9]{1,10}")


def text(environ: Environ, name: str) -> str:
    """Returns the variable without surrounding blanks and byte order mark, "" where not set."""
    return environ.get(name, "").strip().removeprefix("\ufeff").strip()


def first(environ: Environ, *names: str) -> tuple[str, str]:
    """Returns the name and value of the first variable that is set, else the first name and ""."""
    for name in names:
        value = text(environ, name)
        if value:
            return name, value
    return names[0], ""


def head(value: object) -> str:
    """Returns `value` as it would be written, cut to a length that fits into a message."""
    shown = value if isinstance(value, str) else repr(value)
    cut = shown if len(shown) <= _HEAD else f"{shown[:_HEAD]}... ({len(shown)} characters)"
    return repr(cut) if isinstance(value, str) else cut


def whole_number(name: str, value: str, what: str, minimum: int = 0) -> int:
    """Returns the whole number in variable `name`, or raises an error that says `what` it is."""
    if not _DIGITS.fullmatch(value) or int(value) < minimum:
        raise ClusterError(
            f"a whole number, {minimum} or more, as {what}",
            f"{name}={head(value)}",
            f"correct {name} or unset it",
        )
    return int(value)


def port_base(environ: Environ, default: int) -> int:
    """Returns the first port that tasks listen on: TFDIST_PORT_BASE, else `default`."""
    value = text(environ, "TFDIST_PORT_BASE")
    if not value:
        return default
    port = whole_number("TFDIST_PORT_BASE", value, "the first port of the tasks", minimum=1)
    if port > 65535:
        raise ClusterError(
            "a port between 1 and 65535",
            f"TFDIST_PORT_BASE={head(value)}",
            "choose a free port that every host can open",
        )
    return port


def count(number: int, noun: str) -> str:
    """Returns "1 worker" or "3 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
