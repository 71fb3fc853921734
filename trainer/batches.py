"""Arrays as the batches that every strategy trains on."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import tfdist
from tfdist.data.sharded import Sharded


def batched(
    arrays: Any,
    global_batch_size: int,
    *,
    shuffle: bool = False,
    shuffle_buffer: int | None = None,
    seed: int | None = None,
) -> Sharded:
    """Returns global batches, ready for `fit` under any strategy; none is dropped.

    Args:
        arrays: Structure of arrays with one row for each example, the same on every worker.
        global_batch_size: Examples in a batch, over all replicas of all workers.
        shuffle: Whether the examples come in a new order in each epoch.
        shuffle_buffer: Examples among which the next one is drawn; None: all of them, by an order
            that does not depend on the number of workers and in which a restart finds its place at
            once.
        seed: Seed of the order.
    """
    if not shuffle or shuffle_buffer is None:
        return tfdist.data.shard(
            arrays, global_batch_size=global_batch_size, shuffle=shuffle, seed=seed
        )
    return tfdist.data.shard(
        tf.data.Dataset.from_tensor_slices(arrays),
        global_batch_size=global_batch_size,
        shuffle=True,
        shuffle_buffer=shuffle_buffer,
        seed=seed,
    )
