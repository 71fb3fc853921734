"""Reads this process's part of `tfdist.data.Sharded`."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from keras import tree

from tfdist.data.parts import Place
from tfdist.data.parts import cut
from tfdist.data.streams import count
from tfdist.engine import iterators
from tfdist.engine.batch import Batch
from tfdist.engine.exchange import exchange
from tfdist.engine.input_wait import Waiting
from tfdist.engine.parcels import Parcels
from tfdist.engine.readers import Shares
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.replicas import is_composite
from tfdist.engine.rest_of_pass import RestOfPass
from tfdist.errors import DisagreementError

log = logging.getLogger("absl")

_GOES_ON, _ENDED = range(2)


class ShardReader:
    """Reads a part of the data, pass after pass.

    Args:
        strategy: The strategy of the model; on parameter servers batches are whole, and packed.
        part: A part, as of `tfdist.data.Sharded.part`.
        place: Which part it is.

    Attributes:
        waiting: Time waited for the data, without that for other workers.
    """

    def __init__(self, strategy: Any, part: Any, place: Place):
        self.waiting = Waiting()
        self._part = part
        self._worker = place.worker
        self._workers = place.workers
        self._shares = None if is_asynchronous(strategy) else Shares(strategy)
        self._parcels = Parcels(part.spec)
        self._is_fixed = has_fixed_parts(part)
        self._epoch, self._batch = -1, 0
        self._read_here = self._read_by_all = 0
        self._iterator: Any = None
        self._rest: RestOfPass | None = None

    def go_to(self, epoch: int, batch: int, state: bytes | None = None) -> None:
        """Goes on with a batch of a pass.

        Args:
            epoch: Number of the pass.
            batch: Number of the batch.
            state: What `saved` has returned there, or None.
        """
        self._epoch, self._batch, self._rest = epoch, batch, None
        self._read_here = self._read_by_all = 0
        self._iterator = self._part.iterator(epoch, batch)
        if state is not None and not self._part.seeks:
            iterators.restore(self._iterator, state)
        elif batch and not self._part.seeks:
            log.info("reading %d batches again to find the place of pass %d", batch, epoch + 1)
            for number in range(batch):
                rows = self._part.rows(number)
                if rows is None or sum(rows[self._worker]):
                    next(self._iterator, None)

    def resume(self, epoch: int, batch: int, state: bytes | None) -> None:
        """Goes on where another process was.

        Args:
            epoch: Number of the pass.
            batch: Number of the batch; -1: the pass is over.
            state: What `saved` has returned there, or None.
        """
        if not self._part.seeks and state is None:
            self._part.begin(epoch if batch >= 0 else epoch + 1)
        if batch >= 0:
            self.go_to(epoch, batch, state)

    def go_on(self, rest: RestOfPass, epoch: int, batch: int) -> None:
        """Goes on with what other workers have left of a pass.

        Args:
            rest: What they have left.
            epoch: Number of the pass.
            batch: Number of the batch.
        """
        if not self._part.seeks:
            self._part.begin(epoch + 1)
        self._epoch, self._batch, self._rest = epoch, batch, rest
        self._read_here = self._read_by_all = 0

    def saved(self) -> bytes | None:
        """Returns what `go_to` takes to find its place without reading, where there is such."""
        if self._rest is not None:
            return None
        if self._part.seeks or not self._part.shuffles.is_known:
            return None
        state = iterators.saved(self._iterator)
        return state if state is not None and self._part.shuffles.are_in(state) else None

    def next(self) -> Any:
        batch = self._next()
        if batch is None and self._read_by_all:
            log.info(
                "pass %d over the data: %d of %d examples read by this worker, in %d batches",
                self._epoch + 1,
                self._read_here,
                self._read_by_all,
                self._batch,
            )
            self._read_here = self._read_by_all = 0
        return batch

    def _next(self) -> Any:
        part = self._part
        if self._rest is None and part.batches is not None and self._batch >= part.batches:
            return None
        everyone = None if self._rest is not None else part.rows(self._batch)
        if self._rest is not None:
            with self.waiting:
                found = self._rest.next()
            if found is None:
                return None
            data, everyone = found
        elif everyone is None:
            found = self._told()
            if found is None:
                return None
            data, everyone = found
        else:
            data, tag = self._read(sum(everyone[self._worker]) > 0)
            if part.is_tagged and self._batch == 0:
                self._gather(_GOES_ON, tag, everyone[self._worker])
        self._batch += 1
        self._read_here += sum(everyone[self._worker])
        self._read_by_all += sum(map(sum, everyone))
        return self._batch_of(data, everyone)

    def _read(self, is_there: bool = True) -> tuple[Any, tuple[int, int]]:
        """Returns this worker's part of the next batch, or None, and rows and digest of all."""
        element = None
        if is_there:
            with self.waiting:
                element = next(self._iterator, None)
        if element is None or not self._part.is_tagged:
            return element, (0, 0)
        data, (rows, digest) = element
        return data, (int(rows[0]), int(digest[0]))

    def _told(self) -> Any:
        """Returns the part of a batch whose size nobody knows before, and the rows of everyone."""
        data, tag = self._read()
        local = self._part.split(0 if data is None else int(count(tree.flatten(data)[0])))
        everyone = self._gather(_ENDED if data is None else _GOES_ON, tag, local)
        if all(state == _ENDED for state, *_ in everyone):
            return None
        rows = [list(rows) for _, _, _, *rows in everyone]
        if self._part.drop and not self._part.is_full(rows):
            return None
        return data, rows

    def _gather(self, state: int, tag: tuple[int, int], rows: list[int]) -> list[list[int]]:
        mine = [state, *tag, *rows]
        if self._workers == 1:
            return [mine]
        everyone = exchange("reading the next examples", len(mine)).gather(mine)
        seen = {(total, digest) for _, total, digest, *_ in everyone if total}
        if len(seen) > 1:
            raise DisagreementError(
                "the same examples in the same order on every worker, each of which takes its part",
                f"other examples in batch {self._batch + 1} of pass {self._epoch + 1}",
                "seed what the data is drawn from alike on all workers, or give a "
                "dataset_fn(context) that reads only the part of context.input_pipeline_id",
            )
        return everyone

    def _batch_of(self, data: Any, everyone: list[list[int]]) -> Any:
        mine = everyone[self._worker]
        if data is None:
            data = _no_rows(self._part.spec)
        if self._shares is None:
            return self._parcels.packed(data)
        parts, begin = [data], 0
        if len(mine) > 1:
            parts = []
            for rows in mine:
                parts.append(cut(data, begin, begin + rows))
                begin += rows
        share = self._shares.of(mine, everyone)
        is_fixed = self._is_fixed
        has_empty = not all(mine)
        if len(parts) > 1 and any(map(is_composite, tree.flatten(data))):
            return self._shares.packed(parts, share, is_fixed, has_empty)
        return Batch(self._shares.per_replica(parts), share, is_fixed, has_empty)


def has_fixed_parts(part: Any) -> bool:
    """Whether every replica has as many examples of every batch."""
    if not part.batches:
        return False
    counts = [part.rows(batch) for batch in (0, part.batches - 1)]
    return len({rows for each in counts for worker in each or [[0, 1]] for rows in worker}) == 1


def _no_rows(spec: Any) -> Any:
    """Returns a batch of no examples."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.TensorSpec):
            return tf.zeros([0, *(size or 0 for size in leaf.shape[1:])], leaf.dtype)
        if isinstance(leaf, tf.RaggedTensorSpec):
            inner = [0, *(size or 0 for size in leaf.shape[1 + leaf.ragged_rank :])]
            splits = tf.zeros([1], leaf.row_splits_dtype)
            flat = tf.zeros(inner, leaf.dtype)
            return tf.RaggedTensor.from_nested_row_splits(flat, [splits] * leaf.ragged_rank)
        if isinstance(leaf, tf.SparseTensorSpec):
            shape = [0, *(size or 0 for size in leaf.shape[1:])]
            indices = tf.zeros([0, len(shape)], tf.int64)
            return tf.SparseTensor(indices, tf.zeros([0], leaf.dtype), shape)
        return None

    return tree.map_structure(one, spec)
