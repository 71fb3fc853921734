"""Says so when a worker of a job trains a model of its own, which is seldom what was meant."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from tfdist.cluster.detect import detect
from tfdist.engine.replicas import is_several_workers
from tfdist.engine.replicas import strategy_name
from tfdist.errors import TfdistError

log = logging.getLogger("absl")

_told: weakref.WeakSet[Any] = weakref.WeakSet()


def warn(model: Any) -> None:
    """Warns once of a model that the other workers of this job have no part in."""
    strategy = getattr(model, "_distribute_strategy", None)
    if model in _told or (strategy is not None and is_several_workers(strategy)):
        return
    _told.add(model)
    try:
        cluster = detect(os.environ)
    except TfdistError:
        return
    if cluster.num_workers < 2 or cluster.has_parameter_servers or cluster.is_evaluator:
        return
    if strategy is None:
        why = "was built outside strategy.scope()"
    else:
        why = f"was built under {strategy_name(strategy)}, which knows this process only"
    log.warning(
        "model %r %s: each of the %d workers works on a model of its own",
        model.name,
        why,
        cluster.num_workers,
    )
