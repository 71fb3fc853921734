"""Arrays and bytes in one plain file, and back.

A file holds one value after the other, each at a multiple of 64 bytes, zeros between them, so that
it can be mapped into memory. What lies where is told by `Value` records, which a manifest keeps:

| kind | bytes in the file |
|---|---|
| `array` | elements in C order, little-endian |
| `strings` | lengths as `<u8`, then the elements of an array of `bytes` objects |
| `blob` | as they are |

Nothing in a file is ever executed or unpickled.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.state.filesystem import FileSystem
from tfdist.state.pace import PIECE

_ALIGNMENT = 64
#: NumPy's own kinds that are plain bytes: numbers, truth values, times, fixed-length text.
_PLAIN_KINDS = frozenset("biufcmMSU")
#: NumPy calls TensorFlow's small floats and integers by their names only.
_EXTENSION = "ml_dtypes"


@dataclasses.dataclass(frozen=True)
class Value:
    """Where one value lies in its file.

    Attributes:
        name: Its name.
        kind: "array", "strings" or "blob".
        dtype: NumPy's text for the elements of an array, or the name of a type of ml_dtypes.
        shape: Shape of the array.
        offset: First byte.
        size: Number of bytes.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file that is written, and what is in it.

    Attributes:
        name: Its name in the directory of the commit.
        size: Number of bytes.
        crc32: Checksum of all bytes (`zlib.crc32`).
        values: What it holds, in the order of the file.
    """

    name: str
    size: int
    crc32: int
    values: tuple[Value, ...] = ()


def write_values(
    files: FileSystem,
    path: str,
    name: str,
    arrays: Mapping[str, np.ndarray],
    blobs: Mapping[str, bytes],
    pace: Callable[[], None] | None = None,
) -> DataFile:
    """Writes `arrays` and `blobs` to the new file `path` and makes it durable.

    Args:
        files: The file system.
        path: The file.
        name: Name of the file for its record.
        arrays: Arrays by name; none is copied that is contiguous and little-endian.
        blobs: Bytes by name.
        pace: Called after each piece: see `tfdist.state.pace`.

    Raises:
        ConfigError: An array holds objects other than bytes.
        OSError: The file cannot be written.
    """
    values = []
    checksum = offset = unpaced = 0
    with files.create(path) as output:

        def append(data: memoryview) -> None:
            nonlocal checksum, offset, unpaced
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                # Both calls let the other threads run.
                checksum = zlib.crc32(piece, checksum)
                output.write(piece)
                offset += len(piece)
                unpaced += len(piece)
                if unpaced >= PIECE and pace is not None:
                    pace()
                    unpaced = 0

        for key, kind, dtype, shape, pieces in _encoded(arrays, blobs):
            append(memoryview(bytes(-offset % _ALIGNMENT)))
            start = offset
            for piece in pieces:
                append(piece)
            values.append(Value(key, kind, dtype, shape, start, offset - start))
    return DataFile(name, offset, checksum, tuple(values))


def read_values(
    buffer: np.ndarray, file: DataFile
) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
    """Returns the arrays and the blobs of a file.

    Args:
        buffer: All bytes of the file (uint8). The arrays are views of it.
        file: Its record.

    Raises:
        ValueError: The record does not fit.
        UnsupportedError: An element type needs the package ml_dtypes, which is missing.
    """
    arrays: dict[str, np.ndarray] = {}
    blobs: dict[str, bytes] = {}
    for value in file.values:
        if value.offset < 0 or value.size < 0 or value.offset + value.size > len(buffer):
            raise ValueError(f"{value.name!r} reaches beyond the end of {file.name}")
        part = buffer[value.offset : value.offset + value.size]
        if value.kind == "blob":
            blobs[value.name] = part.tobytes()
        elif value.kind == "strings":
            arrays[value.name] = _decode_strings(part, value)
        elif value.kind == "array":
            dtype = _dtype(value.dtype)
            if math.prod(value.shape) * dtype.itemsize != value.size:
                raise ValueError(f"{value.name!r} has {value.size} bytes for {value.shape}")
            arrays[value.name] = part.view(dtype).reshape(value.shape)
        else:
            raise ValueError(f"{value.name!r} is of the unknown kind {value.kind!r}")
    return arrays, blobs


_Encoded = tuple[str, str, str, tuple[int, ...], list[memoryview]]


def _encoded(arrays: Mapping[str, np.ndarray], blobs: Mapping[str, bytes]) -> Iterator[_Encoded]:
    for name, given in arrays.items():
        array = np.asarray(given)
        shape = array.shape
        if array.dtype.kind == "O":
            yield name, "strings", "bytes", shape, _encode_strings(name, array)
            continue
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        # Extension types offer no buffer of their own. Texts of length 0 have no bytes to view.
        flat = np.ascontiguousarray(array).reshape(-1)
        data = flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
        yield name, "array", _dtype_text(name, array.dtype), shape, [data.data]
    for name, blob in blobs.items():
        yield name, "blob", "", (), [memoryview(blob).cast("B") if blob else memoryview(b"")]


def _encode_strings(name: str, array: np.ndarray) -> list[memoryview]:
    elements = array.reshape(-1).tolist()
    for element in elements:
        if not isinstance(element, bytes):
            raise ConfigError(
                f"numbers or bytes in the array {name!r}",
                f"an object of type {type(element).__name__}",
                "convert it to an array of numbers, or text to bytes",
            )
    lengths = np.array([len(element) for element in elements], "<u8")
    return [lengths.view(np.uint8).data, memoryview(b"".join(elements))]


def _decode_strings(part: np.ndarray, value: Value) -> np.ndarray:
    count = math.prod(value.shape)
    if len(part) < 8 * count:
        raise ValueError(f"{value.name!r} is too short for {count} texts")
    lengths = part[: 8 * count].view("<u8").tolist()
    if 8 * count + sum(lengths) != len(part):
        raise ValueError(f"the texts of {value.name!r} have other lengths than it says")
    data = part[8 * count :].tobytes()
    array = np.empty(count, object)
    start = 0
    for index, length in enumerate(lengths):
        array[index] = data[start : start + length]
        start += length
    return array.reshape(value.shape)


def _dtype_text(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.type.__module__.partition(".")[0] == _EXTENSION:
        return dtype.name
    if dtype.kind in _PLAIN_KINDS:
        return dtype.str
    raise ConfigError(
        f"numbers or bytes in the array {name!r}", f"dtype {dtype}", "convert it to numbers"
    )


def _dtype(text: str) -> np.dtype[Any]:
    if not text.isidentifier():
        dtype = np.dtype(text)
        if dtype.kind not in _PLAIN_KINDS or dtype.hasobject:
            raise ValueError(f"elements of type {text!r}")
        return dtype
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedError(
            f"the package ml_dtypes, for elements of type {text}",
            "it is not installed",
            "pip install ml_dtypes",
        ) from error
    scalar = getattr(ml_dtypes, text, None)
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic):
        raise ValueError(f"elements of type {text!r}")
    return np.dtype(scalar)
