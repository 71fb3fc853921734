"""The position of a training: all that another process needs to go on as if nothing had happened.

`take` is called by every worker at the same boundary between steps and gives the chief a
`Position`; `put` is called by every worker and makes the model what it was.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import logging
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engine import spread
from tfdist.engine.inventory import FIRST
from tfdist.engine.inventory import MEAN
from tfdist.engine.inventory import SUM
from tfdist.engine.inventory import Entry
from tfdist.engine.inventory import Piece
from tfdist.engine.inventory import parts
from tfdist.engine.peers import Peers
from tfdist.engine.plain import dtype_of

log = logging.getLogger("absl")


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a training is.

    Attributes:
        step: Batches trained since its beginning.
        facts: What JSON can say.
        arrays: Values by name, which no later step changes; not to be written to.
    """

    step: int
    facts: dict[str, Any]
    arrays: Mapping[str, np.ndarray]


def take(
    entries: list[Entry], peers: Peers, own: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[Any], dict[str, np.ndarray]]:
    """Reads all variables; called by every worker together.

    Args:
        entries: The variables.
        peers: The workers.
        own: What this worker has to tell the chief, fit for JSON.

    Returns:
        A record of each entry, what each worker told, and the values by name, on the chief alone.
        Nothing is copied that lies in the memory of this host: see `_read`.
    """
    local = {
        entry.name: np.stack([_read(part) for part in parts(entry.pieces[0].variable)])
        for entry in entries
        if entry.is_own
    }
    if peers.group is None:
        everyone = [{"own": own, "digests": {}}]
        rows = local
    else:
        told = {"own": own, "digests": {name: _digest(value) for name, value in local.items()}}
        everyone = peers.gather("its position", told)
        rows = _rows(peers, local, everyone)
    arrays: dict[str, np.ndarray] = {}
    records = []
    for entry in entries:
        value = rows.get(entry.name)
        record: dict[str, Any] = {
            "name": entry.name,
            "shape": list(entry.shape),
            "dtype": entry.dtype.name,
        }
        if value is None:
            record["first"] = [piece.first for piece in entry.pieces]
            if peers.is_chief:
                for piece in entry.pieces:
                    arrays[_name(entry.name, piece.first)] = _read(parts(piece.variable)[0])
        else:
            is_same = entry.merge != SUM and all(_equal(each, value[0]) for each in value)
            record["first"] = [0]
            record["merge"] = _merge_of(entry)
            record["replicas"] = 0 if is_same else len(value)
            arrays[_name(entry.name, 0)] = value[0] if is_same else value
        records.append(record)
    return records, [each["own"] for each in everyone], arrays


def put(
    entries: list[Entry],
    records: list[dict[str, Any]],
    arrays: Mapping[str, np.ndarray] | None,
    peers: Peers,
    same_topology: bool,
) -> None:
    """Gives the variables their values; called by every worker together.

    Args:
        entries: The variables of this process, by the names that `records` have.
        records: What `take` returned, of those that are to be restored.
        arrays: The values, on the chief.
        peers: The workers.
        same_topology: Whether there are as many replicas on as many workers as there were.
    """
    known = {entry.name: entry for entry in entries}
    wanted = [record for record in records if record["name"] in known]
    specs = [spec for record in wanted for spec in _specs(record)]
    source = arrays or {}
    found = spread.arrays(peers, specs, lambda name: np.asarray(source[name]))
    for record in wanted:
        entry = known[record["name"]]
        if "replicas" in record:
            value = next(found)[1]
            _put_own(entry, record, value, peers, same_topology)
        else:
            _put_rows(entry, record, found)
    for _ in found:  # So that the last packet is read to its end on every worker.
        pass


