"""Imported by scripts under test: hands values of one task to the test.

    from report import report
    report(loss=history.history["loss"], weights=model.get_weights())

The test reads them with `Run.result("worker 0")`.
"""

from __future__ import annotations

import json
import os
from typing import Any


def report(**values: Any) -> None:
    """Writes `values` as JSON where the test finds them; a second call replaces the first.

    Args:
        **values: Anything JSON can hold; arrays and tensors become lists, their scalars numbers.
    """
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    path = os.path.join(os.environ["TFDIST_TEST_OUT"], f"{task['type']}-{task['index']}.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(values, file, default=_plain)
    os.replace(f"{path}.part", path)


def _plain(value: Any) -> Any:
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"report() cannot write a {type(value).__name__}")
