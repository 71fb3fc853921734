"""Data for training on any number of workers: every example once in a pass, in the same batches.

data = tfdist.data.shard((x, y), global_batch_size=64, shuffle=True, seed=1)
model.fit(data, epochs=3)
print(tfdist.data.explain(data))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from tfdist.data.policy import Policy as Policy
    from tfdist.data.shard import explain as explain
    from tfdist.data.shard import shard as shard
    from tfdist.data.sharded import Padded as Padded
    from tfdist.data.sharded import Sharded as Sharded

# Loaded when they are used: some need TensorFlow.
_PUBLIC = {
    "Padded": "tfdist.data.sharded",
    "Policy": "tfdist.data.policy",
    "Sharded": "tfdist.data.sharded",
    "explain": "tfdist.data.shard",
    "shard": "tfdist.data.shard",
}

__all__ = ["Padded", "Policy", "Sharded", "explain", "shard"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdist.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
