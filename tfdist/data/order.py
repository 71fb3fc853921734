"""Which examples are in batch i of pass p, and which of them are a replica's.

Everything follows from a few numbers, so that any worker finds any batch without having read what
comes before it, and finds the same examples in it whatever the number of workers is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tfdist.errors import ConfigError

#: Orders of more numbers than this are not made as a whole.
MOST_AT_ONCE = 1 << 17
#: Orders of several passes that are handed on together hold about as many numbers, in so many
#: passes at most.
_IN_TABLE, _PASSES = 1 << 20, 256


class Order:
    """The batches of a source whose examples can be read in any order.

    Args:
        length: Number of examples.
        batch_size: Examples of a global batch.
        shuffle: False: in the order of the source. True: in an order of all examples that is new
            in every pass. "batch": runs of `batch_size` neighbours stay together, in an order that
            is new in every pass; an incomplete last one stays last.
        seed: What the orders are drawn from; needed with `shuffle`.
        drop: Whether the last batch is left out if it is not full.

    Example:
        >>> Order(5, 2).indices(0, 2)
        array([4])
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        seed: int | None = None,
        drop: bool = False,
    ):
        if shuffle and seed is None:
            raise ConfigError("a seed for an order that is shuffled", "None")
        self.length = length
        self.batch_size = batch_size
        self.batches = length // batch_size if drop else -(-length // batch_size)
        self._shuffle = shuffle
        self._seed = seed or 0
        self._known: dict[int, np.ndarray] = {}

    def rows(self, batch: int) -> int:
        """Returns the number of examples in a batch."""
        return max(0, min(self.batch_size, self.length - batch * self.batch_size))

    def indices(self, epoch: int, batch: int) -> np.ndarray:
        """Returns the examples of a batch.

        Args:
            epoch: Number of the pass over the data, from 0.
            batch: Number of the batch in it, from 0.
        """
        first = batch * self.batch_size
        return self.at(epoch, np.arange(first, first + self.rows(batch)))

    def at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Returns the examples that come at some places of a pass.

        Args:
            epoch: Number of the pass over the data, from 0.
            places: Whole numbers below `length`, in an array of any shape.
        """
        if not self._shuffle:
            return places
        if self._shuffle == "batch":
            whole = self.length // self.batch_size
            batches = places // self.batch_size
            chosen = self._shuffled(epoch, np.minimum(batches, max(0, whole - 1)), whole)
            begins = np.where(batches < whole, chosen, batches) * self.batch_size
            found: np.ndarray = begins + places % self.batch_size
            return found
        return self._shuffled(epoch, places, self.length)

    @property
    def shuffled(self) -> int:
        """How many numbers are put in order in every pass: of examples or, with "batch", batches.

        0 where it is the order of the source.
        """
        if not self._shuffle:
            return 0
        return self.length // self.batch_size if self._shuffle == "batch" else self.length

    @property
    def by_batch(self) -> bool:
        """Whether neighbours stay together."""
        return self._shuffle == "batch"

    @property
    def passes_in_table(self) -> int:
        """For how many passes `table` is made at a time."""
        return max(1, min(_PASSES, _IN_TABLE // max(1, min(self.shuffled, MOST_AT_ONCE))))

    def table(self, epoch: int) -> np.ndarray:
        """Returns what the orders of some passes from `epoch` on follow from, a row for each.

        These are the orders themselves, or, of more than `MOST_AT_ONCE` numbers, the keys of
        `scattered`.
        """
        epochs = range(epoch, epoch + self.passes_in_table)
        if self.shuffled > MOST_AT_ONCE:
            return np.stack([_keys(self._seed, each) for each in epochs])
        return np.stack([permutation(self.shuffled, self._seed, each) for each in epochs])

    def _shuffled(self, epoch: int, places: np.ndarray, count: int) -> np.ndarray:
        if count > MOST_AT_ONCE:
            return scattered(places, count, self._seed, epoch)
        if epoch not in self._known:
            # Reading ahead crosses into the next pass before the last batch of one is asked for.
            self._known = {e: p for e, p in self._known.items() if e == epoch - 1}
            self._known[epoch] = permutation(count, self._seed, epoch)
        found: np.ndarray = self._known[epoch][places] if count else places
        return found


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the numbers below `count` in the order of a pass.

    The same in every version of NumPy, whose `RandomState` is frozen: a job that is restarted from
    a newer image goes on in the same order.

    Args:
        count: How many.
        seed: Any whole number that is not negative.
        epoch: Number of the pass.
    """
    words = [seed >> shift & 0xFFFFFFFF for shift in range(0, max(64, seed.bit_length()), 32)]
    order = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    np.random.RandomState([*words, epoch & 0xFFFFFFFF]).shuffle(order)
    return order


def scattered(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns which of `count` numbers come at some places of a pass, without making all of them.

    A bijection of the numbers below a power of 4: a Feistel network of six rounds, whose keys are
    drawn from the seed and the pass. What falls outside goes through it again until it is inside.
    A shuffle of 10^8 numbers would take ten seconds and half a gigabyte in every pass.

    Source: Black and Rogaway, Ciphers with arbitrary finite domains (2002), section 5.

    Args:
        places: Whole numbers below `count`, in an array of any shape.
        count: How many numbers.
        seed: Any whole number that is not negative.
        epoch: Number of the pass.
    """
    half = np.uint64((max(2, (count - 1).bit_length()) + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _keys(seed, epoch)
    found = places.astype(np.uint64).reshape(-1)
    outside = np.arange(found.size)
    while outside.size:
        value = found[outside]
        left, right = value >> half, value & mask
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(0xD6E8FEB86659FD93)
            left, right = right, left ^ (mixed >> np.uint64(32) & mask)
        found[outside] = left << half | right
        outside = outside[found[outside] >= count]
    return found.astype(np.int64).reshape(places.shape)


def _keys(seed: int, epoch: int) -> np.ndarray:
    """Returns the keys of the six rounds, uint64."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return np.frombuffer(digest, "<u4", 6).astype(np.uint64)


def shares(rows: int, replicas: int) -> list[int]:
    """Returns the examples of each replica: as even as can be, and none twice.

    >>> shares(7, 3)
    [3, 2, 2]
    """
    each, more = divmod(rows, replicas)
    return [each + (replica < more) for replica in range(replicas)]


def part(rows: int, workers: int, worker: int, replicas: int = 1) -> tuple[int, list[int]]:
    """Returns where a worker's part of a batch begins, and the examples of each of its replicas.

    Args:
        rows: Examples of the global batch.
        workers: Number of workers.
        worker: Number of this one.
        replicas: Replicas of each worker.
    """
    counts = shares(rows, workers * replicas)
    first = worker * replicas
    return sum(counts[:first]), counts[first : first + replicas]


def assign(counts: Sequence[int], workers: int) -> list[list[int]]:
    """Returns the files of each worker, so that all have about as many examples.

    Args:
        counts: Examples (or bytes) of each file.
        workers: Number of workers.
    """
    files: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for index in sorted(range(len(counts)), key=lambda i: (-counts[i], i)):
        lightest = loads.index(min(loads))
        files[lightest].append(index)
        loads[lightest] += counts[index]
    return [sorted(each) for each in files]
