"""Optimizers whose cost does not grow with the size of a table.

model.compile(optimizer=tfdist.optimizers.RowSparse("adam"), loss="mse")
"""

from __future__ import annotations

from tfdist.optimizers.wrapper import RowSparse

__all__ = ["RowSparse"]
