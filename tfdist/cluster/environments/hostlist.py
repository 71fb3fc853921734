"""Slurm's compressed lists of hosts and counts, expanded in Slurm's own order.

    >>> expand("a[1-3,7],b2")
    ('a1', 'a2', 'a3', 'a7', 'b2')
    >>> expand("rack[1-2]node[09-10]-ib")
    ('rack1node09-ib', 'rack1node10-ib', 'rack2node09-ib', 'rack2node10-ib')
    >>> expand_counts("2(x3),1")
    (2, 2, 2, 1)

TensorFlow's resolver sorts hosts as strings, which puts node10 before node2, and needs `scontrol`
(tensorflow issue 36094): neither happens here.
"""

from __future__ import annotations

import itertools
import re

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_HOST = re.compile(r"[A-Za-z0-9._-]+")

#: More than any cluster has; a mistyped range must not fill the memory.
_MAX = 100_000


def expand(value: str) -> tuple[str, ...]:
    """Returns the hosts of a compressed list.

    Raises:
        ValueError: If it is not such a list. The message says where it breaks.
    """
    hosts: list[str] = []
    for item in _split(value):
        parts: list[list[str]] = []
        end = 0
        size = 1
        for match in _PART.finditer(item):
            if match.start() != end:
                break
            end = match.end()
            group, plain = match.groups()
            parts.append([plain] if plain else _numbers(group, _MAX // size))
            size *= len(parts[-1])
            if size + len(hosts) > _MAX:
                raise ValueError(f"{item!r} names more than {_MAX} hosts")
        if not item or end != len(item):
            raise ValueError(f"{item!r} is not a host or a range of hosts")
        made = ["".join(words) for words in itertools.product(*parts)]
        if not _HOST.fullmatch(made[0]):
            raise ValueError(f"{item!r} is not a host or a range of hosts")
        hosts += made
    return tuple(hosts)


def expand_counts(value: str) -> tuple[int, ...]:
    """Returns the numbers of a compressed list such as `2(x3),1`.

    Raises:
        ValueError: If it is not such a list.
    """
    counts: list[int] = []
    for item in value.split(","):
        match = _COUNT.fullmatch(item.strip())
        if not match:
            raise ValueError(f"{item!r} is not a count such as 2 or 2(x3)")
        times = int(match[2] or 1)
        if times + len(counts) > _MAX:
            raise ValueError(f"{item!r} names more than {_MAX} hosts")
        counts += [int(match[1])] * times
    return tuple(counts)


def _split(value: str) -> list[str]:
    """Splits at the commas that stand outside of brackets."""
    items = [""]
    depth = 0
    for letter in value:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"brackets of {value!r} do not match")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    if depth:
        raise ValueError(f"brackets of {value!r} do not match")
    return [item.strip() for item in items]


def _numbers(group: str, limit: int) -> list[str]:
    found: list[str] = []
    for item in group.split(","):
        match = _RANGE.fullmatch(item.strip())
        if not match:
            raise ValueError(f"{item!r} is not a number or a range of numbers")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"{item!r} runs backwards")
        if int(high) - int(low) + 1 + len(found) > limit:
            raise ValueError(f"{item!r} names more than {_MAX} hosts")
        # The width of the first number is the least width of all: 08-10 is 08, 09, 10.
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found
