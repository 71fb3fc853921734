"""What a commit consists of: the file `manifest.json`, the last that is written.

    {"crc32": 1234, "manifest": {"format": "tfdist-commit", "version": 1, "step": 12, ...}}

The manifest lists every other file with its size and checksum, and what lies where in it. Its own
checksum is that of its compact JSON text with sorted keys. A name in it is a plain file name: it
cannot lead out of the directory.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from typing import Any

from tfdist.state.values import DataFile
from tfdist.state.values import Value

MANIFEST = "manifest.json"
FACTS = "facts.json"
_FORMAT = "tfdist-commit"
_VERSION = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of one commit.

    Attributes:
        step: Number of training steps that are in it.
        incarnation: Which start of the program wrote it.
        number: The how manieth commit of that incarnation it is, from 1.
        files: All files but the manifest, by name.
    """

    step: int
    incarnation: int
    number: int
    files: dict[str, DataFile]

    def to_bytes(self) -> bytes:
        """Returns the text of the file."""
        body = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "incarnation": self.incarnation,
            "number": self.number,
            "files": {name: file_record(file) for name, file in self.files.items()},
        }
        return _text({"crc32": _checksum(body), "manifest": body})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads the text of the file.

        Raises:
            ValueError: It is not a manifest of this format, or damaged.
        """
        if not data:
            raise ValueError(f"{MANIFEST} is empty")
        try:
            outer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{MANIFEST} is damaged: {error}") from error
        body = outer.get("manifest") if isinstance(outer, dict) else None
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise ValueError(f"{MANIFEST} is not one of tfdist")
        if body.get("version") != _VERSION:
            raise ValueError(f"{MANIFEST} is of version {body.get('version')!r}, not {_VERSION}")
        if outer.get("crc32") != _checksum(body) or data != _text(outer):
            raise ValueError(f"{MANIFEST} is damaged: its checksum is wrong")
        try:
            files = {name: read_record(name, file) for name, file in body["files"].items()}
            step, incarnation, number = (
                _natural(body[key]) for key in ("step", "incarnation", "number")
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{MANIFEST} is not well formed: {error!r}") from error
        return cls(step, incarnation, number, files)


def is_file_name(name: object) -> bool:
    """Whether `name` may be that of a file in a commit: no directories, nothing hidden."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None and name != MANIFEST


def file_record(file: DataFile) -> dict[str, Any]:
    """Returns what the manifest says of a file."""
    record: dict[str, Any] = {"size": file.size, "crc32": file.crc32}
    if file.values:
        record["values"] = [
            [value.name, value.kind, value.dtype, list(value.shape), value.offset, value.size]
            for value in file.values
        ]
    return record


def read_record(name: str, record: dict[str, Any]) -> DataFile:
    """Reads what `file_record` wrote.

    Raises:
        ValueError: It is not well formed, or the name leads out of the directory.
        KeyError, TypeError: It is not well formed.
    """
    if not is_file_name(name):
        raise ValueError(f"no file of a commit can have the name {name!r}")
    values = []
    for key, kind, dtype, shape, offset, size in record.get("values", ()):
        if not isinstance(key, str) or not isinstance(kind, str) or not isinstance(dtype, str):
            raise TypeError(f"names of {key!r}")
        dimensions = tuple(_natural(length) for length in shape)
        values.append(Value(key, kind, dtype, dimensions, _natural(offset), _natural(size)))
    return DataFile(name, _natural(record["size"]), _natural(record["crc32"]), tuple(values))


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"a natural number, not {value!r}")
    return value


def _text(outer: dict[str, Any]) -> bytes:
    return json.dumps(outer, indent=1).encode()


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
