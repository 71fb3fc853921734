"""Where a feed's batches come from: what `fit` was given, or `tfdist.data.Sharded`."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from typing import Any
from typing import Protocol

import keras
import tensorflow as tf
from keras import tree
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import generator_data_adapter
from keras.src.trainers.data_adapters import tf_dataset_adapter

from tfdist.cluster import current
from tfdist.data.parts import Place
from tfdist.data.parts import describe
from tfdist.data.sharded import Sharded
from tfdist.data.sharded import with_rows
from tfdist.engine import arrays
from tfdist.engine import seeds
from tfdist.engine import sparse_rows
from tfdist.engine.readers import Reader
from tfdist.engine.readers import WholeReader
from tfdist.engine.readers import reader_for
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.replicas import is_several_workers
from tfdist.engine.replicas import local_devices
from tfdist.engine.shard_reader import ShardReader
from tfdist.engine.shard_reader import has_fixed_parts

log = logging.getLogger("absl")

_drawn = 0


class Source(Protocol):
    """What a feed needs of where its batches come from.

    Attributes:
        kind: Name of the kind of data.
        spec: Structure of `tf.TypeSpec` of one replica's batch.
        policy: How the data is split over workers.
        seed: What its orders are drawn from, or None.
        num_batches: Batches of a pass as far as Keras would know, or None.
        cardinality: Batches of the data: -1 if it never ends, None if that is not known.
        spare: Whether Keras makes an iterator at the end of a pass that it never reads.
    """

    kind: str
    spec: Any
    policy: str
    seed: int | None

    @property
    def spare(self) -> bool: ...

    @property
    def num_batches(self) -> int | None: ...

    @property
    def cardinality(self) -> int | None: ...

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

    def reseed(self, seed: int) -> None:
        """Draws orders from another seed from now on."""


class Given:
    """What Keras knows how to read.

    Args:
        strategy: The `tf.distribute.Strategy` of the model.
        x, y, sample_weight, batch_size, steps, shuffle, class_weight, recoverable: See `Feed`.
    """

    seed: int | None = None

    def __init__(
        self,
        strategy: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        *,
        batch_size: int | None,
        steps: int | None,
        shuffle: bool | str,
        class_weight: Any,
        recoverable: bool,
    ):
        several = is_several_workers(strategy)
        # With a seed of the program, Keras shuffles alike everywhere, and as on one device.
        unseeded = several and not seeds.program_is_seeded()
        if data_adapters.is_tf_dataset(x) or not hasattr(x, "__len__"):
            shuffle = False  # Not ours to shuffle, and Keras would warn of a default.
        self._ordered: arrays.OrderedPyDataset | None = None
        if isinstance(x, keras.utils.PyDataset) and (recoverable or (unseeded and shuffle)):
            self.seed = drawn_seed() if shuffle else None
            x = self._ordered = arrays.OrderedPyDataset(x, self.seed)
            shuffle = False
        self.adapter = _adapter(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            # Keras warns when an array has fewer batches; so do we, with what we know.
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        self._is_generator = isinstance(self.adapter, generator_data_adapter.GeneratorDataAdapter)
        self.kind = "dataset"
        if self._ordered is not None or self._is_generator:
            self.kind = "generator" if self._is_generator else "py_dataset"
        self._strategy = strategy
        self._recoverable = recoverable
        self._unseeded = unseeded

    def as_shards(self) -> Shards | None:
        """Returns the same data as shards, whose place is a number; None if it has no such."""
        sharded = arrays.sharded_arrays(self.adapter) if self._recoverable else None
        return None if sharded is None else Shards(self._strategy, sharded)

    def open(self) -> None:
        """Makes the pipeline."""
        strategy = self._strategy
        several = is_several_workers(strategy)
        self.policy = "given"
        self._reader: Reader
        dataset = self.adapter.get_tf_dataset()
        if self._unseeded and arrays.is_shuffled_array(self.adapter):
            dataset = arrays.shuffled_arrays(self.adapter)
        self._dataset = dataset
        if is_asynchronous(strategy):
            # The coordinator reads all of it, as one device would.
            self.policy, self.spec = "off", dataset.element_spec
            self._reader = WholeReader(dataset)
            return
        if isinstance(dataset, tf.data.Dataset):
            dataset, self.policy = _sharded(sparse_rows.split_dataset(dataset), several)
            dataset = strategy.experimental_distribute_dataset(dataset)
        self.spec = sparse_rows.join(tree.map_structure(_first_replica, dataset.element_spec))
        ends = self.cardinality if self.policy == "example" else None
        ours = self.policy != "given"
        self._reader = reader_for(strategy, dataset, ends, ours, self._recoverable)

    @property
    def spare(self) -> bool:
        """Whether Keras makes an iterator at the end of a pass that it never reads."""
        return bool(self.adapter.num_batches)

    @property
    def num_batches(self) -> int | None:
        """Batches of a pass as far as Keras would know, or None."""
        known: int | None = self._ordered.whole if self._ordered else self.adapter.num_batches
        return known

    @property
    def cardinality(self) -> int | None:
        """Batches of the data: -1 if it never ends, None if that is not known."""
        if isinstance(self._dataset, tf.data.Dataset):
            known = int(self._dataset.cardinality())
            return {tf.data.INFINITE_CARDINALITY: -1, tf.data.UNKNOWN_CARDINALITY: None}.get(
                known, known
            )
        return None

    def sample(self) -> Callable[[], Any] | None:
        """Returns a function that reads one batch without losing it, or None where it would."""
        if self.policy == "given" or self._is_generator:
            return None
        return lambda: next(iter(self._dataset.take(1)))

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data, fit for JSON."""
        batches = self._ordered.whole if self._ordered else self.cardinality
        return {"kind": self.kind, "spec": describe(self.spec), "batches": batches}

    def begin_epoch(self) -> None:
        """Is called at the beginning of every epoch."""
        self.adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        """Is called at the end of every epoch."""
        self.adapter.on_epoch_end()

    def start(self, epoch: int) -> None:
        """Begins a pass, given its number."""
        if self._ordered is not None:
            self._ordered.turn_to(epoch)
        self._reader.start()

    def spare_iterator(self) -> None:
        """Makes an iterator that is not read."""
        self._reader.start()

    def next(self) -> Any:
        """Returns the next batch, or None at the end of the pass."""
        return self._reader.next()

    def saved(self) -> bytes | None:
        """Returns the state of the iterator that is read, where one is needed and can be saved."""
        return None if self._ordered is not None else self._reader.saved()

    def go_to(self, epoch: int, batch: int, iterators: int, state: bytes | None) -> None:
        """Goes on with a batch of a pass."""
        if self._ordered is not None:
            self._ordered.turn_to(epoch, max(0, batch))
            self._reader.start()
            return
        # What shuffles anew for every iterator is only in its order after as many of them: also
        # where the state is known, which at the end of a pass holds nothing of its shuffles.
        for _ in range(iterators - 1 if state is not None else iterators):
            self._reader.start()
        if state is not None:
            self._reader.restore(batch, state)
            return
        if batch > 0 and _is_shuffled_otherwise(self._dataset):
            log.warning(
                "the data is shuffled without a seed: pass %d goes on in another order than before "
                "the restart, so some of its examples come twice and others never; seed the "
                "shuffle, or use tfdist.data.shard",
                epoch + 1,
            )
        if batch > 0:
            log.info("reading %d batches again to find the place in pass %d", batch, epoch + 1)
            for _ in range(batch):
                self._reader.skip()

    def reseed(self, seed: int) -> None:
        """Draws orders from another seed from now on."""
        self.seed = seed
        if self._ordered is not None:
            self._ordered.seed = seed


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
        self.place = place_of(strategy)
        self.kind = data.facts.kind
        self.seed = drawn_seed() if data.shuffle and data.seed is None else data.seed
        self.policy = data.policy_for(self.place.workers).name
        for reason in data.policy_for(self.place.workers).reasons:
            log.debug("data: %s", reason)
        self._open()

    def _open(self) -> None:
        self._part = self._data.part(self.place, self.seed or 0)
        rows = self._part.rows(0)[0][0] if has_fixed_parts(self._part) else None
        self.spec = with_rows(self._part.spec, rows)
        self._reader = ShardReader(self._strategy, self._part, self.place)

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
        if batch >= 0:
            self._reader.go_to(epoch, batch, state)

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
    """Returns a seed that all workers share: from the program's own if it has one."""
    global _drawn
    if seeds.program_is_seeded():
        _drawn += 1
        text = f"{seeds.position()[0]}/feed/{_drawn}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    shared = seeds.next_seed()
    return secrets.randbits(56) if shared is None else shared


