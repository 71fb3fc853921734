"""Runs many small trainings ("cells") in one process and reports their numbers.

The same program runs on one device by Keras alone, on local replicas and on workers; the test
compares the reports.
Usage: equivalence.py one|replicas|workers NAME [NAME ...], or `equivalence.py --list`.
"""

from __future__ import annotations

import importlib
import traceback

from cells.registry import CELLS
from cells.world import NAMES
from cells.world import REPLICAS
from cells.world import WHERE

#: Modules of cells, in the order in which `--list` names what they hold.
MODULES = (
    "matrix",
    "known",
    "optimizers",
    "precision",
    "losses",
    "steps",
    "inputs",
    "runs",
    "shards",
    "metrics",
    "normalization",
)
for module in MODULES:
    importlib.import_module(f"cells.{module}")


def outcome_of(name):
    print("cell", name, flush=True)
    function, expected = CELLS[name]
    try:
        return {"values": function(), "expected": expected}
    except Exception as error:  # noqa: BLE001  one cell must not stop the others
        return {"error": "".join(traceback.format_exception(error))[-6000:]}


if WHERE == "--list":
    print("\n".join(CELLS))
else:
    from report import report

    report(cells={name: outcome_of(name) for name in NAMES}, replicas=REPLICAS)
