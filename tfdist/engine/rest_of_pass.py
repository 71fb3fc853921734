"""The rest of a pass that another number of workers has begun."""

from __future__ import annotations

import logging
from typing import Any

from keras import tree

from tfdist.data.parts import Place
from tfdist.data.parts import cut
from tfdist.data.parts import join
from tfdist.data.parts import spread
from tfdist.data.streams import count

log = logging.getLogger("absl")


class RestOfPass:
    """What is left of a pass whose global batches were put together by other workers.

    Where each worker reads files or examples of its own, a global batch depends on how many there
    are. Here every worker reads what all of those would have read, and takes its part of it. Later
    passes are split anew.

    Args:
        parts: The parts of those workers.
        place: Which part is wanted.
        epoch: Number of the pass.
        batch: Batches of it that are done.
    """

    def __init__(self, parts: list[Any], place: Place, epoch: int, batch: int):
        self._place = place
        self._parts = parts
        self._iterators = []
        log.info(
            "pass %d was begun by another number of workers: every worker reads all of its rest, "
            "and %d batches again to find the place",
            epoch + 1,
            batch,
        )
        for worker, part in enumerate(parts):
            part.begin(epoch)
            iterator = part.iterator(epoch)
            for number in range(batch):
                rows = part.rows(number)
                if rows is None or sum(rows[worker]):
                    next(iterator, None)
            self._iterators.append(iterator)

    def next(self) -> tuple[Any, list[list[int]]] | None:
        """Returns this worker's examples of the next global batch, and the rows of everyone.

        The examples are None where it has none; all of it is None at the end of the pass.
        """
        found = [next(iterator, None) for iterator in self._iterators]
        ended = [each is None for each in found]
        if all(ended) or any(ended) and self._parts[0].drop:
            return None
        batch = join([each for each in found if each is not None])
        rows = int(count(tree.flatten(batch)[0]))
        everyone = spread(rows, self._place)
        begin = sum(map(sum, everyone[: self._place.worker]))
        mine = sum(everyone[self._place.worker])
        return (cut(batch, begin, begin + mine) if mine else None), everyone
