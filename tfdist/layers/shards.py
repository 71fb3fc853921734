"""A table in parts: how many, which rows each has, what they start with, how rows are looked up.

A shard is an ordinary variable with a contiguous range of rows, as those of TensorFlow's
`ShardedVariable` (which Keras cannot use: it has no handle). The tape, optimizers and saving then
need nothing special.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigError

#: A smaller shard costs a message more than it saves in bytes.
MIN_SHARD_BYTES = 256 << 10

_RANDOM = (
    keras.initializers.RandomNormal,
    keras.initializers.RandomUniform,
    keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling,
)


def count_for(shape: tuple[int, int], dtype: str) -> int:
    """Returns the number of shards for a table under the current strategy.

    The `variable_partitioner` of a `tf.distribute.ParameterServerStrategy` decides; without one,
    shards are at least `MIN_SHARD_BYTES` large and at most one for each parameter server. Under
    another strategy the table is whole.

    Args:
        shape: Rows and columns.
        dtype: Of the table.

    Raises:
        ConfigError: The partitioner divides columns.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return 1
    partitioner = strategy.extended._variable_partitioner
    if partitioner is None:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
            MIN_SHARD_BYTES, max_shards=strategy.extended._num_ps
        )
    parts = list(partitioner(shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype)))
    if not parts or parts[0] < 1 or any(part != 1 for part in parts[1:]):
        raise ConfigError(
            "a variable_partitioner that divides the rows of a table only",
            f"{parts} for shape {shape}",
            "return [number of shards, 1]",
        )
    return min(int(parts[0]), shape[0])


def starts(rows: int, count: int) -> list[int]:
    """Returns the first row of each shard, and the number of rows.

    >>> starts(10, 4)
    [0, 3, 6, 8, 10]
    """
    base, extra = divmod(rows, count)
    sizes = [base + 1] * extra + [base] * (count - extra)
    return [0, *itertools.accumulate(sizes)]


@contextlib.contextmanager
def unpartitioned() -> Iterator[None]:
    """While it is open, the strategy's partitioner does not divide new variables again."""
    extended = tf.distribute.get_strategy().extended
    partitioner = getattr(extended, "_variable_partitioner", None)
    if partitioner is None:
        yield
        return
    extended._variable_partitioner = None
    try:
        yield
    finally:
        extended._variable_partitioner = partitioner


def initializer_of(
    initializer: Callable[..., Any], shape: tuple[int, int], first: int, index: int
) -> Callable[..., Any]:
    """Returns the initializer of one shard.

    Keras's random initializers draw each shard by itself, with a seed of its own: of the same
    distribution as the whole (the fans are those of the whole), in other values. Initializers
    that give every element the same value need nothing. All others make the whole table for every
    shard and cut out its rows: right, but the whole table must fit into memory for a moment.

    Args:
        initializer: That of the whole table.
        shape: Of the whole table.
        first: First row of the shard.
        index: Number of the shard.
    """
    if isinstance(initializer, (keras.initializers.Zeros, keras.initializers.Ones)):
        return initializer
    if isinstance(initializer, keras.initializers.Constant) and not tf.rank(initializer.value):
        return initializer
    seed = getattr(initializer, "seed", None)
    if not isinstance(initializer, _RANDOM) or not isinstance(seed, int):

        def rows(part: Any, dtype: Any = None) -> Any:
            return initializer(shape, dtype=dtype)[first : first + part[0]]

        return rows

    def draw(part: Any, dtype: Any = None) -> Any:
        config = initializer.get_config()
        # Keras draws the same values again from the same seed. The first shard keeps its seed.
        config["seed"] = (seed + 0x9E3779B1 * index) % 2**31
        if isinstance(initializer, keras.initializers.VarianceScaling):
            mode, scale = initializer.mode, initializer.scale
            new = keras.initializers.VarianceScaling(
                scale * _fan(mode, part) / _fan(mode, shape),
                mode,
                initializer.distribution,
                config["seed"],
            )
        else:
            new = type(initializer).from_config(config)
        return new(part, dtype=dtype)

    return draw


def look_up(shards: Sequence[Any], name: str, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a table; only the different ones are read, where they are.

    The gradient for each shard is a `tf.IndexedSlices` that names no row twice.

    Args:
        shards: Variables of shape [rows of the shard, columns], in order.
        name: Of the table, for messages.
        ids: Of shape [n], int32 or int64.

    Returns:
        Tensor of shape [n, columns].
    """
    ids, positions = tf.unique(ids)
    if len(shards) == 1:
        return tf.gather(_gather(shards[0], ids), positions)
    first = [0, *itertools.accumulate(int(shard.shape[0]) for shard in shards)]
    in_range = tf.logical_and(ids >= 0, ids < first[-1])
    message = f"Expected ids in [0, {first[-1]}) for the table {name!r}. Received:"
    bad = tf.boolean_mask(ids, tf.logical_not(in_range))
    check = tf.debugging.Assert(tf.reduce_all(in_range), [message, bad])
    # Run eagerly, it has raised by now and there is nothing to wait for.
    with tf.control_dependencies([] if check is None else [check]):
        ids = tf.identity(ids)
    inner = tf.constant(first[1:-1], ids.dtype)
    owner = tf.searchsorted(inner, ids, side="right")
    places = tf.dynamic_partition(tf.range(tf.size(ids)), owner, len(shards))
    parts = tf.dynamic_partition(ids, owner, len(shards))
    rows = [
        _gather(shard, part - start)
        for shard, part, start in zip(shards, parts, first, strict=False)
    ]
    return tf.gather(tf.dynamic_stitch(places, rows), positions)


def _gather(shard: Any, ids: tf.Tensor) -> tf.Tensor:
    value = shard.value
    device = value.device if isinstance(value, tf.Variable) else ""
    # Only where it is far away: the device of a local one would be in every saved graph.
    with tf.device(device) if device and "/job:ps" in device else contextlib.nullcontext():
        return tf.gather(value, ids)


def _fan(mode: str, shape: Sequence[int]) -> float:
    """Returns what `keras.initializers.VarianceScaling` divides by."""
    fans = {"fan_in": shape[0], "fan_out": shape[1], "fan_avg": (shape[0] + shape[1]) / 2}
    return max(1.0, float(fans[mode]))
