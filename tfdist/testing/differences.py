"""How far two lists of arrays are apart, and the first that is too far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference between two arrays of one name.

    Attributes:
        name: Path of the variable, or key of the History.
        reference: The value on one device, where the arrays differ most.
        value: The value in the cluster at the same place.
        absolute: Their difference; infinite where one is not finite or the shapes differ.
        relative: The difference over the largest magnitude in the array of one device.
    """

    name: str
    reference: float
    value: float
    absolute: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.name}: largest difference {self.absolute:.3g} (relative {self.relative:.2g}): "
            f"{self.reference:.8g} on one device, {self.value:.8g} here"
        )


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What counts as equal: a difference of at most `atol + rtol * largest magnitude`.

    The magnitude is that of the whole array on one device: an element near zero is a sum of large
    terms that cancel, and has their rounding errors.
    """

    rtol: float
    atol: float

    def allows(self, difference: Difference, reference: Any) -> bool:
        """Whether `difference` from the array `reference` is rounding."""
        return difference.absolute <= self.atol + self.rtol * _magnitude(reference)


def difference(name: str, reference: Any, value: Any) -> Difference:
    """Returns the largest difference between two arrays.

    Args:
        name: Its name in messages.
        reference: Array-like, of one device.
        value: Array-like, of the cluster.
    """
    one, other = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    if one.shape != other.shape:
        return Difference(name, np.nan, np.nan, np.inf, np.inf)
    one, other = one.ravel(), other.ravel()
    if not one.size:
        return Difference(name, 0.0, 0.0, 0.0, 0.0)
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    apart[np.isnan(apart)] = np.inf
    worst = int(np.argmax(apart))
    absolute = float(apart[worst])
    magnitude = _magnitude(one)
    relative = absolute / magnitude if magnitude else (np.inf if absolute else 0.0)
    return Difference(name, float(one[worst]), float(other[worst]), absolute, relative)


def excessive(
    reference: Mapping[str, Any], values: Mapping[str, Any], tolerance: Tolerance
) -> list[Difference]:
    """Returns the differences beyond `tolerance`, in the order of `reference`.

    What is missing on either side differs infinitely.
    """
    found = []
    for name in [*reference, *(name for name in values if name not in reference)]:
        if name not in reference or name not in values:
            found.append(Difference(name, np.nan, np.nan, np.inf, np.inf))
            continue
        each = difference(name, reference[name], values[name])
        if not tolerance.allows(each, reference[name]):
            found.append(each)
    return found


def largest(reference: Mapping[str, Any], values: Mapping[str, Any]) -> float:
    """Returns the largest relative difference between arrays of the same names."""
    return max(
        (difference(name, reference[name], values[name]).relative for name in reference),
        default=0.0,
    )


def _magnitude(values: Any) -> float:
    finite = np.abs(np.asarray(values, np.float64))
    finite = finite[np.isfinite(finite)]
    return float(finite.max()) if finite.size else 0.0