def _is_shuffled_otherwise(dataset: Any) -> bool:
    """Whether a pipeline holds a shuffle that is in another order in every process."""
    if seeds.program_is_seeded() or not isinstance(dataset, tf.data.Dataset):
        return False
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        waiting += each._inputs()
        if "Shuffle" in type(each).__name__ and hasattr(each, "_seed"):
            drawn = bool(seeds.position()[1])  # By us, in the place of none.
            if drawn or (int(each._seed), int(each._seed2)) == (0, 0):
                return True
    return False


def _adapter(x: Any, y: Any, sample_weight: Any, **kwargs: Any) -> Any:
    if isinstance(x, tf.distribute.DistributedDataset) and not data_adapters.is_tf_dataset(x):
        return data_adapters.TFDatasetAdapter(x, class_weight=kwargs["class_weight"])
    return data_adapters.get_data_adapter(x, y, sample_weight, **kwargs)


def _sharded(dataset: tf.data.Dataset, several: bool) -> tuple[tf.data.Dataset, str]:
    """Returns `dataset` with the policy that keeps every example once, and the policy's name.

    TensorFlow's AUTO splits by file where it finds files: batches then differ from those of one
    device, and one file for two workers ends the job. By example is always right.
    """
    options = dataset.options()
    policies = tf.data.experimental.AutoShardPolicy
    policy = options.experimental_distribute.auto_shard_policy
    if policy == policies.OFF:
        return dataset, "off"
    if policy not in (policies.AUTO, policies.DATA):
        return dataset, "file"
    if not several:
        return dataset, "example"
    changed = tf.data.Options()
    changed.experimental_distribute.auto_shard_policy = policies.DATA
    # Workers must read the same order to take disjoint parts of it.
    changed.deterministic = True
    return dataset.with_options(changed), "example"


def _first_replica(spec: Any) -> Any:
    values = getattr(spec, "_value_specs", None)
    return values[0] if values else spec
