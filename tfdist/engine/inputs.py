"""Turns whatever `fit` is given into batches for every replica, the same examples as on one device.

A batch as the user wrote it is the global batch. Every worker builds the same pipeline; TensorFlow
splits each global batch by example and every replica takes its part, so global batch i holds the
same examples on any number of workers.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend import config as keras_config
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_data_adapter
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import generator_data_adapter

from tfdist.engine import seeds
from tfdist.engine import sparse_rows
from tfdist.engine.readers import Reader
from tfdist.engine.readers import WholeReader
from tfdist.engine.readers import reader_for
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.replicas import is_several_workers

log = logging.getLogger("absl")


class Feed:
    """The batches of one source of data, epoch after epoch.

    Args:
        strategy: The `tf.distribute.Strategy` of the model.
        x, y, sample_weight, batch_size, steps, shuffle, class_weight: As `fit` takes them; `steps`
            is `steps_per_epoch` or the like, or None to read the data to its end.

    Attributes:
        spec: Structure of `tf.TypeSpec` of one replica's batch.
        policy: How the data is split over workers: "example", "file", "off" or "given" (a dataset
            that is already distributed).
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
    ):
        self.strategy = strategy
        limit = keras_config.max_steps_per_epoch()
        self.steps = min(filter(None, (limit, steps)), default=None)
        several = is_several_workers(strategy)
        # With a seed of the program, Keras shuffles alike everywhere, and as on one device.
        unseeded = several and not seeds.program_is_seeded()
        if data_adapters.is_tf_dataset(x) or not hasattr(x, "__len__"):
            shuffle = False  # Not ours to shuffle, and Keras would warn of a default.
        if unseeded and shuffle and isinstance(x, keras.utils.PyDataset):
            x, shuffle = _Permuted(x, seeds.next_seed()), False
        self._adapter = _adapter(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            # Keras warns when an array has fewer batches; so do we, with what we know.
            steps_per_epoch=self.steps,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        self.policy = "given"
        self._reader: Reader
        dataset = self._adapter.get_tf_dataset()
        if unseeded and _is_shuffled_array(self._adapter):
            dataset = _shuffled_arrays(self._adapter)
        self._dataset = dataset
        self._open = False
        self._length: int | None = None
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
        self._reader = reader_for(strategy, dataset, ends, ours=self.policy != "given")

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch, or None where that is not known before the end of the first."""
        return self.steps or self._adapter.num_batches or self._length

    @property
    def cardinality(self) -> int | None:
        """Batches of the data itself: -1 if it never ends, None if that is not known."""
        if isinstance(self._dataset, tf.data.Dataset):
            known = int(self._dataset.cardinality())
            return {tf.data.INFINITE_CARDINALITY: -1, tf.data.UNKNOWN_CARDINALITY: None}.get(
                known, known
            )
        return None

    def sample(self) -> Callable[[], Any] | None:
        """Returns a function that reads one batch without losing it, or None where it would."""
        if self.policy == "given" or isinstance(
            self._adapter, generator_data_adapter.GeneratorDataAdapter
        ):
            return None
        return lambda: next(iter(self._dataset.take(1)))

    def epoch(self) -> Generator[Any, None, None]:
        """Yields the batches of the next epoch, each with the values of all local replicas.

        With `steps`, data that is not finished goes on in the next epoch, as in Keras.
        """
        self._adapter.on_epoch_begin()
        try:
            if not self._open or self.steps is None:
                self._start()
            count = 0
            while self.steps is None or count < self.steps:
                batch = self._reader.next()
                if batch is None:
                    self._open = False
                    if self.steps is None or not self._rewind(count):
                        break
                    continue
                count += 1
                yield batch
            self._length = count
            if self.steps is None and self._adapter.num_batches:
                # Keras makes an iterator here that it never reads. The order of a dataset that
                # shuffles anew for every iterator is only the same as on one device with it.
                self._reader.start()
                self._open = False
        finally:
            self._adapter.on_epoch_end()

    def restart(self) -> None:
        """Makes the next epoch begin at the start of the data."""
        self._open = False

    def _start(self) -> None:
        self._reader.start()
        self._open = True

    def _rewind(self, count: int) -> bool:
        """At the end of the data before the end of an epoch of fixed steps: whether to start over.

        Finite data that was used up exactly by earlier epochs starts again; data that ends in the
        middle of an epoch ends that epoch, with a warning.
        """
        if count == 0 and self._length:
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


def _adapter(x: Any, y: Any, sample_weight: Any, **kwargs: Any) -> Any:
    if isinstance(x, tf.distribute.DistributedDataset) and not data_adapters.is_tf_dataset(x):
        return data_adapters.TFDatasetAdapter(x, class_weight=kwargs["class_weight"])
    return data_adapters.get_data_adapter(x, y, sample_weight, **kwargs)


def _is_shuffled_array(adapter: Any) -> bool:
    return isinstance(adapter, array_data_adapter.ArrayDataAdapter) and bool(adapter._shuffle)


def _shuffled_arrays(adapter: Any) -> tf.data.Dataset:
    """Batches of arrays in an order that all workers share and that changes every epoch.

    Keras shuffles with an operation whose seed is the worker's own, so that workers read different
    orders; with a program-wide seed it reads the same order in every epoch.
    """
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    inputs = tree.lists_to_tuples(inputs)
    rows = tf.data.Dataset.range(adapter._num_samples)
    if adapter._shuffle == "batch":
        order = rows.batch(adapter._batch_size)
        order = order.shuffle(int(order.cardinality()), seed=seeds.next_seed())
    else:
        order = rows.shuffle(adapter._num_samples, seed=seeds.next_seed())
        order = order.batch(adapter._batch_size)

    def gather(indices: Any, data: Any) -> Any:
        def one(value: Any) -> Any:
            if isinstance(value, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(value, indices)
            if isinstance(value, (list, tuple, dict)):
                return None
            return tf.gather(value, indices, axis=0) if tf.is_tensor(value) else value

        return tree.traverse(one, data)

    whole = tf.data.Dataset.from_tensors(inputs).repeat()
    return tf.data.Dataset.zip((order, whole)).map(gather, num_parallel_calls=tf.data.AUTOTUNE)


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


class _Permuted(keras.utils.PyDataset):
    """A PyDataset in an order drawn from a seed that all workers share, a new one every epoch."""

    def __init__(self, inner: Any, seed: int | None):
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner = inner
        self._random = random.Random(seed)
        self._order: list[int] = []
        self._shuffle()

    def _shuffle(self) -> None:
        count = self._inner.num_batches
        self._order = list(range(count or 0))
        self._random.shuffle(self._order)

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._inner.num_batches
        return count

    def __getitem__(self, index: int) -> Any:
        return self._inner[self._order[index] if self._order else index]

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()
        self._shuffle()
