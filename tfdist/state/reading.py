"""Reads the files of a commit, each compared with its checksum."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdist.state import facts as plain_facts
from tfdist.state.fence import CommitName
from tfdist.state.filesystem import CHUNK
from tfdist.state.filesystem import FileSystem
from tfdist.state.manifest import FACTS
from tfdist.state.manifest import MANIFEST
from tfdist.state.manifest import Manifest
from tfdist.state.values import DataFile
from tfdist.state.values import read_values


@dataclasses.dataclass(frozen=True)
class Part:
    """What one file of a commit holds."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    blobs: dict[str, bytes] = dataclasses.field(default_factory=dict)


def describe(files: FileSystem, path: str, name: str) -> DataFile:
    """Reads a file once and returns its size and checksum."""
    size = checksum = 0
    for piece in files.chunks(path):
        size += len(piece)
        checksum = zlib.crc32(piece, checksum)
    return DataFile(name, size, checksum)


def verified(
    files: FileSystem, directory: str, name: CommitName, mapped: bool | None
) -> Iterator[Part]:
    """Gives what the files of a commit hold, one after the other, once each was compared.

    Args:
        files: The file system.
        directory: Directory of the commit.
        name: What its manifest has to say that it is.
        mapped: True maps local files into memory, False reads them, None only compares.

    Raises:
        ValueError: A file is missing, or not as it was written.
        OSError: A file cannot be read.
    """
    manifest = _manifest(files, directory)
    said = CommitName(manifest.incarnation, manifest.number, manifest.step)
    if said != name:
        raise ValueError(f"its {MANIFEST} belongs to {said.text}")
    if FACTS not in manifest.files:
        raise ValueError(f"its {MANIFEST} names no {FACTS}")
    # All sizes first: what is truncated need not be read.
    for file in manifest.files.values():
        try:
            size = files.size(os.path.join(directory, file.name))
        except FileNotFoundError:
            raise ValueError(f"{file.name} is missing") from None
        if size != file.size:
            raise ValueError(f"{file.name} has {size} bytes instead of {file.size}")
    for file in manifest.files.values():
        path = os.path.join(directory, file.name)
        if mapped is None or not (file.values or file.name == FACTS):
            _compare(describe(files, path, file.name), file)
            continue
        buffer = _map(path, file) if mapped and files.is_local else _load(files, path, file)
        if file.name == FACTS:
            yield Part(facts=plain_facts.from_bytes(buffer.tobytes()))
        else:
            arrays, blobs = read_values(buffer, file)
            yield Part(arrays=arrays, blobs=blobs)


def _manifest(files: FileSystem, directory: str) -> Manifest:
    try:
        return Manifest.from_bytes(files.read(os.path.join(directory, MANIFEST)))
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing: it was never complete") from None


def _load(files: FileSystem, path: str, file: DataFile) -> np.ndarray:
    buffer = np.empty(file.size, np.uint8)
    size = checksum = 0
    for piece in files.chunks(path):
        if size + len(piece) > file.size:
            raise ValueError(f"{file.name} is longer than {file.size} bytes")
        buffer[size : size + len(piece)] = np.frombuffer(piece, np.uint8)
        size += len(piece)
        checksum = zlib.crc32(piece, checksum)
    _compare(DataFile(file.name, size, checksum), file)
    return buffer


def _map(path: str, file: DataFile) -> np.ndarray:
    if not file.size:
        return np.empty(0, np.uint8)
    buffer = np.asarray(np.memmap(path, np.uint8, "r"))
    checksum = 0
    for start in range(0, len(buffer), CHUNK):
        checksum = zlib.crc32(buffer[start : start + CHUNK].data, checksum)
    _compare(DataFile(file.name, len(buffer), checksum), file)
    return buffer


def _compare(found: DataFile, written: DataFile) -> None:
    if (found.size, found.crc32) != (written.size, written.crc32):
        raise ValueError(f"{written.name} is damaged: its checksum or size is wrong")
