"""Sums of numbers of 16 bits, taken in float32 and rounded once, with numpy alone.

bfloat16 is handled as uint16, since numpy does not know the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Elements handled at a time, so that the passes over them stay in the processor's cache.
GRAIN = 64 << 10


def storage(dtype: str) -> np.dtype[Any]:
    """Returns the numpy type that holds elements of `dtype`."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


class Half:
    """Arithmetic of one type of 16 bits.

    Args:
        dtype: "float16" or "bfloat16".
    """

    def __init__(self, dtype: str):
        self._brain = dtype == "bfloat16"
        self._bits = np.empty(GRAIN, np.uint32)
        self._total = np.empty(GRAIN, np.float32)
        self._term = np.empty(GRAIN, np.float32)

    def sum(self, terms: Sequence[Array], out: Array) -> None:
        """Writes the sum of `terms`, all as long as `out`, added in their order."""
        for start in range(0, out.size, GRAIN):
            part = slice(start, min(start + GRAIN, out.size))
            total, term = self._total[: part.stop - start], self._term[: part.stop - start]
            self.widen(terms[0][part], total)
            for values in terms[1:]:
                self.widen(values[part], term)
                np.add(total, term, out=total)
            self.narrow(total, out[part])

    def widen(self, halves: Array, out: Array) -> None:
        """Writes at most `GRAIN` `halves` into `out` as float32, exactly."""
        if not self._brain:
            np.copyto(out, halves)
            return
        bits = out.view(np.uint32)
        np.copyto(bits, halves)
        np.left_shift(bits, 16, out=bits)

    def narrow(self, values: Array, out: Array) -> None:
        """Rounds at most `GRAIN` float32 `values` into `out`, to nearest, ties to even."""
        if not self._brain:
            np.copyto(out, values, casting="unsafe")
            return
        source = values.view(np.uint32)
        bits = self._bits[: values.size]
        np.right_shift(source, 16, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.add(bits, 0x7FFF, out=bits)
        np.add(bits, source, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out, bits, casting="unsafe")
        if np.isnan(values.min()):  # Rounding up may have made them infinite or 0.
            out[np.isnan(values)] = 0x7FC0
