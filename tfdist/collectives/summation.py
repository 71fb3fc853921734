"""The arithmetic of one bucket: copies into the slots, sums out of them.

Sums run over the ranks in their order, whoever computes them, so that a result depends neither on
timing nor on which rank owns an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdist.collectives.layout import SLOTS
from tfdist.collectives.layout import BucketLayout
from tfdist.collectives.layout import Piece
from tfdist.collectives.memory import Place

Array = npt.NDArray[Any]

#: What to copy where: a run of elements of an array, and the part of a slot for it.
_Fill = tuple[Piece, Array]
#: What to sum: a run of elements, and where each rank's lie; None for those of this rank, which
#: are read from its array.
_Sum = tuple[Piece, list[Array | None]]


class Summation:
    """One rank's work on one bucket.

    Args:
        place: The shared memory.
        plan: The part of its layout for this bucket.
    """

    def __init__(self, place: Place, plan: BucketLayout):
        self.plan = plan
        self.type = np.dtype(plan.bucket.dtype)
        self._memory = place.memory
        self._layout = place.layout
        self._rank = place.rank
        self._fills = [
            [self._plan_fill(chunk, entry) for chunk in range(plan.chunks)]
            for entry in range(SLOTS)
        ]
        self._sums = [
            [self._plan_sum(chunk, entry) for chunk in range(plan.chunks)] for entry in range(SLOTS)
        ]

    def flatten(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns the arrays as the vectors that `fill` and `sum` work on; copies if it must."""
        return [np.ascontiguousarray(array).reshape(-1) for array in arrays]

    def fill(self, chunk: int, entry: int, vectors: Sequence[Array]) -> None:
        """Writes into this rank's slot `entry` what others need of `chunk`."""
        for piece, slot in self._fills[entry][chunk]:
            np.copyto(slot, vectors[piece.array][piece.start : piece.stop])

    def sum(self, chunk: int, entry: int, vectors: Sequence[Array], out: Array, at: int) -> None:
        """Sums this rank's part of `chunk`.

        Args:
            chunk: Which chunk.
            entry: The slot it is in.
            vectors: This rank's own arrays.
            out: Where the sums go.
            at: Place in the bucket of the first element of `out`.
        """
        for piece, sources in self._sums[entry][chunk]:
            own = vectors[piece.array][piece.start : piece.stop]
            start = piece.at - at
            target = out[start : start + piece.stop - piece.start]
            terms = [own if source is None else source for source in sources]
            np.add(terms[0], terms[1], out=target)
            for term in terms[2:]:
                np.add(target, term, out=target)

    def part_in_slot(self, owner: int, chunk: int, entry: int) -> tuple[Array, int]:
        """Returns the room for `owner`'s sums in its own slot, and their place in the bucket."""
        start, stop = self.plan.part(chunk, owner)
        return self._slot(owner, entry, owner, 0, stop - start), start

    def result(self, region: int) -> Array:
        """Returns a new view of a result region. Everything cut from it refers to it in `base`."""
        return self._view(self.plan.results[region], self.plan.length)

    def _plan_fill(self, chunk: int, entry: int) -> list[_Fill]:
        fills: list[_Fill] = []
        for owner in range(self._layout.ranks):
            if self.plan.small or owner != self._rank:
                start, stop = self._part(chunk, owner)
                fills += [
                    (piece, self._source(self._rank, entry, owner, piece, start))
                    for piece in self.plan.pieces(start, stop)
                ]
            if self.plan.small:
                break
        return fills

    def _plan_sum(self, chunk: int, entry: int) -> list[_Sum]:
        start, stop = self._part(chunk, self._rank)
        sums: list[_Sum] = []
        for piece in self.plan.pieces(start, stop):
            sources = [
                None if rank == self._rank else self._source(rank, entry, self._rank, piece, start)
                for rank in range(self._layout.ranks)
            ]
            sums.append((piece, sources))
        return sums

    def _part(self, chunk: int, owner: int) -> tuple[int, int]:
        return (0, self.plan.length) if self.plan.small else self.plan.part(chunk, owner)

    def _source(self, rank: int, entry: int, owner: int, piece: Piece, start: int) -> Array:
        return self._slot(rank, entry, owner, piece.at - start, piece.stop - piece.start)

    def _slot(self, rank: int, entry: int, owner: int, at: int, size: int) -> Array:
        """Returns a part of what `rank` has written in its slot for `owner`."""
        first = 0 if self.plan.small else owner * self.plan.block
        offset = (first + at) * self.type.itemsize
        return self._view(self._layout.slot(rank, entry) + offset, size)

    def _view(self, offset: int, size: int) -> Array:
        return np.ndarray((size,), self.type, buffer=self._memory, offset=offset)
