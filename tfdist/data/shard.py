"""`shard` and `explain`: what users call."""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.data.indexed import ArraySource
from tfdist.data.indexed import SequenceSource
from tfdist.data.parts import Maps
from tfdist.data.parts import Place
from tfdist.data.policy import POLICIES
from tfdist.data.report import report
from tfdist.data.service import service_of
from tfdist.data.sharded import BUFFER
from tfdist.data.sharded import REMAINDERS
from tfdist.data.sharded import Sharded
from tfdist.data.sources import DatasetSource
from tfdist.data.sources import FunctionSource
from tfdist.data.sources import GeneratorSource
from tfdist.data.sources import RecordSource
from tfdist.data.tfds import tfds_source
from tfdist.data.world import workers_here
from tfdist.errors import ConfigError


def shard(
    source: Any,
    *,
    global_batch_size: int,
    shuffle: bool | str = False,
    seed: int | None = None,
    policy: str = "auto",
    remainder: str = "pad",
    parse: Callable[..., Any] | None = None,
    map: Callable[..., Any] | None = None,
    map_batch: Callable[..., Any] | None = None,
    shuffle_buffer: int = BUFFER,
    compression: str | None = None,
    service: bool | int | str | Sequence[str] | None = None,
) -> Sharded:
    """Makes data that the workers of a job read together, every example once in a pass.

    Every worker calls it alike and gives the result to `fit`, `evaluate` or `predict`.

    Args:
        source: One of
            arrays: a NumPy array, a tensor, a pandas frame or series, a tuple or dict of those;
            a sequence: anything with `__len__` and `__getitem__` that gives single examples;
            a `tf.data.Dataset` of single examples (one of batches, the last of which may be
            smaller, is taken apart);
            a function of a `tf.distribute.InputContext` that returns a dataset with the part of
            `context.input_pipeline_id`; a function of nothing that returns a dataset, or a
            generator that begins anew;
            patterns of TFRecord files: text or a list, local or `gs://`;
            "tfds:NAME/SPLIT": a data set of `tensorflow_datasets`, as pairs to train on where it
            has such.
        global_batch_size: Examples of a batch over all replicas of all workers.
        shuffle: True: in a new order in every pass. "batch": runs of `global_batch_size` neighbours
            stay together (arrays and sequences only).
        seed: What the orders are drawn from; None: a new one for every run, that workers share and
            that a saved position holds.
        policy: "auto", "example" or "file"; see `tfdist.data.policy`.
        remainder: What becomes of a last batch that is not full. "pad": it is filled, and a mask
            tells what is real; in `fit` every example counts once. "partial": it stays smaller.
            "drop": it is left out.
        parse: For files: makes an example of a record (a string scalar), on its worker only.
        map: Applied to each example, on its worker only, in parallel, after `parse`.
        map_batch: Applied to the examples that a worker has of a batch, all at once, after `map`.
        shuffle_buffer: Examples to choose from in sources that can only be read in order.
        compression: Of the files: "GZIP" or "ZLIB"; None: as they look.
        service: Whether other processes make the batches, the same ones in the same order, by
            `tf.data` service. True: those that `tfdist run --data-workers N` has started, or else
            one that this process starts; a number: so many. "host:port,host:port": those of
            `tfdist data-service`, on any hosts. Where it cannot be, because Python code makes the
            examples, they are made here, and a warning says so.

    Raises:
        ConfigError: An argument cannot be right, or the source cannot be split.

    Example:
        >>> data = shard((x, y), global_batch_size=64, shuffle=True, seed=1)
        >>> model.fit(data, epochs=3)
    """
    if not isinstance(global_batch_size, numbers.Integral) or global_batch_size < 1:
        raise ConfigError("a global_batch_size of at least 1", repr(global_batch_size))
    if remainder not in REMAINDERS:
        raise ConfigError(f"a remainder out of {', '.join(REMAINDERS)}", repr(remainder))
    if policy not in POLICIES:
        raise ConfigError(f"a policy out of {', '.join(POLICIES)}", repr(policy))
    if shuffle not in (True, False, "batch"):
        raise ConfigError("shuffle=True, False or 'batch'", repr(shuffle))
    if seed is not None and (not isinstance(seed, numbers.Integral) or seed < 0):
        raise ConfigError("a seed that is a whole number and not negative", repr(seed))
    found, first = _source(source, compression)
    if parse is not None and found.facts.kind != "records":
        raise ConfigError(
            "files where there is parse=", type(source).__name__, "pass the function as map="
        )
    if shuffle == "batch" and not found.facts.is_indexed:
        raise ConfigError(
            "arrays, a sequence or local files with shuffle='batch'",
            f"a source of the kind {found.facts.kind!r}",
            "pass shuffle=True",
        )
    functions = [function for function in (parse or first, map) if function is not None]
    maps = Maps(tuple(functions), () if map_batch is None else (map_batch,))
    processes = service_of(service, os.environ)
    data = Sharded(
        found,
        maps,
        batch_size=int(global_batch_size),
        shuffle=shuffle,
        seed=None if seed is None else int(seed),
        policy=policy,
        remainder=remainder,
        buffer=shuffle_buffer,
        service=processes,
    )
    data.policy_for(workers_here()[0])  # What cannot be split is refused here.
    if processes is not None and not data.why_no_service:
        processes.start()  # They import TensorFlow while the model is built.
    return data


