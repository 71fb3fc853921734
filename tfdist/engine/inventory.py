"""Every variable that a training changes, under a name that another process finds it by.

Names do not depend on how many models were made before (`dense_7` is `dense`), nor on the number of
shards of a table: its shards are pieces of one entry, and so are the optimizer's slots of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.ops import stateful_random_ops

from tfdist.engine.plain import dtype_of
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.scope import optimizers_of
from tfdist.engine.scope import parts_of
from tfdist.engine.statistics import statistics_of

_COUNTER = re.compile(r"_\d+(?=/|$)")

#: How values of replicas become one, where there is another number of replicas.
SUM, MEAN, FIRST = "sum", "mean", "first"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A variable that holds rows of an entry.

    Attributes:
        variable: A Keras or TensorFlow variable.
        first: Its first row within the entry.
    """

    variable: Any
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.variable.shape)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One value to save.

    Attributes:
        name: Begins with its group: "model", "optimizer", "metrics" or "random".
        pieces: Where it is, in the order of rows.
        is_own: Whether each replica may have a value of its own.
        merge: How those become one: SUM, MEAN or FIRST.
    """

    name: str
    pieces: tuple[Piece, ...]
    is_own: bool = False
    merge: str = FIRST

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        inner = self.pieces[0].shape
        if len(self.pieces) == 1:
            return inner
        return (sum(piece.shape[0] for piece in self.pieces), *inner[1:])

    @property
    def dtype(self) -> np.dtype:
        return dtype_of(raw(self.pieces[0].variable).dtype.as_numpy_dtype)

    @property
    def facts(self) -> list[Any]:
        """What must be the same to restore it."""
        return [self.name, list(self.shape), self.dtype.name]


def raw(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras one."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def parts(variable: Any) -> list[Any]:
    """Returns the variables of this process's replicas that a variable is made of."""
    value = raw(variable)
    return list(value._values) if isinstance(value, tf.distribute.DistributedValues) else [value]


def inventory(model: Any) -> list[Entry]:
    """Returns every variable of `model` and of what trains it, always in the same order."""
    # On parameter servers there is one of each, and metrics are the coordinator's.
    apart = not is_asynchronous(model.distribute_strategy)
    shards = _shards(model)
    metrics = [v for metric in model.metrics for v in metric.variables]
    seen = {id(v) for v in metrics}
    found: list[Entry] = []
    groups: list[tuple[str, list[Any]]] = [("model", [*model.variables])]
    for number, optimizer in enumerate(optimizers_of(model)):
        for depth, part in enumerate(parts_of(optimizer)):
            prefix = f"optimizer/{number}.{depth}"
            for slot, owners, variables in _slots(part):
                fresh = [(o, v) for o, v in zip(owners, variables, strict=True) if v is not None]
                fresh = [(o, v) for o, v in fresh if id(v) not in seen]
                seen |= {id(v) for _, v in fresh}
                table = {id(v): shards[id(o)] for o, v in fresh if id(o) in shards}
                paths = [shards[id(o)][0] if id(o) in shards else o.path for o, _ in fresh]
                found += _entries(f"{prefix}/{slot}", [v for _, v in fresh], table, paths)
            groups.append((prefix, list(part.variables)))
    same = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
    moving = {id(v) for v in statistics_of(model)}
    for prefix, variables in groups:
        fresh = [v for v in variables if id(v) not in seen]
        fresh = list({id(v): v for v in fresh}.values())
        seen |= {id(v) for v in fresh}
        for entry in _entries(prefix, fresh, shards):
            variable = entry.pieces[0].variable
            is_own = apart and prefix == "model" and id(variable) not in same
            merge = MEAN if id(variable) in moving else FIRST
            found.append(dataclasses.replace(entry, is_own=is_own, merge=merge))
    for entry in _entries("metrics", metrics, {}):
        aggregation = getattr(entry.pieces[0].variable, "aggregation", "sum")
        merge = SUM if aggregation == "sum" else FIRST
        found.append(dataclasses.replace(entry, is_own=apart, merge=merge))
    found += [Entry(f"random/{name}", (Piece(v),), is_own=apart) for name, v in generators(model)]
    return [entry for entry in found if raw(entry.pieces[0].variable).dtype != tf.string]


def generators(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the states of random generators that are no variables of the model, with names."""
    keras_own = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if keras_own is not None:
        yield "keras", keras_own.state
    if stateful_random_ops.global_generator is not None:
        yield "tensorflow", stateful_random_ops.global_generator.state
    for index, layer in enumerate(model._flatten_layers()):
        for name, value in sorted(vars(layer).items()):
            several = value if isinstance(value, (list, tuple)) else [value]
            for number, each in enumerate(several):
                if isinstance(each, tf.random.Generator):
                    yield f"{index}.{name}.{number}", each.state


def plain_path(path: str) -> str:
    """Returns the path of a variable without the counters that make names unique."""
    return _COUNTER.sub("", path)


def _entries(
    prefix: str,
    variables: Iterable[Any],
    shards: dict[int, tuple[str, int]],
    paths: Iterable[str] | None = None,
) -> Iterator[Entry]:
    """Yields entries of variables, the shards of one table as one."""
    variables = list(variables)
    named = (
        list(paths)
        if paths is not None
        else [shards[id(v)][0] if id(v) in shards else v.path for v in variables]
    )
    number = 0
    index = 0
    while index < len(variables):
        pieces = [Piece(variables[index], 0)]
        if id(variables[index]) in shards:
            path = named[index]
            while index + 1 < len(variables) and (
                id(variables[index + 1]) in shards and named[index + 1] == path
            ):
                index += 1
                pieces.append(Piece(variables[index], shards[id(variables[index])][1]))
        yield Entry(f"{prefix}/{number}/{plain_path(named[index])}", tuple(pieces))
        number += 1
        index += 1


def _slots(optimizer: Any) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yields what an optimizer keeps for each trainable variable: name, those, slots."""
    owners = list(getattr(optimizer, "_trainable_variables", None) or [])
    for name, value in sorted(vars(optimizer).items()):
        if name == "_trainable_variables" or not isinstance(value, list) or not owners:
            continue
        is_slot = all(each is None or isinstance(each, keras.Variable) for each in value)
        if is_slot and len(value) == len(owners) and any(each is not None for each in value):
            # A list of all the optimizer's variables is no list of slots.
            shapes = zip(value, owners, strict=True)
            if all(each is None or tuple(each.shape) == tuple(o.shape) for each, o in shapes):
                yield name.lstrip("_"), owners, list(value)


def _shards(model: Any) -> dict[int, tuple[str, int]]:
    """Returns, for each variable that is a shard, the path of its table and its first row."""
    found: dict[int, tuple[str, int]] = {}
    for layer in model._flatten_layers():
        first = 0
        for shard in getattr(layer, "_shards", None) or ():
            if isinstance(shard, keras.Variable):
                found[id(shard)] = f"{layer.path}/embeddings", first
                first += int(shard.shape[0])
    return found
