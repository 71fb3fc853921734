"""One call of `fit` as an object: where it is, and how to save and restore that.

Both loops keep a `Training`. Between steps and between epochs all workers are at a boundary; who
wants to act there is a `Watcher` among the callbacks, or registers with `Training.watch`:

    class EveryHundred(Watcher):
        def at_boundary(self, training):
            if training.step % 100 == 0:
                position = training.capture()       # on every worker; None but on the chief

A boundary costs nothing where nobody watches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfdist.engine import accumulation
from tfdist.engine import callback_states
from tfdist.engine import callbacks as callback_rules
from tfdist.engine import differences
from tfdist.engine import own_state
from tfdist.engine import plain
from tfdist.engine import position
from tfdist.engine.inventory import inventory
from tfdist.engine.kinds import Kinds
from tfdist.engine.peers import Peers
from tfdist.engine.position import Position
from tfdist.engine.replicas import is_synchronous
from tfdist.engine.resumption import Resumption
from tfdist.engine.watcher import Watcher
from tfdist.engine.watcher import has_watchers
from tfdist.errors import ConfigError

log = logging.getLogger("absl")

_current: weakref.WeakKeyDictionary[Any, Training] = weakref.WeakKeyDictionary()

#: Called with every training that is about to be opened: here measurements add their watchers.
observers: list[Callable[[Training], None]] = []


def of(model: Any) -> Training | None:
    """Returns the training of `model` that is under way, or None."""
    return _current.get(model)


class Training:
    """One call of `fit`.

    Args:
        model: The built model.
        feed: Its data.
        peers: The other workers.
        calls: The `CallbackList`.
        epochs: Number of the last epoch, as given to `fit`.
        held_out: The `Feed` that is validated on, or None.

    Attributes:
        epoch: The epoch under way, or the next one between two epochs; from 0.
        batch: Batches done in it.
        step: Batches done since the beginning, those of earlier processes among them.
        logs: What the last step returned.
        epoch_logs: Logs of the last epoch that has ended.
        trained_logs: Logs of the steps of the epoch under way, while it is validated; else None.
        is_over: Whether an earlier process has brought it to its end.
        has_ended: Whether this process has.
        loop_state: What else the loop keeps within an epoch, fit for JSON; None but on parameter
            servers.
    """

    def __init__(
        self, model: Any, feed: Any, peers: Peers, calls: Any, epochs: int, held_out: Any = None
    ):
        self.model = model
        self.feed = feed
        self.held_out = held_out
        self.peers = peers
        self.epochs = epochs
        self.epoch = self.batch = self.step = 0
        self.logs: Any = {}
        self.epoch_logs: Any = None
        self.trained_logs: Any = None
        self.is_over = self.has_ended = False
        self.loop_state: Any = None
        #: Shapes of batches, where the step is Keras's own.
        self.kinds = Kinds() if has_watchers(calls) else None
        self._calls = calls
        self._watchers = [each for each in calls.callbacks if isinstance(each, Watcher)]
        self._states = callback_states.CallbackStates(calls.callbacks)
        self._optimizer = differences.optimizer_facts(model) if self._watchers else []
        self._data = differences.data_facts(feed) if self._watchers else {}
        self._found: Resumption | None = None
        self._tables: list[Any] = []
        self._is_done = False
        for observe in observers:
            observe(self)

    def __enter__(self) -> Training:
        _current[self.model] = self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _current.pop(self.model, None)
        if kind is not None:
            for watcher in self._watchers:
                watcher.abandon()

    # What the loops call, in this order.

    def open(self) -> bool:
        """Asks watchers where to go on; returns whether there is nothing left to do."""
        for watcher in self._watchers:
            watcher.open(self)
        found = self._found
        if found is None:
            return False
        found.receive()
        if self.is_over:
            found.put_variables()
            found.put_history(self._calls)
            # What shuffles comes in the order of a later pass when the program reads it again.
            with contextlib.suppress(ConfigError):
                found.put_data(self.feed, self.held_out)
            found.put_callbacks(self._states)
            return True
        found.put_data(self.feed, self.held_out)
        self._tables = callback_states.reopen_tables(self._calls.callbacks, found.facts["epoch"])
        return False

    def begin(self, start: int) -> int:
        """Goes to where it is to go on; after `on_train_begin`.

        Args:
            start: The epoch to start from otherwise.

        Returns:
            The epoch to start from.
        """
        self.epoch = start
        if not self._watchers:
            return start
        for table in self._tables:
            table.append = False
        self._states.begin()
        found = self._found
        if found is None:
            return start
        accumulation.begin()  # All replicas get the same sums, whatever was broken off here.
        facts = found.facts
        if self.kinds is not None:
            self.kinds.repeat(facts["kinds"], self.feed.spec, self.model)
        found.put_variables()
        found.put_history(self._calls)
        self.epoch, self.batch, self.step = facts["epoch"], facts["batch"], facts["step"]
        self.logs = plain.decode(found.mine["logs"])
        self.epoch_logs = plain.decode(facts["epoch_logs"])
        self.trained_logs = plain.decode(facts.get("trained_logs"))
        self.loop_state = facts["loop"]
        if hasattr(self.model.train_function, "resume"):
            self.model.train_function.resume(found.mine["weight"])
        found.put_callbacks(self._states)
        log.info("training goes on after %d steps, in epoch %d", self.step, self.epoch + 1)
        return self.epoch

    @property
    def is_within_epoch(self) -> bool:
        """Whether the epoch that comes next was begun by an earlier process."""
        return self._found is not None and self._found.is_within_epoch

    @property
    def is_stopped(self) -> bool:
        """Whether the earlier process was about to stop when its position was taken."""
        return self._found is not None and bool(self._found.facts["stop"])

    def enter(self, epoch: int) -> int:
        """Begins an epoch; after `on_epoch_begin`. Returns how many batches of it are done."""
        if not self.is_within_epoch:
            self._found = None
        self._is_done = self.is_stopped
        self.epoch = epoch
        if self._found is None:
            self.batch = 0
            return 0
        # What callbacks have done at its beginning, they had done before the position was taken.
        acts = callback_rules.act_on_epoch_begin(self._calls.callbacks)
        acts = self.peers.any("whether callbacks begin the epoch", acts)
        self._found.put_variables(only_rates=not acts)
        self._found.put_callbacks(self._states, anew=True)
        self._found = None
        return self.batch

    def batches(self) -> Any:
        """Returns the batches of this epoch that are left to do."""
        if self._is_done:
            # The earlier process was about to stop: it is not gone on with.
            return _nothing()
        return self.feed.epoch(done=self.batch) if self.batch else self.feed.epoch()

    def advance(self, batches: int, logs: Any) -> None:
        """Notes that a number of batches have been trained on."""
        self.batch += batches
        self.step += batches
        self.logs = logs

    def leave(self, logs: Any) -> None:
        """Ends an epoch; after `on_epoch_end`."""
        self.epoch += 1
        self.batch = 0
        self.epoch_logs = logs
        self.trained_logs = None
        self.loop_state = None
        self._found = None

    def boundary(self) -> None:
        """Lets watchers act; all workers are at the same place."""
        for watcher in self._watchers:
            watcher.at_boundary(self)

    def is_due_in_validation(self) -> bool:
        """Whether a watcher wants to act although the epoch is being validated."""
        return any(watcher.is_due_in_validation(self) for watcher in self._watchers)

    def boundary_in_validation(self) -> None:
        """Lets watchers act between two steps of validation; all workers are at the same place."""
        for watcher in self._watchers:
            watcher.at_boundary_in_validation(self)

    def has_data(self, start: int) -> bool:
        """Whether the epoch had any batch; says so where it had none.

        Args:
            start: The first epoch.

        Raises:
            ValueError: It is that one.
        """
        if self.batch:
            return True
        if self.epoch == start:
            raise ValueError("Expected data to train on. Received: no batch at all.")
        warnings.warn(
            "Your input ran out of data; interrupting training. Use `.repeat()`, or a dataset that "
            "can be read once an epoch.",
            stacklevel=5,
        )
        return False

    def close(self) -> None:
        """Ends it; after `on_train_end`."""
        self.has_ended = True
        for watcher in self._watchers:
            watcher.close(self)

    # What watchers call, on every worker at the same boundary.

    def watch(self, watcher: Any) -> None:
        """Lets a `Watcher` that is not among the callbacks act at boundaries."""
        self._watchers.append(watcher)

    @property
    def watchers(self) -> tuple[Any, ...]:
        """Who acts at boundaries."""
        return tuple(self._watchers)

    def commit(self, *, wait: bool = False) -> None:
        """Makes the position durable, if anybody here does that: see `Watcher.commit`."""
        for watcher in self._watchers:
            watcher.commit(self, wait=wait)

    @property
    def has_position(self) -> bool:
        """Whether it is known where the data is; not so where workers read for themselves."""
        return callable(getattr(self.feed, "position", None))

    @property
    def is_watched(self) -> bool:
        """Whether anybody acts at boundaries."""
        return bool(self._watchers)

    @property
    def is_due(self) -> bool:
        """Whether a watcher wants to act."""
        return any(watcher.is_due(self) for watcher in self._watchers)

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes."""
        return self.peers.is_chief

    @property
    def is_between_epochs(self) -> bool:
        """Whether this boundary is one between two epochs."""
        return self.batch == 0

    @property
    def is_at_last_batch(self) -> bool:
        """Whether the epoch is known to have no more batches."""
        return self.batch > 0 and self.batch == self.feed.num_batches

    @property
    def can_capture(self) -> bool:
        """Whether no update is half done: gradients are accumulated by each replica for itself."""
        if self.is_between_epochs or not is_synchronous(self.model.distribute_strategy):
            return True
        return not accumulation.Accumulation(self.model).is_open

    @property
    def start(self) -> int:
        """Batches that earlier processes have done."""
        return 0 if self._found is None else int(self._found.facts["step"])

    def any_of(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any worker."""
        return self.peers.any_in_step(flag)

    def capture(self) -> Position | None:
        """Returns the position, on the chief; None on other workers. A collective.

        Its arrays hold the memory of variables: while they are kept, updates take new memory.
        """
        entries = inventory(self.model)
        more: dict[str, np.ndarray] = {}
        own = own_state.capture(self, self._states, more)
        records, workers, arrays = position.take(entries, self.peers, own)
        if not self.is_chief:
            return None
        facts = {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "stop": bool(self.model.stop_training),
            "epochs": self.epochs,
            "entries": records,
            "workers": workers,
            "kinds": self.kinds.shapes if self.kinds is not None else [],
            "chief": self.peers.group.chief_rank if self.peers.group is not None else 0,
            "history": own_state.history(self._calls, more),
            "epoch_logs": plain.encode(self.epoch_logs),
            "trained_logs": plain.encode(self.trained_logs),
            "loop": self.loop_state,
            "arrays": {
                name: [list(a.shape), plain.dtype_name(a.dtype)] for name, a in more.items()
            },
            "optimizer": self._optimizer,
            "data": self._data,
            "topology": differences.topology(self.model, self.peers),
            "versions": differences.versions(),
        }
        # Callbacks write to theirs in place.
        arrays.update({name: np.array(value) for name, value in more.items()})
        return Position(self.step, facts, arrays)

    def resume(
        self, found: Position | None, override: Iterable[str] = (), *, is_over: bool = False
    ) -> None:
        """Lets training go on from a position; within `Watcher.open`. A collective.

        Args:
            found: The position, on the chief; or None, to begin anew.
            override: Parts that may be others than they were: see `differences.PARTS`.
            is_over: Whether it is the result of a training that has ended.

        Raises:
            ConfigError: The model, its optimizer or the data are others.
        """
        told = None
        if self.is_chief and found is not None:
            told = json.dumps([found.facts, is_over])
        text = self.peers.of_chief("where to go on", told)
        if text is None:
            return
        facts, self.is_over = json.loads(text)
        if self.is_over:
            facts = {**facts, "optimizer": self._optimizer, "data": self._data, "batch": 0}
        arrays = found.arrays if found is not None else {}
        resumption = Resumption(self.model, self.peers, facts, arrays)
        spec = getattr(self.feed, "spec", None)
        resumption.check(self._optimizer, self._data, spec, override)
        self._found = resumption
        if facts["versions"] != differences.versions():
            log.warning(
                "training goes on with %s; it began with %s: numbers may differ in the last digits",
                differences.versions(),
                facts["versions"],
            )


def _nothing() -> Generator[Any, None, None]:
    yield from ()
