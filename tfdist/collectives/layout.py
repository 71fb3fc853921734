"""Where everything lies in the shared memory: arithmetic alone, the same on every rank.

    header | counters of rank 0, 1, ... | slots of rank 0, 1, ... | results of bucket 0, 1, ...

A rank writes into its slots what others are to add, one chunk at a time; a slot is small enough to
stay in the processor's cache, and is used again by a later chunk. Results are as large as the
buckets, because TensorFlow keeps using that memory: nobody copies them out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

#: TensorFlow adopts an array without copying it only at such addresses.
ALIGNMENT = 64
PAGE = 4096
#: Ranks run at most one chunk apart, so two slots suffice.
SLOTS = 2
#: While one result of a bucket is in use, the next step writes the other.
REGIONS = 2
#: Bytes that all ranks together sum between two signals. Larger ones leave the cache, smaller ones
#: wait more often for a rank that has lost its core for a moment.
CHUNK_BYTES = 4 << 20
#: Up to this size a bucket is summed by every rank for itself: one signal less, no shared result.
SMALL_BYTES = 64 << 10
#: Bytes of counters for each rank, see `signals`.
COUNTER_BYTES = 512

#: The types that can be summed, with the bytes of one element.
ITEM_BYTES = {"float32": 4, "float64": 8, "int32": 4, "int64": 8}


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Arrays of one type that are summed together.

    Attributes:
        dtype: Name of their type, a key of `ITEM_BYTES`.
        shapes: Their shapes, in order.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """How many elements each array has."""
        return [math.prod(shape) for shape in self.shapes]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of elements of one array, with its place in the bucket.

    Attributes:
        array: Index of the array.
        start: First element of the flattened array.
        stop: Element after the last.
        at: Place of the first element in the bucket, in elements.
    """

    array: int
    start: int
    stop: int
    at: int


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """How the ranks share out the work on one bucket.

    Attributes:
        bucket: What is summed.
        starts: Place of each array in the bucket, in elements, aligned.
        length: Elements of the bucket, the gaps between arrays included.
        small: Whether every rank sums everything for itself.
        cuts: Rank r sums the elements from `cuts[r]` to `cuts[r + 1]`.
        block: How many of its elements a rank sums in one chunk.
        chunks: Number of chunks.
        results: Offset in the memory of each result region; empty if `small`.
    """

    bucket: Bucket
    starts: tuple[int, ...]
    length: int
    small: bool
    cuts: tuple[int, ...]
    block: int
    chunks: int
    results: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one result."""
        return self.length * ITEM_BYTES[self.bucket.dtype]

    def part(self, chunk: int, owner: int) -> tuple[int, int]:
        """Returns the first element that `owner` sums in `chunk`, and the one after the last."""
        start = min(self.cuts[owner] + chunk * self.block, self.cuts[owner + 1])
        return start, min(start + self.block, self.cuts[owner + 1])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Returns the runs of elements that lie between two places in the bucket."""
        pieces = []
        for array, (at, size) in enumerate(zip(self.starts, self.bucket.sizes, strict=True)):
            first, last = max(at, start), min(at + size, stop)
            if first < last:
                pieces.append(Piece(array, first - at, last - at, first))
        return pieces


@dataclasses.dataclass(frozen=True)
class Layout:
    """The whole memory.

    Attributes:
        ranks: Number of ranks.
        buckets: One layout for each bucket.
        slots: Offset of the slots of rank 0.
        slot_bytes: Bytes of one slot.
        nbytes: Bytes in all.
    """

    ranks: int
    buckets: tuple[BucketLayout, ...]
    slots: int
    slot_bytes: int
    nbytes: int

    def slot(self, rank: int, entry: int) -> int:
        """Returns the offset of a slot."""
        return self.slots + (rank * SLOTS + entry) * self.slot_bytes

    def counters(self, rank: int) -> int:
        """Returns the offset of a rank's counters."""
        return PAGE + rank * COUNTER_BYTES

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Returns the (offset, bytes) that `rank` writes to most, so that it provides the pages."""
        ranges = [(self.slot(rank, 0), SLOTS * self.slot_bytes)]
        if rank == 0:
            ranges.append((0, self.slots))
        for bucket in self.buckets:
            item = ITEM_BYTES[bucket.bucket.dtype]
            start, stop = bucket.cuts[rank] * item, bucket.cuts[rank + 1] * item
            ranges += [(result + start, stop - start) for result in bucket.results]
        return [(offset, size) for offset, size in ranges if size]

    @property
    def digest(self) -> str:
        """Differs between any two layouts."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def lay_out(buckets: Sequence[Bucket], ranks: int) -> Layout:
    """Returns the layout for `buckets` among `ranks`."""
    slots = _up(PAGE + ranks * COUNTER_BYTES, PAGE)
    plans = [_share_out(bucket, ranks) for bucket in buckets]
    slot_bytes = max((_slot_bytes(plan, ranks) for plan in plans), default=0)
    slot_bytes = _up(slot_bytes, PAGE)
    offset = slots + ranks * SLOTS * slot_bytes
    placed = []
    for plan in plans:
        results = []
        for _ in range(0 if plan.small else REGIONS):
            results.append(offset)
            offset += _up(plan.nbytes, PAGE)
        placed.append(dataclasses.replace(plan, results=tuple(results)))
    return Layout(ranks, tuple(placed), slots, slot_bytes, offset)


def _share_out(bucket: Bucket, ranks: int) -> BucketLayout:
    item = ITEM_BYTES[bucket.dtype]
    unit = ALIGNMENT // item
    starts, length = [], 0
    for size in bucket.sizes:
        starts.append(length)
        length = _up(length + size, unit)
    small = length * item <= SMALL_BYTES
    cuts = tuple(min(_up(length * rank // ranks, unit), length) for rank in range(ranks + 1))
    block = max(unit, CHUNK_BYTES // ranks // item // unit * unit)
    longest = max(stop - start for start, stop in zip(cuts, cuts[1:], strict=False))
    chunks = 1 if small else -(-longest // block)
    return BucketLayout(bucket, tuple(starts), length, small, cuts, min(block, longest), chunks, ())


def _slot_bytes(plan: BucketLayout, ranks: int) -> int:
    # A block for every rank, this one included: it may have to hold sums, see `allreduce`.
    return plan.nbytes if plan.small else ranks * plan.block * ITEM_BYTES[plan.bucket.dtype]


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
