"""Batches that every worker builds alike and of which each then takes its share."""

from __future__ import annotations

import tensorflow as tf


def batched(
    examples: tf.data.Dataset,
    global_batch_size: int,
    *,
    shuffle_buffer: int | None = None,
    seed: int | None = None,
) -> tf.data.Dataset:
    """Returns global batches of `examples`, ready for `fit` under any strategy.

    The last batch of a pass keeps the examples that are left: none is dropped.

    Args:
        examples: Single examples, in the same order on every worker.
        global_batch_size: Examples in a batch, over all replicas of all workers.
        shuffle_buffer: Examples among which the next one is drawn, in a new order in each epoch.
            None keeps the order.
        seed: Seed of the order. Needed to shuffle: with a seed of its own, each worker would cut
            its share out of another order, and examples would be seen twice or never.
    """
    if shuffle_buffer is not None:
        if seed is None:
            raise ValueError("shuffle_buffer needs a seed, the same on every worker.")
        examples = examples.shuffle(shuffle_buffer, seed=seed, reshuffle_each_iteration=True)
    batches = examples.batch(global_batch_size).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    # Share out examples, not files: sharding by file stops the job where there are fewer files
    # than workers, and the data here is small enough for every worker to read all of it.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return batches.with_options(options)
