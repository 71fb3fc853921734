"""Records a training from within, at its boundaries, and holds it where a fault is to strike.

What it notes (`notes`), each with the time, the task and its incarnation:

| kind | says |
|---|---|
| `start` | a process of the task has begun |
| `fit` | `fit` was called, with a `BackupAndRestore` or without |
| `open` | where it goes on, and what the model was before it was told |
| `batch` | a batch was read: its place, rows, and a digest of its contents |
| `step` | a step is done (the chief) |
| `hold` | training waits for a strike (the chief) |
| `close` | `fit` has ended; `fit-N.json` and `fit-N.npz` hold what it ended with (the chief) |
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config as tensorflow_config

from tfdist.callbacks.backup import BackupAndRestore
from tfdist.engine import seeds
from tfdist.engine.parcels import Packed
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.training import Training
from tfdist.engine.watcher import Watcher
from tfdist.measure.notes import COMMITS
from tfdist.measure.notes import PLAN
from tfdist.measure.notes import Notes
from tfdist.measure.notes import strike_file

#: Then training goes on without the fault that it was held for.
_HOLD_SECONDS = 60.0


class Observer:
    """Adds a recorder to every training of this process that has a `BackupAndRestore`.

    Args:
        folder: Of the run.
        notes: Of this task.

    Attributes:
        done: Steps of the trainings before the one under way.
    """

    def __init__(self, folder: Path, notes: Notes):
        self.folder = folder
        self.notes = notes
        self.done = 0
        self._fits = 0
        plan = folder / PLAN
        self._steps = json.loads(plan.read_text()) if plan.exists() else []
        self._next = 0

    def __call__(self, training: Training) -> None:
        """Called with a training that is about to be opened."""
        backups = [w for w in training.watchers if isinstance(w, BackupAndRestore)]
        self.notes.add("fit", has_backup=bool(backups))
        if not backups:
            return
        for backup in backups:
            backup.directory = self._apart(backup.directory)
        self._fits += 1
        training.watch(Recorder(self, self._fits))
        self._count_batches(training, self._fits)

    def is_held(self, progress: int) -> bool:
        """Whether training is to wait for a strike when so many steps are done."""
        while self._next < len(self._steps) and progress >= self._steps[self._next]:
            if not strike_file(self.folder, self._next).exists():
                return True
            self._next += 1
        return False

    def hold(self, progress: int, is_chief: bool) -> None:
        """Waits for the strikes that are due."""
        deadline = time.monotonic() + _HOLD_SECONDS
        noted = -1
        while self.is_held(progress) and time.monotonic() < deadline:
            if is_chief and noted != self._next:
                noted = self._next
                self.notes.add("hold", strike=noted, progress=progress)
            time.sleep(0.002)

    def _apart(self, directory: str) -> str:
        commits = str(self.folder / COMMITS)
        if directory.startswith(commits + os.sep):
            return directory
        whole = directory if "://" in directory else os.path.abspath(directory)
        name = re.sub(r"\W+", "_", whole.rstrip("/").rpartition("/")[2])
        return os.path.join(commits, f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}")

    def _count_batches(self, training: Training, fit: int) -> None:
        inner = training.batches

        def counted() -> Generator[Any, None, None]:
            batches, number = inner(), training.batch
            try:
                for batch in batches:
                    rows, digest = _contents(batch)
                    self.notes.add(
                        "batch",
                        fit=fit,
                        epoch=training.epoch,
                        batch=number,
                        rows=rows,
                        digest=digest,
                    )
                    number += 1
                    yield batch
            finally:
                batches.close()

        training.batches = counted  # type: ignore[method-assign]


class Recorder(Watcher):
    """Records one call of `fit`.

    Args:
        observer: Of this process.
        fit: Number of the call among those with a `BackupAndRestore`, from 1.
    """

    def __init__(self, observer: Observer, fit: int):
        super().__init__()
        self._observer = observer
        self._notes = observer.notes
        self._fit = fit
        self._told = -1

    def open(self, training: Training) -> None:
        """Notes where it goes on."""
        self._notes.add(
            "open",
            fit=self._fit,
            step=training.start,
            progress=self._observer.done + training.start,
            is_over=training.is_over,
            is_chief=training.is_chief,
            weights=_weights_digest(training.model) if training.is_chief else "",
            is_seeded=seeds.program_is_seeded(),
            is_deterministic=bool(tensorflow_config.is_op_determinism_enabled()),
            is_asynchronous=is_asynchronous(training.model.distribute_strategy),
        )
        if training.is_over:
            self._observer.done += training.start

    def is_due(self, training: Training) -> bool:
        """Whether a fault is to strike; parameter servers ask, others are held anyway."""
        self._note_step(training)
        return self._observer.is_held(self._observer.done + training.step)

    def at_boundary(self, training: Training) -> None:
        """Notes the step, and waits for faults."""
        self._note_step(training)
        self._observer.hold(self._observer.done + training.step, training.is_chief)

    def close(self, training: Training) -> None:
        """Saves what training ended with."""
        found = training.capture()
        self._observer.done += training.step
        if found is None:
            return
        history = training.model.history
        folder = self._observer.folder
        names = sorted(found.arrays)
        arrays = {f"a{n}": _plain(found.arrays[name]) for n, name in enumerate(names)}
        aside = folder / f"fit-{self._fit}.part.npz"
        np.savez(aside, **arrays)  # type: ignore[arg-type]
        os.replace(aside, folder / f"fit-{self._fit}.npz")
        told = {
            "steps": training.step,
            "epochs": list(getattr(history, "epoch", [])),
            "history": history.history,
            "names": names,
        }
        aside = folder / f"fit-{self._fit}.part.json"
        aside.write_text(json.dumps(told, default=_as_list), encoding="utf-8")
        os.replace(aside, folder / f"fit-{self._fit}.json")
        self._notes.add("close", fit=self._fit, steps=training.step)

    def _note_step(self, training: Training) -> None:
        if training.is_chief and training.step != self._told:
            self._told = training.step
            self._notes.add(
                "step",
                fit=self._fit,
                progress=self._observer.done + training.step,
                epoch=training.epoch,
                batch=training.batch,
            )


def _contents(batch: Any) -> tuple[int, str]:
    """Returns the number of rows in this process's part of a batch, and a digest of it."""
    # To parameter servers batches go as bytes.
    data = tuple(batch) if isinstance(batch, Packed) else getattr(batch, "data", batch)
    digest = hashlib.sha256()
    leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        text = repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
        digest.update(f"{array.dtype} {array.shape} ".encode() + text)
    if isinstance(batch, Packed):
        return batch.rows, digest.hexdigest()[:16]
    first = data
    while isinstance(first, (list, tuple, dict)) and first:
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    local = getattr(first, "values", None) if hasattr(first, "_values") else None
    rows = 0
    for part in local if isinstance(local, (list, tuple)) else [first]:
        shape = getattr(part, "shape", None)
        rows += int(shape[0]) if shape is not None and len(shape) and shape[0] else 0
    return rows, digest.hexdigest()[:16]


def _weights_digest(model: Any) -> str:
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> np.ndarray:
    array = np.asarray(value)
    # Types that NumPy does not know (bfloat16, float8) are held by float32 exactly.
    return array if array.dtype.kind in "biufcSU" else array.astype("float32")


def _as_list(value: Any) -> Any:
    return np.asarray(value).tolist()
