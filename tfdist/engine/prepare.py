"""Before the first step: workers compare what they were given, then build the model."""

from __future__ import annotations

from typing import Any

from keras import tree

from tfdist.engine import adapt
from tfdist.engine import build
from tfdist.engine import metrics
from tfdist.engine import scope
from tfdist.engine import seeds
from tfdist.engine.inputs import Feed
from tfdist.engine.peers import Peers
from tfdist.engine.replicas import is_synchronous

_FIXES = {
    "validation_data": "pass validation_data on every worker or on none: validation is done by "
    "all workers together",
    "a BackupAndRestore": "pass tfdist.callbacks.BackupAndRestore on every worker or on none",
    "adapted layers": "adapt them to the same data on every worker, or load the same vocabulary "
    "everywhere",
    "steps_per_epoch": "pass the same steps_per_epoch on every worker",
}


def prepare(
    model: Any,
    feed: Feed,
    peers: Peers,
    arguments: dict[str, Any] | None = None,
    *,
    to_train: bool = True,
) -> None:
    """Makes sure that the workers are about to do the same, then builds what is not built yet."""
    is_ours = is_synchronous(model.distribute_strategy)  # One device trains as Keras does.
    if is_ours:
        scope.adopt(model, model.distribute_strategy)
    peers.start_afresh()
    # Making a variable is a collective: what is made must be the same before it is begun.
    peers.same(
        "its arguments",
        {**(arguments or {}), **data_facts(feed), **_model_facts(model, to_train)},
        _FIXES,
    )
    if to_train and peers.group is not None:
        # No weights, so that making weights the same does not reach them.
        peers.same("its preprocessing layers", {"adapted layers": adapt.facts(model)}, _FIXES)
    if to_train and feed.policy == "example":
        peers.note(
            "the seed of shuffles",
            seeds.position(),
            "a shuffle before the data is split shows some examples twice and others never",
        )
    build.build(model, feed.spec, feed.sample(), to_train=to_train)
    if is_ours:
        # Building may have made variables of metrics and optimizers that were bare until now.
        scope.adopt(model, model.distribute_strategy)
        metrics.adopt(model)
    peers.same(
        "its variables",
        {"the model": [[list(v.shape), str(v.dtype)] for v in model.variables]},
        _FIXES,
    )


def _model_facts(model: Any, to_train: bool) -> dict[str, Any]:
    facts = {
        "the kinds of layers": [type(layer).__name__ for layer in model._flatten_layers()],
        "steps_per_execution": getattr(model, "steps_per_execution", 1),
        "run_eagerly": bool(model.run_eagerly),
    }
    optimizer = getattr(model, "optimizer", None)
    if to_train and optimizer is not None:
        facts["the optimizer"] = [
            type(optimizer).__name__,
            sorted(
                [key, value]
                for key, value in optimizer.get_config().items()
                if isinstance(value, (bool, int, str))
                and key != "name"
                or value is None
                or key == "momentum"
            ),
        ]
    return facts


def data_facts(feed: Feed) -> dict[str, Any]:
    """Returns what must be the same on every worker about the data, fit for `Peers.same`."""
    facts: dict[str, Any] = {
        "steps_per_epoch": feed.steps,
        "the structure of the data": _describe(feed.spec),
        "whether the data ends": feed.cardinality != -1,
    }
    if feed.policy == "example":
        facts["the number of batches in the data"] = feed.cardinality
    return facts


def _describe(spec: Any) -> list[str]:
    def one(leaf: Any) -> str:
        shape = getattr(leaf, "shape", None)
        inner = list(shape[1:]) if shape is not None and shape.rank else "?"
        return f"{getattr(leaf, 'dtype', None)}{inner}"

    return [one(leaf) for leaf in tree.flatten(spec)]
