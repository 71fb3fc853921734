"""What is another in a training that goes on from what an earlier one has left."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._version import __version__
from tfdist.engine import plain
from tfdist.engine import prepare
from tfdist.engine.inventory import Entry
from tfdist.engine.peers import Peers
from tfdist.engine.replicas import strategy_name
from tfdist.engine.scope import optimizers_of
from tfdist.errors import ConfigError

#: What may be another, by the word that lets it be.
PARTS = ("model", "optimizer", "metrics", "data")
_made_with: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def optimizer_facts(model: Any) -> list[Any]:
    """Returns what the optimizers of a model were made with, fit for JSON.

    A rate that training has changed since is not another one.
    """
    for optimizer in optimizers_of(model):
        if optimizer not in _made_with:
            _made_with[optimizer] = _config(optimizer)
    return [_made_with[optimizer] for optimizer in optimizers_of(model)]


def data_facts(feed: Any) -> dict[str, Any]:
    """Returns what can be told of the data without reading it, fit for JSON.

    What is in it, the feed compares itself.
    """
    if not hasattr(feed, "cardinality"):  # Each worker reads for itself.
        return {"steps_per_epoch": feed.steps}
    found: dict[str, Any] = json.loads(json.dumps(prepare.data_facts(feed), default=str))
    return found


def topology(model: Any, peers: Peers) -> dict[str, Any]:
    """Returns where a model is trained."""
    strategy = model.distribute_strategy
    return {
        "strategy": strategy_name(strategy),
        "workers": peers.group.size if peers.group is not None else 1,
        "replicas": int(strategy.num_replicas_in_sync),
    }


def versions() -> dict[str, str]:
    """Returns the versions of what numbers depend on."""
    return {"tfdist": __version__, "keras": keras.__version__, "tensorflow": tf.__version__}


def check(
    saved: dict[str, Any],
    entries: list[Entry],
    optimizer: list[Any],
    data: dict[str, Any],
    override: tuple[str, ...],
) -> set[str]:
    """Returns the parts that are others and may be.

    Args:
        saved: The facts of a position.
        entries: The variables of this process.
        optimizer: As of `optimizer_facts`.
        data: As of `data_facts`.
        override: The parts that may be others.

    Raises:
        ConfigError: A part is another and may not be.
    """
    other = set()
    for part, differences in _all(saved, entries, optimizer, data):
        found = list(differences)
        if not found:
            continue
        if part not in override:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ConfigError(
                f"the {part} of the training that is to go on",
                "; ".join(found[:3]) + more,
                f"use the {part} it began with, pass override=({part!r},) to go on with what is "
                "the same, or give another directory to begin anew",
            )
        other.add(part)
    return other


def _all(
    saved: dict[str, Any], entries: list[Entry], optimizer: list[Any], data: dict[str, Any]
) -> Iterator[tuple[str, Iterator[str]]]:
    records = saved["entries"]
    yield "model", _variables("model", records, entries)
    yield "optimizer", _configs(saved["optimizer"], optimizer)
    if saved["batch"]:  # Between two epochs their states are nothing.
        yield "metrics", _variables("metrics", records, entries)
    yield "data", _values(saved["data"], data)


def _variables(group: str, records: list[Any], entries: list[Entry]) -> Iterator[str]:
    before = [[r["name"], r["shape"], r["dtype"]] for r in records if _group(r["name"]) == group]
    now = [entry.facts for entry in entries if entry.group == group]
    if before == now:
        return
    if len(before) != len(now):
        yield f"{len(now)} variables instead of {len(before)}"
    for one, other in zip(before, now, strict=False):
        if one != other:
            yield f"{_described(other)} instead of {_described(one)}"


def _configs(before: list[Any], now: list[Any]) -> Iterator[str]:
    if len(before) != len(now):
        yield f"{len(now)} optimizers instead of {len(before)}"
    for one, other in zip(before, now, strict=False):
        if one["class"] != other["class"]:
            yield f"{other['class']} instead of {one['class']}"
        else:
            yield from _values(one["config"], other["config"])


def _values(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            yield f"{key} {now.get(key)!r} instead of {before.get(key)!r}"


def _described(facts: list[Any]) -> str:
    name, shape, dtype = facts
    return f"{name.partition('/')[2]} {tuple(shape)} {dtype}"


def _group(name: str) -> str:
    return name.partition("/")[0]


def _config(optimizer: Any) -> dict[str, Any]:
    try:
        found = keras.saving.serialize_keras_object(optimizer)["config"]
    except (TypeError, ValueError, NotImplementedError):
        found = {}
    return {"class": type(optimizer).__name__, "config": _plain(found)}


def _plain(value: Any) -> Any:
    """Returns a config as JSON has it, without the names that Keras makes up."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if key != "name"}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    try:
        encoded = plain.encode(value)
    except plain.NotPlainError:
        return type(value).__name__
    return json.loads(json.dumps(encoded))
