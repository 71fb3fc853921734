"""What a run has left behind, and how that of two runs differs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_GROUPS = {
    "model": "weights",
    "optimizer": "optimizer",
    "metrics": "metric states",
    "random": "random generators",
}


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a call of `fit` has ended with.

    Attributes:
        steps: Batches trained.
        epochs: Numbers of the epochs.
        history: As `History` has it.
        arrays: Values of all variables by name: weights, optimizer, metrics, generators.
    """

    steps: int
    epochs: tuple[int, ...]
    history: Mapping[str, list[Any]]
    arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known about a run.

    Attributes:
        fits: By number, from 1.
        batches: Fit, task, epoch and number of a batch -> rows and digest. Of a batch that was read
            more than once, what was read last: it is the one that the result was trained on.
        reads: How many batches were read, those that were read again among them.
        beginnings: Digest of the weights of the chief's model before each fit that began anew.
        is_seeded: Whether the script had set a seed whenever a fit began; None if none did.
        is_deterministic: The same of deterministic operations.
        is_asynchronous: Whether workers did not wait for each other.
    """

    fits: Mapping[int, Fit]
    batches: Mapping[tuple[int, str, int, int], tuple[int, str]]
    reads: int
    beginnings: Mapping[int, str]
    is_seeded: bool | None
    is_deterministic: bool | None
    is_asynchronous: bool


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison of two runs.

    Attributes:
        name: What was compared.
        ok: Whether it is the same.
        detail: The numbers.
        counts: Whether it must be the same for recovery to be exact.
    """

    name: str
    ok: bool
    detail: str
    counts: bool = True


def gather(folder: Path, notes: Sequence[Mapping[str, Any]]) -> Evidence:
    """Returns what a run has left behind.

    Args:
        folder: Of the run.
        notes: All that its tasks noted.
    """
    batches: dict[tuple[int, str, int, int], tuple[int, int, str]] = {}
    beginnings: dict[int, str] = {}
    reads = 0
    opened = [note for note in notes if note["kind"] == "open" and note["is_chief"]]
    for note in notes:
        if note["kind"] == "batch":
            reads += 1
            key = (note["fit"], note["task"], note["epoch"], note["batch"])
            last = batches.get(key)
            if last is None or last[0] <= note["incarnation"]:
                batches[key] = (note["incarnation"], note["rows"], note["digest"])
    for note in opened:
        if not note["progress"] and note["fit"] not in beginnings:
            beginnings[note["fit"]] = note["weights"]
    return Evidence(
        fits=_fits(folder),
        batches={key: (rows, digest) for key, (_, rows, digest) in batches.items()},
        reads=reads,
        beginnings=beginnings,
        is_seeded=all(note["is_seeded"] for note in opened) if opened else None,
        is_deterministic=all(note["is_deterministic"] for note in opened) if opened else None,
        is_asynchronous=any(note["is_asynchronous"] for note in opened),
    )


def compare(wanted: Evidence, found: Evidence) -> list[Check]:
    """Returns how a run differs from the one in peace.

    Args:
        wanted: Of the run in peace.
        found: Of the other.
    """
    checks = [_same_fits(wanted, found)]
    # Workers that do not wait for each other come to other weights every time.
    exact = not wanted.is_asynchronous
    for number, fit in wanted.fits.items():
        other = found.fits.get(number)
        if other is None:
            continue
        label = "" if len(wanted.fits) == 1 else f" of fit {number}"
        checks += _same_arrays(fit, other, label, exact)
        checks.append(_same_updates(fit, other, label))
        checks.append(_same_history(fit, other, label, exact))
    checks.append(_same_counts(wanted, found))
    checks.append(_same_contents(wanted, found))
    return checks


def why(
    wanted: Evidence, found: Evidence, again: Evidence | None, differs: Iterable[Check]
) -> list[str]:
    """Returns what explains that two runs differ, best first.

    Args:
        wanted: Of the run in peace.
        found: Of the run with faults.
        again: Of a second run in peace, if there was one.
        differs: What differs between the first two.
    """
    reasons = []
    not_alike = []
    if again is not None:
        not_alike = [c.name for c in compare(wanted, again) if c.counts and not c.ok]
    starts = wanted.beginnings.get(1), found.beginnings.get(1)
    if None not in starts and starts[0] != starts[1]:
        reasons.append(
            "The model began with other weights in the two runs: it is not seeded. Call "
            "keras.utils.set_random_seed(n) or tfdist.seed(n) before the model is built."
        )
    elif not_alike and wanted.is_seeded is False:
        reasons.append(
            "The script is not seeded. Call keras.utils.set_random_seed(n) or tfdist.seed(n)."
        )
    if not_alike:
        reasons.append(
            f"Two runs in peace differ as well ({', '.join(not_alike)}), so this says nothing "
            "about recovery."
        )
        if not wanted.is_deterministic:
            reasons.append(
                "Operations are not deterministic. Call "
                "tf.config.experimental.enable_op_determinism()."
            )
    elif again is not None:
        names = ", ".join(check.name for check in differs)
        reasons.append(
            f"Two runs in peace are the same, so the recovery is what made the difference: {names}."
        )
    return reasons


def _fits(folder: Path) -> dict[int, Fit]:
    found = {}
    for path in folder.glob("fit-*.json"):
        word = path.stem.partition("-")[2]
        if not word.isdigit():
            continue
        told = json.loads(path.read_text(encoding="utf-8"))
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as values:
            arrays = {name: values[f"a{n}"] for n, name in enumerate(told["names"])}
        found[int(word)] = Fit(told["steps"], tuple(told["epochs"]), told["history"], arrays)
    return dict(sorted(found.items()))


