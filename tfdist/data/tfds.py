"""Data sets of `tensorflow_datasets`, whose files already say how many examples they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.data.indexed import SequenceSource
from tfdist.data.sources import RecordSource
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError


def tfds_source(name: str) -> tuple[Any, Callable[..., Any] | None]:
    """Returns a source, and what makes an example of its records.

    Args:
        name: NAME/SPLIT as in "mnist/train"; NAME may have a config and a version, SPLIT a part:
            "glue/cola:2.0.0/train[:80%]". It is downloaded if it is not there yet; TFDS_DATA_DIR
            says where it is.

    Raises:
        UnsupportedError: tensorflow_datasets is not installed.
        ConfigError: There is no such split.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UnsupportedError(
            "tensorflow_datasets for a source of the form 'tfds:NAME/SPLIT'",
            str(error),
            "pip install 'tensorflow-datasets>=4.9.10' 'importlib_resources>=5.0'",
        ) from error
    name, slash, split = name.rpartition("/")
    if not slash:
        raise ConfigError("a name and a split, as in 'tfds:mnist/train'", f"'tfds:{split}'")
    builder = tfds.builder(name)
    builder.download_and_prepare()
    known = builder.info.splits
    if split.split("[")[0] not in known:
        raise ConfigError(f"a split of {name}: {', '.join(known)}", repr(split))
    keys = builder.info.supervised_keys
    features = builder.info.features
    if str(builder.info.file_format).rpartition(".")[2].upper() != "TFRECORD":
        return SequenceSource(builder.as_data_source(split)), _pairs(keys)
    parts = known[split].file_instructions
    ranges = []
    for each in parts:
        last = each.examples_in_shard if each.take == -1 else each.skip + each.take
        ranges.append((each.skip, last))
    source = RecordSource([str(each.filename) for each in parts], ranges=ranges)
    pairs = _pairs(keys)

    def parse(record: Any) -> Any:
        example = features.deserialize_example(record)
        return example if pairs is None else pairs(example)

    return source, parse


def _pairs(keys: Any) -> Callable[..., Any] | None:
    """Returns a function that makes the pair to train on of an example, if there is one."""
    if not keys or not all(isinstance(key, str) for key in keys):
        return None
    return lambda example: tuple(example[key] for key in keys)