def explain(data: Sharded, workers: int | None = None) -> str:
    """Prints, and returns, how data is split over workers, and why.

    Args:
        data: What `shard` has returned.
        workers: Number of workers; None: those of this job.
    """
    if not isinstance(data, Sharded):
        raise ConfigError(
            "what tfdist.data.shard has returned",
            type(data).__name__,
            "explain(tfdist.data.shard(data, global_batch_size=...))",
        )
    text = report(data, workers_here()[0] if workers is None else workers)
    print(text)
    return text


def _source(source: Any, compression: str | None) -> tuple[Any, Callable[..., Any] | None]:
    """Returns the source, and what makes examples of its records if it knows that itself."""
    if isinstance(source, Sharded):
        raise ConfigError("data that is not sharded yet", "what tfdist.data.shard has returned")
    if _is_paths(source):
        if isinstance(source, str) and source.startswith("tfds:"):
            return tfds_source(source.removeprefix("tfds:"))
        paths = [source] if isinstance(source, (str, os.PathLike)) else source
        return _files([os.fspath(path) for path in paths], compression), None
    if isinstance(source, tf.distribute.DistributedDataset):
        raise ConfigError(
            "a dataset that is not distributed yet",
            "a tf.distribute.DistributedDataset",
            "pass what it was made from, or give it to fit as it is",
        )
    if isinstance(source, tf.data.Dataset):
        workers, worker = workers_here()
        return DatasetSource(source, Place(workers, worker)), None
    if _is_batches(source):
        raise ConfigError(
            "a source of single examples",
            f"a {type(source).__name__}, which gives batches",
            "pass it to fit as it is, or a sequence that gives one example for a number",
        )
    if _is_arrays(source):
        return ArraySource(_frames(source)), None
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return SequenceSource(source), None
    if callable(source):
        return _function(source), None
    return _iterable(source), None


def _files(patterns: list[str], compression: str | None) -> RecordSource:
    if not patterns:
        raise ConfigError("at least one pattern of files", "an empty list")
    paths: list[str] = []
    for pattern in patterns:
        found = sorted(tf.io.gfile.glob(pattern))
        if not found:
            raise ConfigError("patterns of files that are there", f"{pattern!r}, which none fits")
        paths += found
    unique = list(dict.fromkeys(paths))
    notes: tuple[str, ...] = ()
    if len(unique) < len(paths):
        notes = (f"{len(paths) - len(unique)} files fit several patterns and are read once",)
    if compression is None:
        compression = _compression(unique)
    return RecordSource(unique, compression, notes=notes)


def _compression(paths: list[str]) -> str:
    """Returns "GZIP" if the first file that is not empty begins like one."""
    for path in paths:
        with tf.io.gfile.GFile(path, "rb") as file:
            begin = file.read(2)
        if begin:
            return "GZIP" if begin == b"\x1f\x8b" else ""
    return ""


def _function(function: Callable[..., Any]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (0, 1)]
    if needed:
        return FunctionSource(function)
    made = function()
    if isinstance(made, tf.data.Dataset):
        workers, worker = workers_here()
        return DatasetSource(made, Place(workers, worker))
    if hasattr(made, "__iter__"):
        return GeneratorSource(function)
    raise ConfigError(
        "a function that returns a tf.data.Dataset or a generator",
        f"one that returns a {type(made).__name__}",
    )


def _iterable(source: Any) -> GeneratorSource:
    if not hasattr(source, "__iter__"):
        raise ConfigError(
            "arrays, a sequence, a tf.data.Dataset, a function, files or a tfds name",
            type(source).__name__,
        )
    if iter(source) is source:
        raise ConfigError(
            "a source that can be read again in every pass",
            f"a {type(source).__name__}, which is used up by the first",
            "pass the function that makes it: shard(make, ...), not shard(make(), ...)",
        )
    return GeneratorSource(lambda: iter(source))


def _is_paths(source: Any) -> bool:
    if isinstance(source, (str, Path, os.PathLike)):
        return True
    is_list = isinstance(source, (list, tuple)) and len(source) > 0
    return is_list and all(isinstance(each, (str, os.PathLike)) for each in source)


def _is_batches(source: Any) -> bool:
    return any(c.__name__ in ("PyDataset", "DataLoader") for c in type(source).__mro__)


def _is_arrays(source: Any) -> bool:
    if isinstance(source, tuple):
        return bool(source) and all(each is None or _is_arrays(each) for each in source)
    if isinstance(source, dict):
        return bool(source) and all(map(_is_arrays, source.values()))
    if isinstance(source, tf.SparseTensor):
        raise ConfigError(
            "dense or ragged tensors",
            "a tf.SparseTensor",
            "pass tf.data.Dataset.from_tensor_slices(...) of it",
        )
    return tf.is_tensor(source) or hasattr(source, "__array__") or hasattr(source, "to_numpy")


def _frames(source: Any) -> Any:
    """Returns `source` with frames of columns that are not all numbers as dicts of columns."""
    if isinstance(source, tuple):
        return tuple(map(_frames, source))
    if isinstance(source, dict):
        return {key: _frames(value) for key, value in source.items()}
    if hasattr(source, "columns") and hasattr(source, "dtypes"):
        kinds = {getattr(dtype, "kind", "O") for dtype in source.dtypes}
        if not kinds <= set("biuf"):
            return {str(name): source[name] for name in source.columns}
    return source
