"""One worker's part of data that can only be read from its beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data.order import shares
from tfdist.data.parts import Maps
from tfdist.data.parts import Place
from tfdist.data.parts import as_read
from tfdist.data.parts import cut
from tfdist.data.parts import open_rows
from tfdist.data.parts import seed_of
from tfdist.data.parts import spread
from tfdist.data.shuffles import Shuffles


class StreamPart:
    """The part of a stream that one worker has.

    A stream that every worker reads whole is taken apart here: of each global batch a worker keeps
    its part. Whether all have read the same is told by the tag of a batch: the number of examples
    of the global batch, and a digest of them, each once for every example that is kept.

    Args:
        make: Returns the examples of a pass, given its number: a `tf.data.Dataset`.
        place: Which part.
        maps: What is done to it.
        batch_size: Examples of a global batch.
        is_whole: Whether every worker reads all examples; else each has examples of its own.
        lengths: Examples that each worker reads, where that is known.
        drop: Whether the last batch is left out if it is not full.
        shuffle: Examples that the shuffle buffer holds, or None.
        seed: What the order of a pass is drawn from.

    Attributes:
        batches: Global batches of a pass, or None where that is not known.
        spec: Structure of `tf.TypeSpec` of a worker's batch.
        is_tagged: Whether an element is a batch and its tag.
        seeks: Whether `iterator` begins at any batch.
        shuffles: Those of a pass, among them those of the dataset that is read.
    """

    seeks = False

    def __init__(
        self,
        make: Callable[[int], tf.data.Dataset],
        place: Place,
        maps: Maps,
        *,
        batch_size: int,
        is_whole: bool,
        lengths: list[int] | None = None,
        drop: bool = False,
        shuffle: int | None = None,
        seed: int = 0,
    ):
        self._make = make
        self._place = place
        self._maps = maps
        self._batch_size = batch_size
        self._is_whole = is_whole
        self._lengths = lengths
        self.drop = drop
        self._shuffle = shuffle
        self._seed = seed
        self.is_tagged = is_whole and place.workers > 1
        self._full = [sum(each) for each in spread(batch_size, place)]
        self.batches = self._count()
        pipeline = self.pipeline(0)
        self.shuffles = Shuffles(pipeline)
        spec = pipeline.element_spec
        self.spec = open_rows(spec[0] if self.is_tagged else spec)

    def rows(self, batch: int) -> list[list[int]] | None:
        """Returns the examples that each replica of each worker has of a batch, if known."""
        if self._lengths is None:
            return None
        if self._is_whole:
            left = self._lengths[0] - batch * self._batch_size
            return spread(max(0, min(self._batch_size, left)), self._place)
        return [
            shares(max(0, min(full, length - batch * full)), self._place.replicas)
            for full, length in zip(self._full, self._lengths, strict=True)
        ]

    @property
    def own_batches(self) -> int | None:
        """Batches of a pass of which this worker has any example, or None if that is not known."""
        number = self.batches
        if number is None or self._lengths is None:
            return None
        while number and not sum((self.rows(number - 1) or [])[self._place.worker]):
            number -= 1
        return number

    def is_full(self, rows: list[list[int]]) -> bool:
        """Whether every worker has all the rows of a full batch."""
        return [sum(each) for each in rows] == self._full

    def split(self, rows: int) -> list[int]:
        """Returns the examples of each replica here, where this worker has `rows` of a batch."""
        return shares(rows, self._place.replicas)

    def iterator(self, epoch: int, batch: int = 0) -> Any:
        """Returns an iterator over the batches of which this worker has any example.

        Args:
            epoch: Number of the pass.
            batch: 0: a stream is read from its beginning.
        """
        del batch
        return iter(as_read(self.pipeline(epoch)))

    def begin(self, passes: int) -> None:
        """Brings the shuffles of the dataset that is read to where passes have brought them."""
        if self.shuffles.keeps_first and passes:
            for _ in self._make(0):
                pass
            passes -= 1
        self.shuffles.begin(passes)

    def _count(self) -> int | None:
        if self._lengths is None:
            return None
        sizes = [self._batch_size] if self._is_whole else self._full
        pairs = list(zip(self._lengths, sizes, strict=False))
        if self.drop:
            return min(length // size for length, size in pairs)
        return max(-(-length // size) if size else 0 for length, size in pairs)

    def pipeline(
        self,
        epoch: int,
        choose: Callable[[tf.data.Dataset], tf.data.Dataset] = lambda batches: batches,
    ) -> tf.data.Dataset:
        """Returns the batches of which this worker has any example.

        Args:
            epoch: Number of the pass.
            choose: Leaves out some, before anything is done to them.
        """
        examples = self._make(epoch)
        if self._shuffle:
            examples = examples.shuffle(
                self._shuffle, seed=seed_of(self._seed, epoch), reshuffle_each_iteration=False
            )
        mine = self._full[self._place.worker]
        if not self._is_whole:
            batches = examples.batch(max(1, mine), drop_remainder=self.drop)
        else:
            batches = examples.batch(self._batch_size, drop_remainder=self.drop)
            if self.is_tagged:
                batches = batches.map(self._kept, num_parallel_calls=tf.data.AUTOTUNE)
                batches = batches.filter(lambda data, tag: tf.size(tag[0]) > 0)
        return self._maps.applied(choose(batches), max(1, mine), tagged=self.is_tagged)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _kept(self, *batch: Any) -> Any:
        data = batch if len(batch) > 1 else batch[0]
        flat = tf.nest.flatten(data)
        rows = count(flat[0])
        digest = rows
        for leaf in tf.nest.flatten(data, expand_composites=True):
            code = tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(leaf), 2**61)
            digest = tf.bitwise.bitwise_xor(digest * 31, code)
        replicas = self._place.workers * self._place.replicas
        each, more = rows // replicas, rows % replicas

        def edge(replica: int) -> Any:
            return each * replica + tf.minimum(more, replica)

        first = self._place.worker * self._place.replicas
        begin, end = edge(first), edge(first + self._place.replicas)
        tag = tf.fill([end - begin], rows), tf.fill([end - begin], digest)
        return cut(data, begin, end), tag


def count(leaf: Any) -> Any:
    """Returns the number of examples in a component of a batch, an int64 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]
