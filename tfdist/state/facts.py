"""Facts: what JSON can say, and nothing else, so that what is read equals what was written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.errors import ConfigError


def plain(value: Any, where: str = "facts") -> Any:
    """Returns `value` with NumPy's numbers as Python's and tuples as lists.

    Raises:
        ConfigError: Something in it is none of dict, list, text, number, truth value or None.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(
                    f"texts as keys in {where}", repr(key), "convert the key, or use a list"
                )
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ConfigError(
        f"what JSON can say in {where}",
        f"an object of type {type(value).__name__}",
        "convert it, or keep it as an array or a blob",
    )


def to_bytes(facts: Mapping[str, Any]) -> bytes:
    """Returns the JSON text of `facts`. Infinities and NaN are written as Python does."""
    return json.dumps(plain(facts), indent=1).encode()


def from_bytes(data: bytes) -> dict[str, Any]:
    """Reads what `to_bytes` wrote.

    Raises:
        ValueError: It is something else.
    """
    facts = json.loads(data)
    if not isinstance(facts, dict):
        raise ValueError("the facts are no object")
    return facts


def without_nan(value: Any) -> Any:
    """Returns `value` with None for numbers that strict JSON cannot say, for other programs."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return value
