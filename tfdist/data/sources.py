"""Sources made from files, datasets, functions and generators."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.indexed import example
from tfdist.data.order import permutation
from tfdist.data.parts import Place
from tfdist.data.policy import Facts
from tfdist.data.policy import Policy
from tfdist.data.records import Records
from tfdist.errors import ConfigError

_AT_ONCE = 64  # Records that are read in one call of Python.
_INTERLEAVED = 8  # Files that a worker reads at a time where it reads them in order.


class RecordSource:
    """The records of TFRecord files.

    Args:
        paths: The files.
        compression: "", "GZIP" or "ZLIB".
        ranges: As for `Records`.
        notes: What was found out on the way.
    """

    kind = "records"

    def __init__(
        self,
        paths: Sequence[str],
        compression: str = "",
        ranges: Sequence[tuple[int, int]] | None = None,
        notes: tuple[str, ...] = (),
    ):
        self._paths = list(paths)
        self._compression = compression
        sizes = tuple(int(tf.io.gfile.stat(path).length) for path in self._paths)
        is_local = not any("://" in path for path in self._paths)
        self._records = Records(self._paths, ranges) if is_local and not compression else None
        counts = self._records.counts if self._records else None
        self.length = sum(counts or ())
        loads = counts or sizes
        if not any(loads):
            raise ConfigError("files with records in them", f"{len(paths)} files with none")
        if empty := len(loads) - sum(map(bool, loads)):
            notes = (*notes, f"{empty} of {len(loads)} files hold no record")
        if self._records is None:
            why = f"compressed ({compression})" if compression else "not on a local disk"
            notes = (*notes, f"files that are {why} are read in order, their records not counted")
        self.facts = Facts(
            self.kind,
            examples=None if counts is None else self.length,
            is_indexed=counts is not None,
            counts=counts,
            sizes=sizes,
            notes=notes,
        )

    def batches(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of the records at each vector of indices."""
        records = self._records
        assert records is not None

        def read(rows: np.ndarray) -> np.ndarray:
            return np.array(records.read(rows), object)

        def batch(rows: Any) -> Any:
            found = tf.numpy_function(read, [rows], tf.string)
            return tf.ensure_shape(found, [None])

        return indices.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def in_graph(self, indices: tf.data.Dataset, rows: int, near: bool) -> tf.data.Dataset:
        """Returns the same, read by TensorFlow from its place in a file: for another process."""
        return self._found(indices.unbatch()).batch(rows)

    def _found(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of the record at each index, without any Python."""
        assert self._records is not None
        begins, paths = tf.constant(self._records.begins()), tf.constant(self._paths)
        ends = tf.constant(np.cumsum(self._records.counts))

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def record(index: Any) -> Any:
            file = tf.searchsorted(ends, index[tf.newaxis], side="right")[0]
            variant = tf.raw_ops.TFRecordDatasetV2(
                filenames=paths[file][tf.newaxis],
                compression_type="",
                buffer_size=tf.constant(0, tf.int64),
                byte_offsets=begins[index][tf.newaxis],
            )
            spec = tf.TensorSpec([], tf.string)
            return tf.data.experimental.from_variant(variant, spec).take(1).get_single_element()

        return indices.map(record, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def examples(
        self, epoch: int, place: Place, policy: Policy, seed: int | None
    ) -> tf.data.Dataset:
        """Returns the records that a worker reads in a pass, files in an order of the pass."""
        files = self._chosen(epoch, place, policy, seed)
        if self._records is None:
            return self._in_order(files)
        rows = tf.data.Dataset.from_tensor_slices(self._rows(files))
        return self.batches(rows.batch(_AT_ONCE)).unbatch()

    def examples_in_graph(
        self, epoch: int, place: Place, policy: Policy, seed: int | None
    ) -> tf.data.Dataset:
        """Returns the same without any Python, for another process."""
        files = self._chosen(epoch, place, policy, seed)
        if self._records is None:
            return self._in_order(files)
        return self._found(tf.data.Dataset.from_tensor_slices(self._rows(files)))

    def _chosen(self, epoch: int, place: Place, policy: Policy, seed: int | None) -> list[int]:
        sizes = self.facts.counts or self.facts.sizes or ()
        mine = range(len(self._paths)) if policy.files is None else policy.files[place.worker]
        files = [index for index in mine if sizes[index]]
        if seed is None:
            return files
        return [files[index] for index in permutation(len(files), seed, epoch)]

    def _rows(self, files: list[int]) -> np.ndarray:
        counts = self.facts.counts or ()
        ends = np.cumsum(counts)
        return np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in files])

    def _in_order(self, files: list[int]) -> tf.data.Dataset:
        paths = tf.data.Dataset.from_tensor_slices([self._paths[index] for index in files])
        return paths.interleave(
            lambda path: tf.data.TFRecordDataset(path, self._compression, 4 << 20),
            cycle_length=_INTERLEAVED,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data."""
        files = list(zip(map(_base, self._paths), self.facts.sizes or (), strict=True))
        return {
            "examples": self.facts.examples,
            "files": len(files),
            "names and sizes": zlib.crc32(repr(files).encode()),
            "bytes": sum(self.facts.sizes or ()),
        }


class DatasetSource:
    """A `tf.data.Dataset` of examples; one of batches is taken apart.

    Args:
        dataset: The dataset, the same on all workers.
        place: Which worker this is, of how many.
    """

    def __init__(self, dataset: tf.data.Dataset, place: Place):
        dataset, notes = single(dataset)
        self._dataset = dataset
        if _own_shard(dataset, place):
            # Others have other numbers of examples.
            notes += (f"the dataset holds shard({place.workers}, {place.worker}) already",)
            self.facts = Facts("dataset_fn", notes=notes)
            return
        known = int(dataset.cardinality())
        if known == 0:
            raise ConfigError("at least one example", "an empty dataset")
        if known == tf.data.INFINITE_CARDINALITY:
            notes += ("the dataset never ends: fit needs steps_per_epoch",)
        self.facts = Facts("dataset", examples=known if known > 0 else None, notes=notes)

    def examples(
        self, epoch: int, place: Place, policy: Policy, seed: int | None
    ) -> tf.data.Dataset:
        """Returns the examples that a worker reads in a pass."""
        return self._dataset

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data."""
        return {"examples": self.facts.examples, "of": repr(self._dataset.element_spec)}


class FunctionSource:
    """A function that gives each worker a dataset of its own examples.

    Args:
        function: Takes a `tf.distribute.InputContext` and returns a `tf.data.Dataset` that holds
            this worker's examples, or batches of them, which are taken apart.
    """

    facts = Facts("dataset_fn")

    def __init__(self, function: Callable[[Any], tf.data.Dataset]):
        self._function = function
        self._made: dict[Place, tf.data.Dataset] = {}

    def examples(
        self, epoch: int, place: Place, policy: Policy, seed: int | None
    ) -> tf.data.Dataset:
        """Returns the examples that a worker reads in a pass."""
        if place not in self._made:
            context = _Watched(place.workers, place.worker, place.workers * place.replicas)
            dataset = self._function(context)
            if not isinstance(dataset, tf.data.Dataset):
                raise ConfigError(
                    "a dataset function that returns a tf.data.Dataset",
                    f"one that returns a {type(dataset).__name__}",
                )
            if place.workers > 1 and not context.was_asked:
                raise ConfigError(
                    "a dataset function that gives each worker its own part, by "
                    "context.input_pipeline_id",
                    f"one that did not ask which of {place.workers} workers it is called for",
                    "add .shard(context.num_input_pipelines, context.input_pipeline_id), or pass "
                    "the dataset itself to tfdist.data.shard",
                )
            self._made[place], _ = single(dataset)
        return self._made[place]

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data: of a function there is little."""
        return {"function": getattr(self._function, "__name__", type(self._function).__name__)}


class GeneratorSource:
    """What a generator function yields, read anew in every pass.

    Args:
        make: Returns an iterable of examples, the same ones on all workers.
    """

    facts = Facts(
        "generator",
        notes=("what a generator yields can neither be counted nor skipped",),
    )

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make
        first = next(iter(make()), None)
        if first is None:
            raise ConfigError("at least one example", "a generator that yields none")
        self._signature = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)), example(first)
        )

    def examples(
        self, epoch: int, place: Place, policy: Policy, seed: int | None
    ) -> tf.data.Dataset:
        """Returns the examples of a pass."""

        def run() -> Iterator[Any]:
            for value in self._make():
                yield example(value)

        return tf.data.Dataset.from_generator(run, output_signature=self._signature)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data from other data: the first example is all there is."""
        return {"of": [f"{s.dtype.name}{list(s.shape)}" for s in tf.nest.flatten(self._signature)]}


class _Watched(tf.distribute.InputContext):  # type: ignore[misc]
    """A context that knows whether it was asked which worker it is for."""

    was_asked = False

    @property
    def input_pipeline_id(self) -> int:
        self.was_asked = True
        number: int = super().input_pipeline_id
        return number


#: Datasets that change neither the number of elements in a batch nor what an element is.
_PLAIN = ("Prefetch", "Options", "Take", "Skip", "Repeat", "Shuffle", "Cache", "Map", "Shard")


def single(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, tuple[str, ...]]:
    """Returns a dataset of single examples, and what was done about batches: sentences.

    Batches of a fixed size may as well be examples, pieces of a text for instance, and stay.

    Args:
        dataset: A dataset of examples or of batches.
    """
    if not _was_batched(dataset):
        return dataset, ()
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(dataset.element_spec)]
    if not all(shape is not None and shape.rank and shape[0] is None for shape in shapes):
        fixed = "batches of a fixed size in the dataset are taken as single examples"
        return dataset, (f"{fixed}; unbatch() it if they are not",)
    inner = dataset
    while "Prefetch" in type(inner).__name__:
        [inner] = inner._inputs()
    if type(inner).__name__ in ("_BatchDataset", "_ParallelBatchDataset"):
        [dataset] = inner._inputs()
    else:
        dataset = dataset.unbatch()
    return dataset, ("the dataset's own batches are taken apart and put together anew",)


def _was_batched(dataset: tf.data.Dataset) -> bool:
    while True:
        name = type(dataset).__name__
        if "Batch" in name and "Unbatch" not in name:
            return True
        inputs = dataset._inputs()
        if len(inputs) != 1 or not any(part in name for part in _PLAIN) or "FlatMap" in name:
            return False
        [dataset] = inputs


def _own_shard(dataset: tf.data.Dataset, place: Place) -> bool:
    """Whether a dataset holds `shard(workers, worker)` of this very worker."""
    waiting = [dataset] if place.workers > 1 else []
    while waiting:
        each = waiting.pop()
        waiting += each._inputs()
        if "ShardDataset" in type(each).__name__:
            found = int(each._num_shards), int(each._index)
            if found == (place.workers, place.worker):
                return True
    return False


def _base(path: str) -> str:
    return PurePath(path).name