def _same_fits(wanted: Evidence, found: Evidence) -> Check:
    def described(evidence: Evidence) -> str:
        each = [f"{f.steps} steps, {len(f.epochs)} epochs" for f in evidence.fits.values()]
        return "; ".join(each) or "no fit that came to its end"

    one, other = ([(f.steps, f.epochs) for f in each.fits.values()] for each in (wanted, found))
    same = one == other and list(wanted.fits) == list(found.fits)
    text = described(wanted) if same else f"{described(wanted)} / {described(found)}"
    return Check("steps and epochs", same, text)


def _same_updates(wanted: Fit, found: Fit, label: str) -> Check:
    one, other = (
        [int(v) for k, v in fit.arrays.items() if k.endswith("/iteration")]
        for fit in (wanted, found)
    )
    text = ", ".join(map(str, one)) if one == other else f"{one} / {other}"
    return Check(f"updates{label}", one == other, text or "no optimizer counts them")


def _same_arrays(wanted: Fit, found: Fit, label: str, exact: bool) -> list[Check]:
    checks = []
    for group, name in _GROUPS.items():
        mine = {k: v for k, v in wanted.arrays.items() if k.partition("/")[0] == group}
        theirs = {k: v for k, v in found.arrays.items() if k.partition("/")[0] == group}
        if not mine and not theirs:
            continue
        if {k: v.shape for k, v in mine.items()} != {k: v.shape for k, v in theirs.items()}:
            detail = f"{len(mine)} / {len(theirs)} arrays, or of other shapes"
            checks.append(Check(name + label, False, detail, exact))
            continue
        other = [k for k in mine if mine[k].tobytes() != theirs[k].tobytes()]
        size = sum(value.size for value in mine.values())
        if not other:
            detail = f"{len(mine)} arrays, {size} numbers, bit for bit"
        else:
            # States of random generators, which lie among the weights of layers, have no distance.
            numbers = [k for k in other if mine[k].dtype.kind == "f"] or other
            worst = max(_distance(mine[k], theirs[k]) for k in numbers)
            detail = f"{len(other)} of {len(mine)} arrays differ, by {worst:.3g} at most"
        checks.append(Check(name + label, not other, detail, exact))
    return checks


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    if one.dtype.kind not in "biuf":
        return math.nan
    with np.errstate(all="ignore"):
        apart = np.abs(one.astype("float64") - other.astype("float64"))
    return float(np.nanmax(apart)) if apart.size and not np.isnan(apart).all() else math.nan


def _same_history(wanted: Fit, found: Fit, label: str, exact: bool) -> Check:
    mine, theirs = json.dumps(wanted.history), json.dumps(found.history)
    if mine == theirs:
        last = ", ".join(
            f"{k} {v[-1]:.6g}" for k, v in wanted.history.items() if v and _is_number(v[-1])
        )
        return Check(f"history{label}", True, f"{len(wanted.epochs)} epochs; last: {last}", exact)
    for name in {**wanted.history, **found.history}:
        one, other = wanted.history.get(name), found.history.get(name)
        if json.dumps(one) != json.dumps(other):
            break
    where = f"{name} differs"
    if one is not None and other is not None:
        pairs = list(zip(one, other, strict=False))
        at = next((n for n, (a, b) in enumerate(pairs) if json.dumps(a) != json.dumps(b)), None)
        if at is None:
            where = f"{name} has {len(one)} / {len(other)} epochs"
        elif _is_number(one[at]) and _is_number(other[at]):
            where = f"{name} of epoch {at + 1}: {one[at]!r} / {other[at]!r}"
        else:
            where = f"{name} of epoch {at + 1} differs"
    return Check(f"history{label}", False, where, exact)


def rows_by_epoch(evidence: Evidence) -> dict[tuple[int, int], int]:
    """Returns the rows that each epoch was trained on, over all tasks.

    Args:
        evidence: Of a run.
    """
    found: dict[tuple[int, int], int] = {}
    for (fit, _, epoch, _), (rows, _) in evidence.batches.items():
        found[fit, epoch] = found.get((fit, epoch), 0) + rows
    return dict(sorted(found.items()))


def _same_counts(wanted: Evidence, found: Evidence) -> Check:
    mine, theirs = rows_by_epoch(wanted), rows_by_epoch(found)
    if not mine and not theirs:
        return Check("examples", True, "not known: workers read for themselves", False)
    if mine == theirs:
        counts = sorted(set(mine.values()))
        each = " or ".join(map(str, counts[:3])) + (" ..." if len(counts) > 3 else "")
        return Check("examples", True, f"{each} rows in each of {len(mine)} epochs")
    key = next(k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k))
    detail = f"epoch {key[1] + 1}: {mine.get(key, 0)} / {theirs.get(key, 0)} rows"
    return Check("examples", False, detail)


def _same_contents(wanted: Evidence, found: Evidence) -> Check:
    mine, theirs = wanted.batches, found.batches
    other = sorted(k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k))
    if not other:
        again = found.reads - len(theirs)
        detail = f"{len(mine)} batches hold the same examples; {again} were read again"
        return Check("contents of batches", True, detail)
    _, task, epoch, batch = other[0]
    detail = (
        f"{len(other)} of {len(mine)} batches hold other examples, first batch {batch + 1} of "
        f"epoch {epoch + 1} on {task}"
    )
    return Check("contents of batches", False, detail)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
