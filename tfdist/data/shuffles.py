"""The shuffles of a `tf.data` pipeline, and how often each was begun.

A shuffle without a fixed order draws a new one every time it is begun, from a seed and from how
often that was. So a process that goes on in a later pass must have begun each shuffle as often as
the one before. That is no single number: a shuffle whose output another one shuffles is only begun
when that is read, one that is repeated is begun once a repetition, one that is cached only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import tensorflow as tf

_OF_SHUFFLE = b"epoch_num_random_samples"  # As TensorFlow names it in the state of an iterator.


class _Shuffle(NamedTuple):
    """A dataset that draws numbers.

    Attributes:
        dataset: The dataset.
        read: How often it is begun by an iterator that is read to its end.
        unread: How often by one that is never read.
        is_new: Whether it draws others every time.
        is_kept: Whether a cache keeps what it gave first.
    """

    dataset: Any
    read: int
    unread: int
    is_new: bool
    is_kept: bool


class Shuffles:
    """The shuffles of a pipeline.

    Args:
        dataset: What iterators are made of.

    Attributes:
        is_known: Whether TensorFlow tells what the pipeline is made of.
        keeps_first: Whether a cache keeps the order of the first pass.
    """

    def __init__(self, dataset: Any):
        self.is_known = isinstance(dataset, tf.data.Dataset)
        found = list(self._within(dataset, 1, 1, False)) if self.is_known else []
        self._all = found
        self.keeps_first = any(each.is_kept and each.is_new for each in found)

    def are_in(self, state: bytes) -> bool:
        """Whether the state of an iterator has a part of each of them.

        One whose data has been read to its end has none: how often it was begun is then lost.
        """
        return state.count(_OF_SHUFFLE) >= len(self._all)

    def begin(self, read: int, unread: int = 0) -> None:
        """Begins them as often as a number of iterators would, without reading anything.

        Those whose first order is kept are left out: only reading makes that.

        Args:
            read: Iterators that are read to the end.
            unread: Iterators that are never read.
        """
        for each in self._all:
            if each.is_new and not each.is_kept:
                for _ in range(read * each.read + unread * each.unread):
                    iter(each.dataset)

    def _within(self, dataset: Any, read: int, unread: int, kept: bool) -> Iterator[_Shuffle]:
        kind = type(dataset).__name__
        inputs = dataset._inputs()
        if kind == "_VariantDataset":
            self.is_known = False
        if kind == "_ShuffleDataset":
            if int(dataset._buffer_size) != 1:  # Else TensorFlow leaves it out.
                is_new = getattr(dataset, "_reshuffle_each_iteration", None) is not False
                yield _Shuffle(dataset, read, unread, is_new, kept)
            unread = 0
        elif kind == "_RandomDataset":
            yield _Shuffle(
                dataset, read, unread, bool(getattr(dataset, "_rerandomize", True)), kept
            )
        elif kind == "_RepeatDataset":
            times = int(dataset._count)
            # After the last repetition it is begun once more; not so where both become one.
            is_one = type(inputs[0]).__name__ == "_ShuffleDataset"
            read *= times + (not is_one) if times > 1 else 1
        elif kind == "CacheDataset":
            kept = True
        for number, each in enumerate(inputs):
            later = kind == "_ConcatenateDataset" and number > 0
            yield from self._within(each, read, 0 if later else unread, kept)
