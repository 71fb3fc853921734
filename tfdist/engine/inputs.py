"""Turns whatever `fit` is given into batches for every replica, the same examples as on one device.

A batch as the user wrote it is the global batch. Every worker builds the same pipeline; TensorFlow
splits each global batch by example and every replica takes its part, so global batch i holds the
same examples on any number of workers.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

from keras.src.backend import config as keras_config

from tfdist.data.sharded import Sharded
from tfdist.engine import input_wait
from tfdist.engine.given import Given
from tfdist.engine.input_wait import InputWait
from tfdist.engine.sources import Shards
from tfdist.engine.sources import Source
from tfdist.errors import ConfigError

log = logging.getLogger("absl")


class Feed:
    """The batches of one source of data, epoch after epoch.

    Args:
        strategy: The `tf.distribute.Strategy` of the model; the default one, too.
        x, y, sample_weight, batch_size, steps, shuffle, class_weight: As `fit` takes them; `steps`
            is `steps_per_epoch` or the like, or None to read the data to its end. `x` may be a
            `tfdist.data.Sharded`.
        recoverable: Whether `restore` is to find the exact place. Arrays and `PyDataset`s are then
            read in an order that follows from a seed, also where Keras would draw a new one.

    Attributes:
        spec: Structure of `tf.TypeSpec` of one replica's batch.
        policy: How the data is split over workers: "example", "file", "off" or "given" (a dataset
            that is already distributed).
        input_wait: How long the loop waited for data in the last epoch, or None before its end and
            where that is not known (devices that TensorFlow reads ahead for; fewer than 3 batches).
    """

    def __init__(
        self,
        strategy: Any,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        shuffle: bool | str = False,
        class_weight: Any = None,
        recoverable: bool = False,
    ):
        self.strategy = strategy
        limit = keras_config.max_steps_per_epoch()
        self.steps = min(filter(None, (limit, steps)), default=None)
        self._source: Source
        if isinstance(x, Sharded):
            _refuse(y=y, sample_weight=sample_weight)
            self._source = Shards(strategy, x, class_weight)
        else:
            given = Given(
                strategy,
                x,
                y,
                sample_weight,
                batch_size=batch_size,
                steps=self.steps,
                shuffle=shuffle,
                class_weight=class_weight,
                recoverable=recoverable,
            )
            shards = given.as_shards()
            if shards is None:
                given.open()
            self._source = shards or given
        # Of arrays Keras warns where they end in the middle of an epoch; so do we.
        self._passes_over = isinstance(x, Sharded)
        self.spec, self.policy = self._source.spec, self._source.policy
        self._open = False
        self._resumed = False
        self._length: int | None = None
        self.input_wait: InputWait | None = None
        self._has_warned = False
        # Passes begun, batches taken of the last of them, iterators made.
        self._passes = self._taken = self._iterators = 0

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch, or None where that is not known before the end of the first."""
        return self.steps or self._source.num_batches or self._length

    @property
    def cardinality(self) -> int | None:
        """Batches of the data itself: -1 if it never ends, None if that is not known."""
        return self._source.cardinality

    def sample(self) -> Callable[[], Any] | None:
        """Returns a function that reads one batch without losing it, or None where it would."""
        return self._source.sample()

    def epoch(self, done: int = 0) -> Generator[Any, None, None]:
        """Yields the batches of the next epoch, each with the values of all local replicas.

        With `steps`, data that is not finished goes on in the next epoch, as in Keras.

        Args:
            done: Steps of this epoch that were done before a `restore`.
        """
        self._source.begin_epoch()
        measured = input_wait.Epoch(self._source.waiting)
        try:
            # After a `restore`, the pass that was open goes on.
            goes_on = self._open and (self._resumed or self.steps is not None)
            self._resumed = False
            if done and not self._open and self.steps is None:
                # The last steps of the epoch were done as one execution, which read on to the end.
                self._length = done
                return
            if not goes_on:
                self._start()
            count = done
            while self.steps is None or count < self.steps:
                batch = self._source.next()
                if batch is None:
                    self._open = False
                    if self.steps is None or not self._rewind(count):
                        break
                    continue
                count += 1
                self._taken += 1
                measured.has_batch()
                yield batch
            self._length = count
            if self.steps is None and self._source.spare:
                # Keras makes an iterator here that it never reads. The order of a dataset that
                # shuffles anew for every iterator is only the same as on one device with it.
                self._iterators += 1
                self._source.spare_iterator()
                self._open = False
        finally:
            self._source.end_epoch()
            self.input_wait = measured.result()
            if self.input_wait is not None:
                warn = not self._has_warned
                self._has_warned |= input_wait.tell(self.input_wait, warn=warn)

    def restart(self) -> None:
        """Makes the next epoch begin at the start of the data."""
        self._open = False

    def position(self, taken: int | None = None) -> dict[str, Any]:
        """Returns where the loop stands between two steps; what was read ahead does not count.

        All of it is fit for JSON but "iterator": the state of this worker's `tf.data` iterator
        as bytes, or None where none is needed, or TensorFlow cannot save it. The rest is the same
        on every worker.

        Args:
            taken: Batches of the open pass that the loop has dealt with, if it has read more.
        """
        behind = taken is not None and taken != self._taken
        policy, workers, replicas = self._source.split
        return {
            "kind": self._source.kind,
            "epoch": self._passes,
            "batch": self._taken if taken is None else taken,
            "open": self._open,
            "policy": policy,
            "seed": self._source.seed,
            "iterators": self._iterators,
            "workers": workers,
            "replicas": replicas,
            "fingerprint": self._fingerprint,
            "iterator": self._source.saved() if self._open and not behind else None,
        }

    @functools.cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return self._source.fingerprint()

    def restore(self, position: dict[str, Any], *, force: bool = False) -> None:
        """Goes on where a feed of the same data stood; `epoch(done=...)` reads on from there.

        Args:
            position: What `position` has returned, in this process or an earlier one.
            force: Whether to go on although the data is another.

        Raises:
            ConfigError: The position is one of other data.
        """
        mine, theirs = self._fingerprint, position["fingerprint"]
        if theirs != mine:
            if not force:
                raise _other_data(theirs, mine)
            log.warning("the data is another than that of the position: %s", _differ(theirs, mine))
        if position["seed"] is not None and position["seed"] != self._source.seed:
            self._source.reseed(position["seed"])
        self._passes, self._taken = position["epoch"], position["batch"]
        self._iterators = position["iterators"]
        if self.steps is not None:
            self._length = self._taken or None
        self._open = self._resumed = position["open"]
        mine_now = self._source.split
        split = position["policy"], position["workers"], position["replicas"]
        if {split[0], mine_now[0]} & {"file", "given"} and self._open and split != mine_now:
            if self._source.go_on(self._passes - 1, self._taken, split):
                return
            log.warning(
                "each of %d workers has read files or examples of its own, and there are %d now: "
                "the rest of pass %d holds some examples twice and others never; later passes "
                "are whole",
                split[1],
                mine_now[1],
                self._passes,
            )
        if self._passes:
            self._source.go_to(
                self._passes - 1,
                self._taken if self._open else -1,
                self._iterators,
                position["iterator"] if split[1:] == mine_now[1:] else None,
            )

    def past(self) -> dict[str, Any]:
        """Returns which passes lie behind a feed that is always read from its start, as JSON."""
        return {
            "epoch": self._passes,
            "iterators": self._iterators,
            "fingerprint": self._fingerprint,
            "seed": self._source.seed,
        }

    def restore_past(self, past: dict[str, Any]) -> None:
        """Lets the next pass come in the order that it would have after those passes."""
        if past["fingerprint"] != self._fingerprint or not past["epoch"]:
            return
        if past["seed"] is not None and past["seed"] != self._source.seed:
            self._source.reseed(past["seed"])
        self._passes, self._iterators = past["epoch"], past["iterators"]
        self._source.go_to(self._passes - 1, -1, self._iterators, None)

    def _start(self) -> None:
        self._source.start(self._passes)
        self._passes += 1
        self._iterators += 1
        self._taken = 0
        self._open = True

    def _rewind(self, count: int) -> bool:
        """At the end of the data before the end of an epoch of fixed steps: whether to start over.

        Finite data that was used up exactly by earlier epochs starts again; data that ends in the
        middle of an epoch ends that epoch, with a warning. Sharded data always starts again.
        """
        if self._passes_over and self._taken or count == 0 and self._length:
            self._length = None
            self._start()
            return True
        log.warning(
            "the data ended after %d of %d steps; make it longer or repeat() it", count, self.steps
        )
        return False


def executions(batches: Iterator[Any], size: int) -> Iterator[tuple[int, Iterator[Any]]]:
    """Groups batches into executions of `steps_per_execution` batches.

    Yields the number of the first step and an iterator over the batches of that execution, which
    reads ahead one batch only, so that a batch is there before `on_train_batch_begin` is called.
    """
    begin = 0
    for first in batches:
        chunk = list(itertools.islice(batches, size - 1)) if size > 1 else []
        yield begin, iter([first, *chunk])
        begin += 1 + len(chunk)


def _refuse(**given: Any) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(
            "no other description of the data beside tfdist.data.shard",
            " and ".join(names),
            "shard them together: tfdist.data.shard((x, y, sample_weight), ...)",
        )


def _differ(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    return "; ".join(f"{n}: {theirs.get(n)!r} before, {mine.get(n)!r} now" for n in sorted(names))


def _other_data(theirs: dict[str, Any], mine: dict[str, Any]) -> ConfigError:
    return ConfigError(
        f"the data of the saved position, {theirs}",
        f"{mine} ({_differ(theirs, mine)})",
        "give the same data, begin anew, or restore with force=True",
    )
