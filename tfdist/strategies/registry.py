"""Strategy names and who builds them.

A builder is a callable `build(cluster, options) -> tf.distribute.Strategy`, in a module of its
own that registers itself. A plug-in adds one module and names it in the entry-point group
`tfdist.strategies`; nothing else changes:

    [options.entry_points]
    tfdist.strategies =
        my_strategy = my_package.my_module:build
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from tfdist.errors import StrategyError

if TYPE_CHECKING:
    from tfdist.cluster.topology import Cluster
    from tfdist.strategies.communication import CommunicationOptions

GROUP = "tfdist.strategies"
BUILT_IN = ("default", "mirrored", "multi_worker", "parameter_server", "tpu")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a builder may need beyond the cluster.

    Attributes:
        replicas: Local replicas asked for, or None for one a device.
        communication: How gradients travel, or None for the defaults.
        rendezvous_timeout: Seconds at the start barrier, or None for the environment's.
    """

    replicas: int | None = None
    communication: CommunicationOptions | None = None
    rendezvous_timeout: float | None = None


Builder = Callable[["Cluster", Options], Any]


def names() -> tuple[str, ...]:
    """Returns every known name, built-in ones first."""
    found = [point.name for point in importlib.metadata.entry_points(group=GROUP)]
    return (*BUILT_IN, *sorted(set(found) - set(BUILT_IN)))


def builder(name: str) -> Builder:
    """Returns the builder of strategy `name`.

    Raises:
        StrategyError: No strategy has this name.
    """
    if name in BUILT_IN:
        module = importlib.import_module(f"tfdist.strategies.{name}")
        build: Builder = module.build
        return build
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == name:
            plugin: Builder = point.load()
            return plugin
    raise StrategyError(f"a strategy out of {', '.join(names())}", repr(name))
