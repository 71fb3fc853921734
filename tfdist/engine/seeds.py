"""Shuffles that nobody seeded come out alike on every worker.

Every worker of a synchronous job builds the whole input pipeline and keeps its share of the
examples. That is only right if all pipelines yield the same order, and an unseeded
`Dataset.shuffle` does not: some examples are then seen twice in an epoch and others never
(tensorflow/datasets issue 1302; measured: 21 of 64 never seen). So where neither the operation nor
the program has a seed, a job of several workers draws it from the name of the run: different from
run to run, the same on every worker.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Any

from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.cluster.detect import detect
from tfdist.errors import TfdistError

_MARK = "_tfdist_original"
_drawn = 0


def job_seed() -> int | None:
    """Returns a seed that all workers of this run share, or None in a one-worker world."""
    group = current.group()
    name = rendezvous.job_name()
    if group is not None and group.cluster.num_workers > 1:
        text = name or str(group.facts[0].get("nonce", ""))
    elif name and _several_workers():
        # Before the barrier, under a launcher: the data came before the strategy.
        text = name
    else:
        return None
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def next_seed() -> int | None:
    """Returns a fresh shared seed: the n-th call of every worker returns the same."""
    global _drawn
    base = job_seed()
    if base is None:
        return None
    text = f"{base}/{_drawn}"
    _drawn += 1
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def program_is_seeded() -> bool:
    """Whether the program has set a global seed (`keras.utils.set_random_seed` does)."""
    from tensorflow.python.framework import random_seed as program_seeds

    return program_seeds.get_seed(None)[0] is not None


def position() -> list[int | None]:
    """Returns what shuffles are drawn from: the program's seed, and how many seeds were drawn."""
    from tensorflow.python.framework import random_seed as program_seeds

    return [program_seeds.get_seed(None)[0], _drawn]


def _several_workers() -> bool:
    try:
        return detect(os.environ).num_workers > 1
    except TfdistError:
        return False


def install() -> None:
    """Gives tf.data operations without a seed a shared one; only in jobs of several workers."""
    from tensorflow.python.data.util import random_seed as data_seeds

    original = data_seeds.get_seed
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def get_seed(seed: Any) -> Any:
        if seed is None and not program_is_seeded():
            seed = next_seed()
            if seed is not None:
                # Two halves, as for a program seed and an operation seed.
                import tensorflow as tf

                return tf.constant(seed % 2**31, tf.int64), tf.constant(seed // 2**31, tf.int64)
        return original(seed)

    setattr(get_seed, _MARK, original)
    data_seeds.get_seed = get_seed


def uninstall() -> None:
    """Takes `install` out again."""
    from tensorflow.python.data.util import random_seed as data_seeds

    data_seeds.get_seed = getattr(data_seeds.get_seed, _MARK, data_seeds.get_seed)
