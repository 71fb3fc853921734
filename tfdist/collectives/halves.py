"""Numbers of 16 bits: float32 rounded to them, and back, with numpy alone.

bfloat16 is handled as uint16, since numpy does not know the type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Elements handled at a time, so that the passes over them stay in the processor's cache.
GRAIN = 64 << 10
_LARGEST_FLOAT16 = np.float32(65504)


def storage(dtype: str) -> np.dtype[Any]:
    """Returns the numpy type that holds elements of `dtype`."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


class Half:
    """Conversion between float32 and one type of 16 bits.

    Args:
        dtype: "float16" or "bfloat16".
    """

    def __init__(self, dtype: str):
        self._brain = dtype == "bfloat16"
        self._bits = np.empty(GRAIN, np.uint32)
        self._block = np.empty(GRAIN, np.float32)
        self._back = np.empty(GRAIN, np.float32)

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
        if values.size and np.isnan(values.min()):  # Rounding up may have made them infinite or 0.
            out[np.isnan(values)] = 0x7FC0

    def send(self, values: Array, residual: Array, out: Array) -> None:
        """Rounds `values` plus what was lost of earlier ones, and keeps what is lost now.

        A finite value that is too large for the type is sent as the largest, and the rest later.

        Args:
            values: At most `GRAIN` float32 elements.
            residual: What is owed for each, float32; updated.
            out: The rounded values.
        """
        block, back = self._block[: values.size], self._back[: values.size]
        np.add(values, residual, out=block)
        self.narrow(block, out)
        self.widen(out, back)
        np.subtract(block, back, out=residual)
        if np.isfinite(residual).all():
            return
        too_large = np.isfinite(block) & ~np.isfinite(back)
        if not self._brain and too_large.any():
            out[too_large] = np.copysign(_LARGEST_FLOAT16, block[too_large])
            residual[too_large] = block[too_large] - out[too_large].astype(np.float32)
        residual[~np.isfinite(residual)] = 0.0  # Infinities and NaN pass once, not for ever.
