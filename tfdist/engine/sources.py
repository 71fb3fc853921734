"""Where a feed's batches come from: what `fit` was given, or `tfdist.data.Sharded`."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import zlib
from collections.abc import Callable
from typing import Any
from typing import Protocol

from keras.src.trainers.data_adapters import tf_dataset_adapter
from tensorflow.python.framework import random_seed as program_seeds

from tfdist.cluster import current
from tfdist.data.parts import Place
from tfdist.data.sharded import Sharded
from tfdist.data.sharded import with_rows
from tfdist.engine import seeds
from tfdist.engine.exchange import exchange
from tfdist.engine.input_wait import Waiting
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.replicas import is_several_workers
from tfdist.engine.replicas import local_devices
from tfdist.engine.rest_of_pass import RestOfPass
from tfdist.engine.shard_reader import ShardReader
from tfdist.engine.shard_reader import has_fixed_parts
from tfdist.errors import DisagreementError

log = logging.getLogger("absl")


class Source(Protocol):
    """What a feed needs of where its batches come from.

    Attributes:
        kind: Name of the kind of data.
        spec: Structure of `tf.TypeSpec` of one replica's batch.
        policy: How the data is split over workers.
        seed: What its orders are drawn from, or None.
        num_batches: Batches of a pass as far as Keras would know, or None.
        cardinality: Batches of the data: -1 if it never ends, None if that is not known.
        waiting: Time waited for the data, or None where that is not known.
        spare: Whether Keras makes an iterator at the end of a pass that it never reads.
        split: How the open pass is split: by which policy, over how many workers, of how many
            replicas.
    """

    kind: str
    spec: Any
    policy: str
    seed: int | None

    @property
    def split(self) -> tuple[str, int, int]: ...

    @property
    def spare(self) -> bool: ...

    @property
    def num_batches(self) -> int | None: ...

    @property
    def cardinality(self) -> int | None: ...

    @property
    def waiting(self) -> Waiting | None: ...

    def sample(self) -> Callable[[], Any] | None:
        """Returns a function that reads one batch without losing it, or None where it would."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data, fit for JSON."""

    def begin_epoch(self) -> None:
        """Is called at the beginning of every epoch."""

    def end_epoch(self) -> None:
        """Is called at the end of every epoch."""

    def start(self, epoch: int) -> None:
        """Begins a pass, given its number."""

    def spare_iterator(self) -> None:
        """Makes an iterator that is not read."""

    def next(self) -> Any:
        """Returns the next batch, or None at the end of the pass."""

    def saved(self) -> bytes | None:
        """Returns the state of the iterator that is read, where one is needed and can be saved."""

    def go_to(self, epoch: int, batch: int, iterators: int, state: bytes | None) -> None:
        """Goes on with a batch of a pass.

        Args:
            epoch: Number of the pass.
            batch: Number of the batch in it; -1: the pass is over.
            iterators: How many were made until then.
            state: What `saved` has returned there, or None.
        """

    def go_on(self, epoch: int, batch: int, split: tuple[str, int, int]) -> bool:
        """Goes on in a pass that was split otherwise; returns whether it can.

        Args:
            epoch: Number of the pass.
            batch: Number of the batch in it.
            split: How the pass was split.
        """

    def reseed(self, seed: int) -> None:
        """Draws orders from another seed from now on."""


