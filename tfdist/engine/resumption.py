"""A position on its way back into a training, on every worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.engine import differences
from tfdist.engine import plain
from tfdist.engine import position
from tfdist.engine import randomness_state
from tfdist.engine import spread
from tfdist.engine.callback_states import CallbackStates
from tfdist.engine.inventory import Entry
from tfdist.engine.inventory import inventory
from tfdist.engine.peers import Peers
from tfdist.engine.scope import optimizers_of

log = logging.getLogger("absl")


class Resumption:
    """What an earlier process has left, and how it becomes what this one has.

    Args:
        model: The model.
        peers: The other workers.
        facts: Facts of a position, the same on every worker.
        arrays: Its arrays, on the chief.

    Attributes:
        facts: As given.
        mine: What this worker told when the position was taken; the chief's on another topology.
    """

    def __init__(self, model: Any, peers: Peers, facts: dict[str, Any], arrays: Any):
        self.facts = facts
        self._model = model
        self._peers = peers
        self._arrays = arrays
        self._other: set[str] = set()
        self._small: dict[str, np.ndarray] = {}
        keys = ("workers", "replicas")
        topology = differences.topology(model, peers)
        self._is_same = all(facts["topology"][key] == topology[key] for key in keys)
        rank = facts["chief"]
        if peers.group is not None and self._is_same:
            rank = peers.group.rank
        self.mine: dict[str, Any] = facts["workers"][rank]

    @property
    def is_within_epoch(self) -> bool:
        """Whether it is in the middle of an epoch."""
        return bool(self.facts["batch"])

    def check(
        self, optimizer: list[Any], data: dict[str, Any], spec: Any, override: Iterable[str]
    ) -> None:
        """Refuses what is another than it was; see `differences.check`.

        Args:
            optimizer: As of `differences.optimizer_facts`.
            data: As of `differences.data_facts`.
            spec: Structure of `tf.TypeSpec` of a batch.
            override: Parts that may be others.
        """
        self._complete(spec)
        self._other = differences.check(
            self.facts, inventory(self._model), optimizer, data, tuple(override)
        )

    def put_variables(self, *, only_rates: bool = False) -> None:
        """Gives variables their values; a collective.

        Args:
            only_rates: Whether only single numbers of optimizers are meant: rates, counters.
        """
        entries = inventory(self._model)
        if only_rates:
            entries = [entry for entry in entries if _is_rate(entry)]
        mine = {entry.name: entry.facts for entry in entries}
        records = [
            record
            for record in self.facts["entries"]
            if mine.get(record["name"]) == [record["name"], record["shape"], record["dtype"]]
            and not (record["name"].endswith("learning_rate") and "optimizer" in self._other)
        ]
        position.put(entries, records, self._arrays, self._peers, self._is_same)

    def receive(self) -> None:
        """Brings the arrays of history, callbacks and data to every worker; a collective."""
        specs = [
            (name, tuple(shape), plain.dtype_of(dtype))
            for name, (shape, dtype) in self.facts["arrays"].items()
        ]
        found = spread.arrays(self._peers, specs, lambda name: np.asarray(self._arrays[name]))
        self._small = {name: np.array(value) for name, value in found}

    def put_history(self, calls: Any) -> None:
        """Gives the `History` of a `CallbackList` what it had."""
        history = getattr(calls, "_history", None)
        if history is not None and self.facts["history"] is not None:
            told = plain.decode(self.facts["history"], self._small)
            history.epoch, history.history = told["epoch"], told["history"]
            self._model.history = history

    def put_data(self, feed: Any, held_out: Any = None) -> None:
        """Lets a feed go on from its place, if it has one, and validation from its."""
        past = self.mine.get("held out")
        if held_out is not None and past is not None:
            held_out.restore_past(past)  # First: both may be of one dataset.
        if self.mine["data"] is not None and callable(getattr(feed, "restore", None)):
            place = plain.decode(self.mine["data"], self._small)
            feed.restore(place, force="data" in self._other)

    def put_callbacks(self, states: CallbackStates, *, anew: bool = False) -> None:
        """Gives callbacks what they remembered, and generators their states.

        Generators come last: who restores anything else may draw.

        Args:
            states: The states of the callbacks.
            anew: See `CallbackStates.restore`.
        """
        chiefs = self.facts["workers"][self.facts["chief"]]["callbacks"]
        states.restore(self.mine["callbacks"] or chiefs, self._small, chiefs, anew=anew)
        self._model.stop_training = bool(self.facts["stop"])
        randomness_state.restore(self.mine["random"])

    def _complete(self, spec: Any) -> None:
        """Lets a model that makes its variables in its first step make them.

        The step is one on zeros; whatever it changes gets its value from the position.
        """
        model = self._model
        parts = [*model._flatten_layers(), *optimizers_of(model)]
        if all(part.built for part in parts):
            return
        groups = ("model", "optimizer")
        known = {entry.name for entry in inventory(model)}
        names = [r["name"] for r in self.facts["entries"] if r["name"].startswith(groups)]
        leaves = [leaf for leaf in tree.flatten(spec) if leaf is not None]
        if all(name in known for name in names) or not all(map(_is_dense, leaves)):
            return
        log.info("%s makes its variables in a step on zeros", model.name)
        batch = tree.map_structure(_zeros, spec)
        model.train_function(iter([batch]))


def _is_dense(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None


def _zeros(spec: Any) -> Any:
    return None if spec is None else tf.zeros([size or 1 for size in spec.shape], spec.dtype)


def _is_rate(entry: Entry) -> bool:
    return entry.group == "optimizer" and not entry.shape
