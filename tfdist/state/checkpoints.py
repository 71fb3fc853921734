"""Checkpoints in a directory: which there are, how far training was, and how to load one.

| written by | found as |
|---|---|
| `keras.callbacks.ModelCheckpoint` | `*.weights.h5`, `*.keras`; the epoch is read from the name |
| `keras.callbacks.BackupAndRestore` | `latest.weights.h5` beside `training_metadata.json` |
| `tf.train.CheckpointManager` | what its file `checkpoint` names; the number is the step |

A file that is written again under the same name is a new checkpoint. Hidden files are none: those
who write atomically prepare them so.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import os
import re
import string
import time
import warnings
import zipfile
from typing import Any

log = logging.getLogger("absl")

_SUFFIXES = (".weights.h5", ".keras")
_INDEX = ".index"
_METADATA = "training_metadata.json"
_METADATA_SECONDS = 5.0
#: Keras's optimizers keep their counter first.
_ITERATIONS = "optimizer/vars/0"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One version of one file.

    Attributes:
        path: Path of the file, or prefix of the files of a TensorFlow checkpoint.
        version: Text that changes when the file is written again.
        modified: When it was written, in nanoseconds since 1970.
        epoch: Epochs that were complete, where name or metadata tell it.
        number: Number in the name of a TensorFlow checkpoint.
    """

    path: str
    version: str
    modified: int
    epoch: int | None = None
    number: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all other checkpoints, also in another process."""
        return os.path.basename(self.path), self.version

    def is_current(self) -> bool:
        """Whether the file still is this version."""
        return _stamp(_file_of(self.path)) == (self.modified, self.version)


class Folder:
    """The checkpoints below one directory, or those that match a pattern.

    Args:
        path: A directory; or the path of a file, in which fields such as `{epoch:02d}` stand for
            what the writer puts there.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        self._is_pattern = self._path.endswith(_SUFFIXES)
        self._regex = _regex(self._path) if self._is_pattern else None

    @property
    def directory(self) -> str:
        """The directory, as far as its name is the same for all checkpoints."""
        if not self._is_pattern:
            return self._path
        fixed = self._path.partition("{")[0]
        return os.path.dirname(fixed) or "."

    def find(self) -> list[Checkpoint]:
        """Returns all checkpoints, oldest first."""
        found = [self._describe(path) for path in self._paths()]
        return sorted(
            (checkpoint for checkpoint in found if checkpoint is not None),
            key=lambda checkpoint: (checkpoint.modified, checkpoint.path),
        )

    def _paths(self) -> list[str]:
        if self._is_pattern:
            return glob.glob(_glob(self._path))
        files = glob.glob(os.path.join(glob.escape(self._path), "*"))
        paths = [path for path in files if path.endswith(_SUFFIXES)]
        # An index is written before the file `checkpoint` names it, and then it is complete.
        named = _named_by_manager(self._path)
        return paths + [path.removesuffix(_INDEX) for path in files if path in named]

    def _describe(self, path: str) -> Checkpoint | None:
        stamp = _stamp(_file_of(path))
        if stamp is None:
            return None
        modified, version = stamp
        epoch = number = None
        if self._regex is not None:
            match = self._regex.fullmatch(path)
            if match is None:
                return None
            epoch = match.groupdict().get("epoch")
        elif not path.endswith(_SUFFIXES):
            digits = re.search(r"-(\d+)$", path)
            number = int(digits[1]) if digits else None
        elif os.path.basename(path) == "latest.weights.h5":
            epoch = _epoch_of_backup(os.path.dirname(path), modified)
            if epoch is None and time.time() - modified / 1e9 < _METADATA_SECONDS:
                return None  # The metadata are on their way.
        return Checkpoint(path, version, modified, None if epoch is None else int(epoch), number)


def load(model: Any, checkpoint: Checkpoint, into: Any = None) -> int | None:
    """Loads the weights into `model`.

    Args:
        model: A Keras model that is built.
        checkpoint: What to load.
        into: The `tf.train.Checkpoint` that a TensorFlow checkpoint was written from; by default
            one that holds the model as `model`.

    Returns:
        The optimizer's number of updates at that time, None where the file does not tell it.

    Raises:
        Exception: The file is not complete, has vanished, or does not fit the model.
    """
    if checkpoint.path.endswith(_SUFFIXES):
        with warnings.catch_warnings():
            # The optimizer's own variables, which nobody needs here.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            model.load_weights(checkpoint.path)
        return _iterations(checkpoint.path)
    import tensorflow as tf

    target = tf.train.Checkpoint(model=model) if into is None else into
    status = target.read(checkpoint.path).expect_partial()
    # A checkpoint of other objects restores nothing, without a word.
    status.assert_nontrivial_match()
    return checkpoint.number


def _iterations(path: str) -> int | None:
    import h5py  # type: ignore[import-untyped]

    try:
        if path.endswith(".keras"):
            with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as member:
                with h5py.File(member, "r") as file:
                    return _counter(file)
        with h5py.File(path, "r") as file:
            return _counter(file)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def _counter(file: Any) -> int | None:
    counter = file.get(_ITERATIONS)
    is_number = counter is not None and counter.shape == () and counter.dtype.kind in "iu"
    return int(counter[()]) if is_number else None


def _file_of(path: str) -> str:
    return path if path.endswith(_SUFFIXES) else path + _INDEX


def _stamp(path: str) -> tuple[int, str] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, f"{status.st_mtime_ns}-{status.st_size}"


def _named_by_manager(directory: str) -> set[str]:
    """Returns the index files that the manager's own file, `checkpoint`, names."""
    try:
        with open(os.path.join(directory, "checkpoint"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeError):
        return set()
    found = (re.fullmatch(r'all_model_checkpoint_paths: "(.*)"', line) for line in lines)
    return {os.path.join(directory, match[1]) + _INDEX for match in found if match}


def _epoch_of_backup(directory: str, modified: int) -> int | None:
    path = os.path.join(directory, _METADATA)
    try:
        # Written after the weights: older metadata belong to older weights.
        if os.stat(path).st_mtime_ns < modified:
            return None
        with open(path, encoding="utf-8") as file:
            return int(json.load(file)["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _regex(pattern: str) -> re.Pattern[str]:
    parts, named = [], False
    for literal, field, _, _ in string.Formatter().parse(pattern):
        parts.append(re.escape(literal))
        if field == "epoch" and not named:
            parts.append(r"(?P<epoch>\d+)")
            named = True
        elif field is not None:
            parts.append(r"[^/]+?")
    return re.compile("".join(parts))


def _glob(pattern: str) -> str:
    parts = []
    for literal, field, _, _ in string.Formatter().parse(pattern):
        parts.append(glob.escape(literal))
        if field is not None:
            parts.append("*")
    return "".join(parts)
