"""What Keras knows how to read: arrays, datasets, generators, `PyDataset`s."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import generator_data_adapter

from tfdist.data.parts import describe
from tfdist.data.shuffles import Shuffles
from tfdist.engine import arrays
from tfdist.engine import seeds
from tfdist.engine import sparse_rows
from tfdist.engine.input_wait import Waiting
from tfdist.engine.readers import Reader
from tfdist.engine.readers import WholeReader
from tfdist.engine.readers import reader_for
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.replicas import is_several_workers
from tfdist.engine.sources import Shards
from tfdist.engine.sources import drawn_seed
from tfdist.engine.sources import place_of

log = logging.getLogger("absl")


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
        self._is_over = False
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
        self._shuffles = Shuffles(dataset)
        shuffles = self._shuffles if self._recoverable else None
        if is_asynchronous(strategy):
            # The coordinator reads all of it, as one device would.
            self.policy, self.spec = "off", dataset.element_spec
            self._reader = WholeReader(dataset, shuffles)
            return
        if isinstance(dataset, tf.data.Dataset):
            dataset, self.policy = _sharded(sparse_rows.split_dataset(dataset), several)
            dataset = strategy.experimental_distribute_dataset(dataset)
        self.spec = sparse_rows.join(tree.map_structure(_first_replica, dataset.element_spec))
        ends = self.cardinality if self.policy == "example" else None
        ours = self.policy != "given"
        self._reader = reader_for(strategy, dataset, ends, ours, shuffles)

    @property
    def spare(self) -> bool:
        """Whether Keras makes an iterator at the end of a pass that it never reads."""
        return bool(self.adapter.num_batches)

    @property
    def waiting(self) -> Waiting | None:
        """Time waited for the data, or None where that is not known."""
        return self._reader.waiting

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
        self._is_over = False
        self._reader.start()

    def spare_iterator(self) -> None:
        """Makes an iterator that is not read."""
        self._reader.start()

    def next(self) -> Any:
        """Returns the next batch, or None at the end of the pass."""
        return None if self._is_over else self._reader.next()

    def saved(self) -> bytes | None:
        """Returns the state of the iterator that is read, where one is needed and can be saved."""
        return None if self._ordered is not None else self._reader.saved()

    def go_to(self, epoch: int, batch: int, iterators: int, state: bytes | None) -> None:
        """Goes on with a batch of a pass."""
        if self._ordered is not None:
            self._ordered.turn_to(epoch, max(0, batch))
            self._reader.start()
            return
        self._is_over = batch > 0 and batch == self.cardinality
        if self._is_over:
            state, batch = None, -1
        if state is not None:
            # How often each shuffle was begun is in it.
            self._reader.restore(batch, state)
            return
        # Passes that were read before, and iterators that Keras would have made and not read.
        read = epoch + 1 if batch < 0 else epoch
        unread = max(0, iterators - epoch - 1)
        if self._shuffles.keeps_first and read:
            log.info("reading a pass again for the cache of the data, which holds its order")
            self._reader.pass_over()
            read -= 1
        if self._shuffles.is_known:
            self._shuffles.begin(read, unread)
        else:
            for _ in range(read + unread):
                self._reader.start()
        if batch >= 0:
            self._reader.start()
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

    @property
    def split(self) -> tuple[str, int, int]:
        """How the open pass is split over workers and replicas."""
        place = place_of(self._strategy)
        return self.policy, place.workers, place.replicas

    def go_on(self, epoch: int, batch: int, split: tuple[str, int, int]) -> bool:
        """Returns False: what others have read is not known."""
        return False

    def reseed(self, seed: int) -> None:
        """Draws orders from another seed from now on."""
        self.seed = seed
        if self._ordered is not None:
            self._ordered.seed = seed


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
