"""Lengths of time as users write them and as the service takes them."""

from __future__ import annotations

import re

from tfdist.errors import ConfigError

#: What protobuf takes, 10,000 years.
LONGEST = 315_576_000_000

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*(d(?:ays?)?|h(?:ours?)?|m(?:in(?:utes?)?)?|s(?:ec(?:onds?)?)?)(?![a-z]),?"
)


def seconds(value: int | str) -> int:
    """Returns a length of time in seconds.

    Args:
        value: Seconds, or a text of numbers with units: "36h", "7d", "1d 12h", "1.5h", "3600s".

    Raises:
        ConfigError: It is neither.

    Example:
        >>> seconds("1d 12h")
        129600
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _possible(value, value)
    text = str(value).strip().lower()
    if text.isdecimal():
        return _possible(int(text), value)
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip():
        raise ConfigError(
            "a length of time", repr(value), "write seconds, or for example 36h, 7d or 1d 12h"
        )
    return _possible(round(sum(float(number) * _UNITS[unit[0]] for number, unit in parts)), value)


def _possible(length: int, given: int | str) -> int:
    if length > LONGEST:
        raise ConfigError("a length of time", repr(given), "write for example 36h or 7d")
    return length


def shown(length: int) -> str:
    """Returns a length of time as people say it.

    Example:
        >>> shown(129600)
        '1 day 12 hours'
    """
    words = []
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, length = divmod(length, size)
        if count:
            words.append(f"{count} {unit}{'s' if count > 1 else ''}")
    return " ".join(words) or "0 seconds"
