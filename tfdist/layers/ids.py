"""From what a feature holds to the row numbers of a table: casts and hashes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigError


def to_rows(ids: tf.Tensor, buckets: int | None, zero_is_padding: bool) -> tf.Tensor:
    """Returns row numbers for ids.

    Args:
        ids: Tensor of any shape; integers, floats that hold integers, or with `buckets` strings.
        buckets: Number of rows to hash into, or None where ids are row numbers already.
        zero_is_padding: Whether 0 and "" have row 0 for themselves when ids are hashed.

    Returns:
        Tensor of the same shape, int32 or int64. Hashes are those of `keras.layers.Hashing`
        (`num_bins=buckets`; where zero is padding, `mask_value` 0 or ""), so that a number and
        its decimal string have the same row.

    Raises:
        ConfigError: Strings without `buckets`, or floats with them.
    """
    if buckets is None:
        return _numbers(ids)
    if ids.dtype.is_floating:
        raise ConfigError(
            "ids to hash that are integers or strings", ids.dtype.name, "cast them to int64"
        )
    text = ids if ids.dtype == tf.string else tf.strings.as_string(ids)
    if not zero_is_padding or buckets == 1:
        return tf.strings.to_hash_bucket_fast(text, buckets)
    rows = tf.strings.to_hash_bucket_fast(text, buckets - 1) + 1
    return tf.where(is_padding(ids), tf.zeros_like(rows), rows)


def is_padding(ids: Any) -> Any:
    """Whether ids are 0 or ""; a tensor of the same shape."""
    return tf.equal(ids, tf.zeros([], ids.dtype))


def _numbers(ids: tf.Tensor) -> tf.Tensor:
    if ids.dtype == tf.string:
        raise ConfigError(
            "ids that are row numbers",
            "strings",
            "pass hash_ids=True to the Embedding, or look them up in a vocabulary first",
        )
    if ids.dtype in (tf.int32, tf.int64):
        return ids
    return tf.cast(ids, tf.int64 if ids.dtype in (tf.uint32, tf.uint64) else tf.int32)
