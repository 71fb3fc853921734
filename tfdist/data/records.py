"""TFRecord files whose records can be read in any order: an index of where each begins.

A record is its length (8 bytes), a checksum of that (4), the data, and a checksum of the data (4).
The lengths alone lead from record to record, so an index is made without reading the data, and
kept on disk (`TFDIST_CACHE`, by default `~/.cache/tfdist`) where making it takes a while.

Source: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tfdist.errors import ConfigError

_HEADER, _FOOTER = 12, 4
_LENGTH = struct.Struct("<Q")
#: Indices of files with fewer records are made again, which takes some milliseconds.
_WORTH_KEEPING = 50_000
_OPEN_FILES = 256


def offsets(path: str) -> np.ndarray:
    """Returns where each record of a file begins, and where the last one ends: int64 [records + 1].

    Args:
        path: A local TFRecord file that is not compressed; it may be empty.

    Raises:
        ConfigError: The file is no such file, or ends in the middle of a record.
    """
    facts = os.stat(path)
    name = hashlib.sha256(
        f"{os.path.abspath(path)}/{facts.st_size}/{facts.st_mtime_ns}".encode()
    ).hexdigest()
    kept = _cache() / "records" / f"{name[:32]}.npy"
    with contextlib.suppress(OSError, ValueError):
        found: np.ndarray = np.load(kept, mmap_mode="r", allow_pickle=False)
        return found
    found = _scanned(path, facts.st_size)
    if len(found) > _WORTH_KEEPING:
        with contextlib.suppress(OSError):
            _keep(kept, found)
    return found


def _scanned(path: str, size: int) -> np.ndarray:
    begins = array("q", [0])
    if not size:
        return np.frombuffer(begins, np.int64)
    position = 0
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        while position < size:
            end = size + 1
            if position + _HEADER <= size:
                end = position + _HEADER + _LENGTH.unpack_from(data, position)[0] + _FOOTER
            if end > size:
                raise ConfigError(
                    "TFRecord files that are whole",
                    f"{path}, whose record {len(begins) - 1} at byte {position} would end after "
                    f"the {size} bytes of the file",
                    "write the file again; if it is compressed, pass compression='GZIP' or 'ZLIB'",
                )
            begins.append(end)
            position = end
    return np.frombuffer(begins, np.int64)


def _cache() -> Path:
    return Path(os.environ.get("TFDIST_CACHE") or Path.home() / ".cache" / "tfdist")


def _keep(path: Path, index: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, index)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class Records:
    """The records of local TFRecord files, numbered from file to file.

    Args:
        paths: The files.
        ranges: First record of each file and the one to end before; None: all.
    """

    def __init__(self, paths: Sequence[str], ranges: Sequence[tuple[int, int]] | None = None):
        self._paths = list(paths)
        self._offsets = [offsets(path) for path in paths]
        if ranges is not None:
            pairs = zip(self._offsets, ranges, strict=True)
            self._offsets = [index[first : last + 1] for index, (first, last) in pairs]
        #: Records of each file.
        self.counts = tuple(len(index) - 1 for index in self._offsets)
        self._ends = np.cumsum(self.counts)
        self._descriptors: dict[int, int] = {}

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    def begins(self) -> np.ndarray:
        """Returns where in its file each record begins, int64 [records]."""
        return np.concatenate([index[:-1] for index in self._offsets])

    def read(self, rows: np.ndarray) -> list[bytes]:
        """Returns records, given their numbers."""
        files = np.searchsorted(self._ends, rows, side="right")
        return [self._read(int(file), int(row)) for file, row in zip(files, rows, strict=True)]

    def _read(self, file: int, row: int) -> bytes:
        index = self._offsets[file]
        place = row - int(self._ends[file]) + self.counts[file]
        begin = int(index[place]) + _HEADER
        size = int(index[place + 1]) - _FOOTER - begin
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            descriptor = os.open(self._paths[file], os.O_RDONLY)
            if len(self._descriptors) >= _OPEN_FILES:
                try:
                    return _whole(descriptor, size, begin)
                finally:
                    os.close(descriptor)
            other = self._descriptors.setdefault(file, descriptor)
            if other != descriptor:
                os.close(descriptor)
                descriptor = other
        return _whole(descriptor, size, begin)


def _whole(descriptor: int, size: int, begin: int) -> bytes:
    data = os.pread(descriptor, size, begin)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), begin + len(data))
        if not more:
            raise OSError(f"a file ended at byte {begin + len(data)}, within a record")
        data += more
    return data
