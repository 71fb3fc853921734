"""Reads one worker's part of a distributed dataset, batch after batch.

TensorFlow's own iterator over a distributed dataset asks all workers with a collective, before
every batch, whether anybody has data left, and moves batches through one more iterator whose end
can take seconds (see `_Graveyard`). On CPU neither is needed: a plain `tf.data` iterator reads the
part of this worker, and how many batches there are is known to all, or asked over the group.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any
from typing import Protocol

import tensorflow as tf
from tensorflow.python.distribute import input_lib

from tfdist.cluster import current
from tfdist.engine.steps import is_several_workers
from tfdist.engine.steps import quiet
from tfdist.errors import ConfigError


class Reader(Protocol):
    """What a feed needs of a reader."""

    def start(self) -> None:
        """Begins at the start of the data."""

    def next(self) -> Any:
        """Returns the next batch, with values for all local replicas, or None at the end."""


def reader_for(strategy: Any, distributed: Any, batches: int | None, ours: bool) -> Reader:
    """Returns the reader that suits the devices.

    Args:
        strategy: The strategy of the model.
        distributed: A `tf.distribute.DistributedDataset` or the like.
        batches: Global batches in the data, the same number on every worker; -1 if it never ends,
            None if it is not known or not the same.
        ours: Whether `distributed` was made by us from a `tf.data.Dataset`.
    """
    on_cpu = all("CPU" in device.upper() for device in strategy.extended.worker_devices)
    if ours and on_cpu and len(distributed._cloned_datasets) == 1:
        return LocalReader(strategy, distributed._cloned_datasets[0], batches)
    return DistributedReader(distributed)


class LocalReader:
    """Reads with a plain iterator; replicas without examples get a batch of none.

    Args:
        strategy: The strategy of the model.
        dataset: This worker's part, in batches of one replica.
        batches: As for `reader_for`.
    """

    def __init__(self, strategy: Any, dataset: tf.data.Dataset, batches: int | None):
        self._strategy = strategy
        self._replicas = len(strategy.extended.worker_devices)
        # While a step runs the next batch is made.
        self._dataset = dataset.prefetch(tf.data.AUTOTUNE)
        self._batches = batches
        self._left: int | None = None
        self._iterator: Any = None
        self._group = current.group() if is_several_workers(strategy) else None

    def start(self) -> None:
        old, self._iterator = self._iterator, iter(self._dataset)
        _graveyard.bury(old)
        self._left = self._batches

    def next(self) -> Any:
        if self._left == 0:
            return None
        try:
            parts = [next(self._iterator, None) for _ in range(self._replicas)]
        except tf.errors.InvalidArgumentError as error:
            if "FILE based sharding" not in str(error):
                raise
            raise ConfigError(
                "at least one file for every worker under AutoShardPolicy.FILE",
                str(error).partition("Could not apply FILE based sharding: ")[2].split(". ")[0],
                "leave the policy at AUTO, or set it to DATA, to split by example",
            ) from error
        has_data = any(part is not None for part in parts)
        if self._left is None or self._left < 0:
            # Without end, or nobody knows when: only the others know whether they have more.
            if self._left is None and self._group is not None:
                has_data = any(self._group.all_gather("reading the next batch", has_data))
            if not has_data:
                return None
        else:
            self._left -= 1
        parts = [self._no_examples() if part is None else part for part in parts]
        if self._replicas == 1:
            return parts[0]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group % self._replicas]
        )

    def _no_examples(self) -> Any:
        return input_lib._dummy_tensor_fn(self._dataset.element_spec)


class DistributedReader:
    """Reads with TensorFlow's distributed iterator, which prefetches to the devices.

    Args:
        distributed: A `tf.distribute.DistributedDataset` or the like.
    """

    def __init__(self, distributed: Any):
        self._distributed = distributed
        self._iterator: Any = None
        # Compiled: between workers, reading includes a collective.
        self._pull = quiet(
            tf.function(lambda iterator: iterator.get_next_as_optional(), reduce_retracing=True)
        )

    def start(self) -> None:
        old, self._iterator = self._iterator, iter(self._distributed)
        _graveyard.bury(old)

    def next(self) -> Any:
        optional = self._pull(self._iterator)
        return optional.get_value() if optional.has_value() else None


class _Graveyard:
    """Deletes iterators where nobody waits for it.

    Deleting an iterator can wait for tf.data's tuning thread, whose naps double from 10 ms on:
    2.5, 5 or 10 s were measured at the end of an epoch.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def bury(self, iterator: Any) -> None:
        if iterator is None:
            return
        box = [iterator]
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=box.clear, name="tfdist-graveyard", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Gives deletions that have begun a moment, so that they do not meet the runtime's own."""
        deadline = time.monotonic() + 3.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


_graveyard = _Graveyard()
atexit.register(_graveyard.close)
