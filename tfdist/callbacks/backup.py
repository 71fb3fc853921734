"""A run that goes on where it was interrupted, as if it had not been."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

from tfdist.callbacks.schedule import Schedule
from tfdist.cluster import current
from tfdist.cluster import notice
from tfdist.cluster import words
from tfdist.engine import activate
from tfdist.engine import differences
from tfdist.engine import scope
from tfdist.engine import training as trainings
from tfdist.engine.description import describe
from tfdist.engine.position import Position
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.training import Training
from tfdist.engine.watcher import Watcher
from tfdist.errors import ConfigError
from tfdist.errors import StaleWriterError
from tfdist.errors import StoreError
from tfdist.errors import UnsupportedError
from tfdist.state import preemption
from tfdist.state.commit import Commit
from tfdist.state.commit import Snapshot
from tfdist.state.provenance import Provenance
from tfdist.state.store import Store
from tfdist.state.writer import AsyncWriter

log = logging.getLogger("absl")

_RESULT = "result"


class BackupAndRestore(Watcher):
    """Commits everything that training depends on, and goes on from the newest commit.

    In place of `keras.callbacks.BackupAndRestore`, under every strategy and on one device. A run
    that is killed and started again ends with the weights of one that was not: on the same number
    of workers and replicas bit for bit (CPU, deterministic operations), on another number at the
    same example. All workers pass it; only the chief needs `directory`. It acts after all other
    callbacks, whatever its place among them.

    A commit holds the weights, optimizers, metrics of the open epoch, random generators, place in
    the data, history, and what other callbacks remember. When training has ended, the last of
    these stays in `directory`; a run that is started again goes there and trains nothing, or the
    epochs that it is asked for beyond.

    Args:
        directory: Where commits are: a local path, or a URL such as `gs://bucket/run`.
        save_every: "epoch", a number of steps, or seconds as text: "60s" (by the chief's clock).
            With `steps_per_execution`, between executions; with gradients accumulated, between
            updates.
        keep: How many commits are kept.
        asynchronous: Whether commits are written while training goes on.
        delete_checkpoint: Whether commits are removed when training has ended.
        override: What may be another than when it began, and is then begun anew or gone on with
            as far as it is the same: "model", "optimizer", "metrics" or "data".

    Raises:
        ConfigError: An argument cannot be right; or, in `fit`, the model, the optimizer or the
            data are not those of the run that is in `directory`.

    Example:
        >>> strategy = tfdist.strategy()  # Or tfdist.activate(), without a strategy.
        >>> backup = tfdist.callbacks.BackupAndRestore("backup", save_every=100)
        >>> model.fit(data, epochs=3, callbacks=[backup])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: str | int = "epoch",
        keep: int = 2,
        asynchronous: bool = True,
        delete_checkpoint: bool = True,
        override: Iterable[str] = (),
    ):
        super().__init__()
        self.directory = os.fspath(directory)
        if not self.directory:
            raise ConfigError("a directory", repr(self.directory), "pass a path")
        self.save_every = save_every
        self.keep = keep
        self.asynchronous = asynchronous
        self.delete_checkpoint = delete_checkpoint
        self.override = (override,) if isinstance(override, str) else tuple(override)
        unknown = set(self.override) - set(differences.PARTS)
        if unknown:
            raise ConfigError(
                f"any of {', '.join(map(repr, differences.PARTS))} as override",
                ", ".join(map(repr, sorted(unknown))),
            )
        self._schedule = Schedule(save_every)
        Store(self.directory, keep=keep)  # Says what is wrong with `keep` here and now.
        self._store: Store | None = None
        self._writer: AsyncWriter | None = None
        self._preemption: preemption.Preemption | None = None
        self._record: Provenance | None = None
        self._ended = 0  # Calls of `fit` that this callback has seen the end of.
        if not activate.is_active():
            activate.activate()

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes sure that a loop that knows boundaries is under way."""
        if trainings.of(self.model) is not None:
            return
        if scope.is_without_strategy(self.model):
            # In `model.fit(callbacks=[BackupAndRestore(...)])` Python looks up `model.fit` first,
            # and what making this callback has put into Keras comes too late.
            raise UnsupportedError(
                "tfdist to be active when fit is called with BackupAndRestore",
                "fit of Keras alone",
                "call tfdist.activate() or tfdist.strategy() above, or start the script with "
                "`tfdist run`",
            )
        raise UnsupportedError(
            "a strategy that tfdist trains under, or none, with BackupAndRestore",
            type(self.model.distribute_strategy).__name__,
            "build the model under tfdist.strategy(), or use keras.callbacks.BackupAndRestore",
        )

    # What the training calls.

    def open(self, training: Training) -> None:
        """Reads the newest commit, on the chief; all workers go on from it."""
        _refuse_several(training)
        self._preemption = preemption.Preemption(training.peers.group, training.peers.name)
        self._preemption.open()
        found, is_over = None, False
        if training.is_chief:
            self._store = Store(self._place(), keep=self.keep)
            self._store.acquire()
            found, is_over = self._newest(training.epochs)
            self._writer = AsyncWriter(self._store, on_commit=self._note_commit)
        training.resume(found, self.override, is_over=is_over)
        if training.is_chief and not training.is_over:
            self._note_start(training)
        if training.is_over:
            log.warning(
                "the run in %s has ended after %d steps: nothing is trained. To train anew, give "
                "another directory or remove this one",
                self._place(),
                training.start,
            )
            self._ended += 1
            self._give_signal_back(pass_on=True)
        elif self.save_every != "epoch" and not training.has_position:
            log.warning("workers read the data for themselves: commits are made between epochs")
        self._schedule.begin(training.start)

    def is_due(self, training: Training) -> bool:
        """Returns whether a commit is due at this boundary, or at the next one that is whole."""
        if training.peers.group is None and self._is_preempted:
            return True
        if self._record is not None and is_asynchronous(training.model.distribute_strategy):
            self._record.progress(training.step)  # There are few boundaries.
        due = self._schedule.is_due(training.step, training.is_between_epochs)
        if self._schedule.seconds is None:
            return due
        return training.any_of(due and training.is_chief)

    def at_boundary(self, training: Training) -> None:
        """Commits, if that is due; ends the process if it is preempted."""
        assert self._preemption is not None
        if self._record is not None:
            self._record.progress(training.step)
        if self._preemption.stops_here():
            if training.can_capture:
                self._end_early(training)
        elif self.is_due(training) and training.can_capture and not training.is_at_last_batch:
            self.commit(training)

    def is_due_in_validation(self, training: Training) -> bool:
        """Returns whether the process is to end although an epoch is being validated."""
        return self._is_preempted and training.has_position

    def at_boundary_in_validation(self, training: Training) -> None:
        """Commits and ends the process, if it is preempted: validation may take longer than it has.

        The epoch is validated anew by the next start.
        """
        assert self._preemption is not None
        if self._preemption.stops_here() and training.has_position:
            self._end_early(training)

    def close(self, training: Training) -> None:
        """Keeps the last position, and removes the commits unless they are to be kept."""
        is_preempted = training.peers.any("whether it is preempted", self._is_preempted)
        found = training.capture()
        saved = None
        if self._store is not None:
            assert self._writer is not None and found is not None
            self._told(self._writer.close)
            store, snapshot = self._store, Snapshot(found.step, found.facts, found.arrays)
            if self._told(lambda: self._finish(store, snapshot, training.epochs)):
                saved = training.step
                self._note_end(training)
        if is_preempted:
            # What the program has left to do is done by the next start, which trains nothing.
            self._end(training, saved)
        self._store = self._writer = self._record = None
        self._ended += 1
        self._give_signal_back(pass_on=True)

    def abandon(self) -> None:
        """Completes what is being written."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        if self._record is not None:
            self._record.stop(words.in_one_line(sys.exc_info()[1] or Exception()))
        self._store = self._writer = self._record = None
        self._give_signal_back()

    @property
    def _is_preempted(self) -> bool:
        return self._preemption is not None and bool(
            self._preemption.is_signalled or self._preemption.sources
        )

    def _end_early(self, training: Training) -> None:
        """Commits at once and ends the process; all workers are at the same boundary."""
        self.commit(training, wait=True)
        last = None if self._writer is None else self._writer.last
        self._end(training, None if last is None else last.step)

    def _end(self, training: Training, saved: int | None) -> None:
        place = None if self._store is None else self._store.directory
        saved, place = training.peers.of_chief("what is saved", [saved, place])
        told = notice.Preempted(training.step, saved, place)
        if self._record is not None:
            self._record.stop("preempted")
            self._record = None
        assert self._preemption is not None
        preemption.end(self._preemption.sources, told)

    def _note_start(self, training: Training) -> None:
        """Notes where training goes on: in `run.json`, and for the launcher."""
        given = {"save_every": self.save_every, "keep": self.keep, "override": list(self.override)}
        facts = describe(training)
        facts["parameters"]["backup"] = given
        assert self._store is not None
        self._record = Provenance.start(self._store.directory, facts)
        self._record.resumed(training.start)
        notice.report_progress(os.environ, self._store.directory, training.start)

    def _note_end(self, training: Training) -> None:
        """Notes that the run has ended."""
        if self._record is not None:
            facts = {"step": training.step, "epochs": training.epoch, "logs": training.epoch_logs}
            self._record.finish(facts)
            self._record = None

    def _note_commit(self, commit: Commit) -> None:
        """Tells the launcher that a commit is complete."""
        notice.report_progress(os.environ, os.path.dirname(commit.directory), commit.step)

    def _give_signal_back(self, *, pass_on: bool = False) -> None:
        if self._preemption is not None:
            self._preemption.close(pass_on=pass_on)
        self._preemption = None

    def commit(self, training: Training, *, wait: bool = False) -> None:
        """Commits now.

        Args:
            training: The training; all workers are at the same boundary.
            wait: Whether to return when the commit is durable, on the chief.
        """
        writer = self._writer
        # What servers have sent is nobody else's.
        is_lent = not is_asynchronous(training.model.distribute_strategy)
        if writer is not None and not is_lent:
            # A table on servers may be so large that there is room for one copy only.
            self._told(writer.wait)
        began = time.perf_counter()
        found = training.capture()
        self._schedule.begin(training.step)
        if writer is None or found is None:
            return
        if self._record is not None:
            self._record.saved(training.step)
        snapshot = Snapshot(found.step, found.facts, found.arrays)
        spent = time.perf_counter() - began
        for _ in range(2):  # Who learns that the last one failed has to submit again.
            if self._told(lambda: writer.submit(snapshot, spent=spent, is_lent=is_lent)):
                break
        if wait or not self.asynchronous:
            self._told(writer.wait)

    def _told(self, write: Callable[[], Any]) -> bool:
        """Goes on training where a commit could not be written: the next one may be."""
        try:
            write()
        except StaleWriterError:
            raise
        except StoreError as error:
            log.error("training goes on, a commit could not be written: %s", error)
            return False
        return True

    def _place(self) -> str:
        # A callback that is given to `fit` again is in another phase of the same program.
        if not self._ended:
            return self.directory
        return os.path.join(self.directory, f"fit-{self._ended + 1}")

    def _finish(self, store: Store, last: Snapshot, epochs: int) -> None:
        store.confirm()  # A process that woke up late must not replace what a newer one has left.
        Store(os.path.join(store.directory, _RESULT), keep=1).write(last)
        # Only then: until here a restart goes on from the commits.
        store.finish({"epochs": epochs, "step": last.step}, keep=not self.delete_checkpoint)

    def _newest(self, epochs: int) -> tuple[Position | None, bool]:
        """Returns where to go on, and whether there is nothing left to do.

        Args:
            epochs: As given to `fit`.
        """
        assert self._store is not None
        ended = self._store.finished()
        if ended is not None:
            found = _read(Store(os.path.join(self._store.directory, _RESULT), keep=1))
            if found is not None:
                is_over = epochs <= ended["epochs"]
                if not is_over:
                    found.facts["stop"] = False  # It has come to its end, and is to go further.
                return found, is_over
        return _read(self._store), False


def _read(store: Store) -> Position | None:
    found = store.read_latest(mapped=True)
    if found is None:
        return None
    _, snapshot = found
    return Position(snapshot.step, dict(snapshot.facts), snapshot.arrays)


def _refuse_several(training: Training) -> None:
    """Refuses a job whose workers each train a model of their own, and write to one directory."""
    group = current.group()
    if group is None or training.peers.group is not None or group.cluster.has_parameter_servers:
        return
    if group.cluster.num_workers > 1:
        raise UnsupportedError(
            "a model that all workers train together, with BackupAndRestore",
            f"{group.cluster.num_workers} workers, each with a model of its own",
            "build the model inside strategy.scope()",
        )
