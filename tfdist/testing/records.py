"""What a training writes down for the comparison: one folder for each process.

| file | holds |
|---|---|
| `initial.npz` | weights before the first step |
| `steps/N.npz` | variables after N steps, of some or all steps |
| `final.npz` | variables after `fit` |
| `facts.json` | History, number of steps, layers that may differ on purpose |

Neither TensorFlow nor Keras is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: Steps of one process are kept up to this size: if they are more, every second is dropped.
BUDGET_BYTES = 256 << 20


class Steps:
    """Variables after single steps, on disk, within a budget.

    Args:
        folder: Where they are.
        budget: Bytes; at least two records are kept.
        after: Steps up to this number are not recorded.
        until: Steps beyond this number are not recorded; None for no end.
    """

    def __init__(
        self, folder: Path, budget: int = BUDGET_BYTES, after: int = 0, until: int | None = None
    ):
        self._folder = folder
        self._budget = budget
        self._after = after
        self._until = until
        self._seen = 0
        self._stride = 1

    def wants(self, step: int) -> bool:
        """Whether the variables after `step` are to be recorded; ask once for each step."""
        if step <= self._after or (self._until is not None and step > self._until):
            return False
        self._seen += 1
        return self._seen % self._stride == 0

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Records variables, and makes room for more."""
        self._folder.mkdir(parents=True, exist_ok=True)
        save(self._folder / f"{step}.npz", values)
        kept = self.numbers()
        size = sum(np.asarray(value).nbytes for value in values.values())
        if len(kept) > 2 and size * len(kept) > self._budget:
            self._stride *= 2
            for number in kept[::2]:
                (self._folder / f"{number}.npz").unlink()

    def numbers(self) -> list[int]:
        """Returns the steps that are recorded, in order."""
        return sorted(int(path.stem) for path in self._folder.glob("*.npz"))

    def load(self, step: int) -> dict[str, Any]:
        """Returns the variables after `step`."""
        return load(self._folder / f"{step}.npz")


def save(path: Path, values: Mapping[str, Any]) -> None:
    """Writes named arrays, in order; `load` reads them."""
    names = list(values)
    arrays = {str(index): np.asarray(values[name]) for index, name in enumerate(names)}
    with open(path, "wb") as file:
        np.savez(file, names=np.asarray(json.dumps(names)), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> dict[str, Any]:
    """Reads named arrays that `save` has written."""
    with np.load(path) as file:
        names = json.loads(str(file["names"]))
        return {name: file[str(index)] for index, name in enumerate(names)}