def _put_own(
    entry: Entry, record: dict[str, Any], value: np.ndarray, peers: Peers, same: bool
) -> None:
    own = parts(entry.pieces[0].variable)
    merge = record["merge"]
    rank = peers.group.rank if peers.group is not None else 0
    for index, part in enumerate(own):
        if not record["replicas"]:
            mine = value
        elif same:
            mine = value[rank * len(own) + index]
        elif merge == SUM:
            is_first = peers.is_chief and index == 0
            mine = value.sum(axis=0).astype(value.dtype) if is_first else np.zeros_like(value[0])
        elif merge == MEAN:
            mine = value.mean(axis=0, dtype=np.float64).astype(value.dtype)
        else:
            mine = value[0]
        part.assign(mine)


def _put_rows(
    entry: Entry, record: dict[str, Any], found: Iterator[tuple[str, np.ndarray]]
) -> None:
    """Assigns the pieces of an entry from those that were saved, in the order of rows."""
    if len(record["first"]) == 1 and len(entry.pieces) == 1:
        _assign(entry.pieces[0], next(found)[1])
        return
    pieces = iter(entry.pieces)
    piece = next(pieces)
    waiting: list[np.ndarray] = []
    for _ in record["first"]:
        rows = next(found)[1]
        while len(rows):
            missing = piece.shape[0] - sum(map(len, waiting))
            waiting.append(rows[:missing])
            rows = rows[missing:]
            if sum(map(len, waiting)) == piece.shape[0]:
                _assign(piece, waiting[0] if len(waiting) == 1 else np.concatenate(waiting))
                waiting = []
                piece = next(pieces, piece)


def _assign(piece: Piece, value: np.ndarray) -> None:
    for part in parts(piece.variable):
        part.assign(value)


def _specs(record: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], np.dtype]]:
    dtype, shape = dtype_of(record["dtype"]), tuple(record["shape"])
    if record.get("replicas"):
        shape = (record["replicas"], *shape)
    firsts = record["first"]
    for index, first in enumerate(firsts):
        if len(firsts) > 1:
            end = firsts[index + 1] if index + 1 < len(firsts) else record["shape"][0]
            shape = (end - first, *record["shape"][1:])
        yield _name(record["name"], first), shape, dtype


def _rows(
    peers: Peers, local: dict[str, np.ndarray], everyone: list[dict[str, Any]]
) -> dict[str, np.ndarray]:
    """Returns the values of all replicas of all workers, those that differ sent by each."""
    assert peers.group is not None
    differing = [
        name
        for name in local
        if any(each["digests"][name] != everyone[0]["digests"][name] for each in everyone)
    ]
    sent: list[dict[str, str]] = [{}] * len(everyone)
    if differing:
        mine = {name: base64.b64encode(local[name].tobytes()).decode() for name in differing}
        sent = peers.gather("values of its replicas", mine)
    rows = {}
    for name, value in local.items():
        if name in differing:
            texts = [base64.b64decode(each[name]) for each in sent]
            each_worker = [np.frombuffer(t, value.dtype).reshape(value.shape) for t in texts]
        else:
            each_worker = [value] * len(everyone)
        rows[name] = np.concatenate(each_worker)
    return rows


def _merge_of(entry: Entry) -> str:
    # A metric that is no sum is the same on all replicas; that is known after its first step.
    if entry.merge == SUM and getattr(entry.pieces[0].variable, "aggregation", "sum") != "sum":
        return FIRST
    return entry.merge


def _name(name: str, first: int) -> str:
    return f"{name}@{first}" if first else name


def _read(variable: Any) -> np.ndarray:
    """Returns what a variable holds now, as an array that no later update changes.

    On a CPU it is the very memory of the variable. TensorFlow's updates write in place only where
    nobody else holds that memory; else they take new memory and leave this to whoever holds it.
    """
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    array = np.asarray(value)
    array.flags.writeable = False  # TensorFlow's own rule, which it forgets for bfloat16.
    return array


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or a.tobytes() == b.tobytes()


def _digest(value: np.ndarray) -> str:
    return hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