class Shards:
    """Data whose batches are split over workers by `tfdist.data`.

    Args:
        strategy: The `tf.distribute.Strategy` of the model.
        data: The data.
        class_weight: As `fit` takes it.
    """

    spare = False

    def __init__(self, strategy: Any, data: Sharded, class_weight: Any = None):
        if class_weight is not None:
            data = data.mapped(tf_dataset_adapter.make_class_weight_map_fn(class_weight))
        self._strategy = strategy
        self._data = data
        self._other: tuple[str, int, int] | None = None
        self.place = place_of(strategy)
        self.kind = data.facts.kind
        self.seed = drawn_seed() if data.shuffle and data.seed is None else data.seed
        self.policy = data.policy_for(self.place.workers).name
        for reason in data.policy_for(self.place.workers).reasons:
            log.debug("data: %s", reason)
        self._open()
        self._compare()

    def _compare(self) -> None:
        """Makes sure that all workers were given the same data; of functions little is known."""
        if self.place.workers == 1:
            return
        mine = json.dumps(self.fingerprint(), sort_keys=True)
        found = exchange("comparing the data", 2).gather(
            [zlib.crc32(mine.encode()), self.seed or 0]
        )
        if len({digest for digest, _ in found}) > 1:
            raise DisagreementError(
                "the same data on every worker, which takes its part of each batch itself",
                f"other data on some; here {mine}",
                "give tfdist.data.shard all of the data on every worker, or a dataset_fn(context) "
                "that reads the part of context.input_pipeline_id",
            )
        if len({seed for _, seed in found}) > 1:
            raise DisagreementError(
                "one seed of the data on all workers",
                f"{[seed for _, seed in found]}",
                "pass the same seed= to tfdist.data.shard on every worker",
            )

    def _open(self) -> None:
        self._part = self._data.part(self.place, self.seed or 0)
        first = self._part.rows(0)
        if first is not None and not any(first[self.place.worker]):
            log.warning(
                "this worker reads no example: there are fewer than replicas in a batch of %d",
                sum(map(sum, first)),
            )
        rows = self._part.rows(0)[0][0] if has_fixed_parts(self._part) else None
        self.spec = with_rows(self._part.spec, rows)
        self._reader = ShardReader(self._strategy, self._part, self.place)

    @property
    def waiting(self) -> Waiting | None:
        """Time waited for the data, or None where that is not known."""
        return self._reader.waiting

    @property
    def num_batches(self) -> int | None:
        """Global batches of a pass, or None."""
        known: int | None = self._part.batches
        return known

    @property
    def cardinality(self) -> int | None:
        """Global batches of a pass, or None."""
        return self.num_batches

    def sample(self) -> Callable[[], Any] | None:
        """Returns None: the spec tells what there is to know."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data, fit for JSON."""
        return self._data.fingerprint()

    def begin_epoch(self) -> None:
        """Is called at the beginning of every epoch."""

    def end_epoch(self) -> None:
        """Is called at the end of every epoch."""

    def start(self, epoch: int) -> None:
        """Begins a pass, given its number."""
        self._other = None
        self._reader.go_to(epoch, 0)

    def spare_iterator(self) -> None:
        """Makes an iterator that is not read: here there is none."""

    def next(self) -> Any:
        """Returns the next batch, or None at the end of the pass."""
        return self._reader.next()

    def saved(self) -> bytes | None:
        """Returns the state of the iterator that is read, where one is needed and can be saved."""
        return self._reader.saved()

    def go_to(self, epoch: int, batch: int, iterators: int, state: bytes | None) -> None:
        """Goes on with a batch of a pass."""
        self._reader.resume(epoch, batch, state)

    @property
    def split(self) -> tuple[str, int, int]:
        """How the open pass is split over workers and replicas."""
        return self._other or (self.policy, self.place.workers, self.place.replicas)

    def go_on(self, epoch: int, batch: int, split: tuple[str, int, int]) -> bool:
        """Goes on in a pass that was split otherwise; returns whether it can."""
        policy, workers, replicas = split
        # Where all read the same stream, its global batches are those of one worker.
        layout = (1, 1) if policy == "example" else (workers, replicas)
        if self._data.policy_for(layout[0]).name != policy:
            return False
        places = [Place(layout[0], worker, layout[1]) for worker in range(layout[0])]
        parts = [self._data.part(place, self.seed or 0) for place in places]
        if any(part.seeks for part in parts):
            return False
        self._other = split
        self._reader.go_on(RestOfPass(parts, self.place, epoch, batch), epoch, batch)
        return True

    def reseed(self, seed: int) -> None:
        """Draws orders from another seed from now on."""
        self.seed = seed
        self._open()


def place_of(strategy: Any) -> Place:
    """Returns which part of the data this process reads under `strategy`."""
    if is_asynchronous(strategy):
        return Place()
    replicas = len(local_devices(strategy))
    group = current.group() if is_several_workers(strategy) else None
    return Place(1, 0, replicas) if group is None else Place(group.size, group.rank, replicas)


def drawn_seed() -> int:
    """Returns a seed that all workers share: from the program's own if it has one.

    It then is the n-th since the program was seeded, as that of any operation of TensorFlow.
    """
    if seeds.program_is_seeded():
        text = repr(program_seeds.get_seed(None))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    shared = seeds.next_seed()
    return secrets.randbits(56) if shared is None else shared
