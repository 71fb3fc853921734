"""tfdist: a Keras model and `model.fit`, made right under every distribution strategy.

    import tfdist

    strategy = tfdist.strategy()        # where am I, how do I run; logged with the reasons
    with strategy.scope():
        model = build()
        model.compile(...)
    model.fit(dataset, epochs=3)        # the same call on one worker or many

Importing tfdist imports neither TensorFlow nor Keras; every name below is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any

from tfdist._version import __version__ as __version__

if TYPE_CHECKING:
    from tfdist import callbacks as callbacks
    from tfdist import data as data
    from tfdist import layers as layers
    from tfdist import optimizers as optimizers
    from tfdist import testing as testing
    from tfdist.cluster.detect import detect as detect
    from tfdist.cluster.topology import Cluster as Cluster
    from tfdist.cluster.topology import Task as Task
    from tfdist.compose import activate as activate
    from tfdist.compose import deactivate as deactivate
    from tfdist.compose import seed as seed
    from tfdist.compose import strategy as strategy
    from tfdist.errors import TfdistError as TfdistError
    from tfdist.strategies.communication import CommunicationOptions as CommunicationOptions

_PUBLIC = {
    "Cluster": "tfdist.cluster.topology",
    "CommunicationOptions": "tfdist.strategies.communication",
    "Task": "tfdist.cluster.topology",
    "TfdistError": "tfdist.errors",
    "activate": "tfdist.compose",
    "deactivate": "tfdist.compose",
    "detect": "tfdist.cluster.detect",
    "seed": "tfdist.compose",
    "strategy": "tfdist.compose",
}
_MODULES = ("callbacks", "data", "layers", "optimizers", "testing")

#: Without the packages: `from tfdist import *` imports no TensorFlow.
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tfdist.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
