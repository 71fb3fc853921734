"""A state of training, a commit of it, and a commit that is being written."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.errors import ConfigError
from tfdist.errors import StoreError
from tfdist.state import facts as plain_facts
from tfdist.state import reading
from tfdist.state.fence import explained
from tfdist.state.filesystem import FileSystem
from tfdist.state.filesystem import file_system
from tfdist.state.manifest import FACTS
from tfdist.state.manifest import MANIFEST
from tfdist.state.manifest import Manifest
from tfdist.state.manifest import file_record
from tfdist.state.manifest import is_file_name
from tfdist.state.manifest import read_record
from tfdist.state.values import DataFile
from tfdist.state.values import write_values

_MAIN_FILE = "main.bin"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state of training.

    Attributes:
        step: Number of training steps that are in it.
        facts: Anything that JSON can say: epoch, position, history, topology.
        arrays: Values of variables by name, of any shape and any type of TensorFlow's; strings are
            arrays of `bytes` objects.
        blobs: Bytes by name.
    """

    step: int
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    blobs: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Commit:
    """A commit that was written.

    Attributes:
        step: Number of training steps that are in it.
        incarnation: Which start of the program wrote it.
        number: Commits of that incarnation are counted from 1.
        directory: Where it is.
    """

    step: int
    incarnation: int
    number: int
    directory: str

    @property
    def name(self) -> str:
        """The name of its directory."""
        return os.path.basename(self.directory)

    def path(self, name: str) -> str:
        """Returns the path of one of its files."""
        return os.path.join(self.directory, _file_name(name))


def write_part(
    directory: str,
    part: str,
    arrays: Mapping[str, np.ndarray],
    blobs: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Writes this process's values into a commit that another process has opened.

    Args:
        directory: The opened commit's `directory`.
        part: A name that no other part of this commit has, for example "ps-0".
        arrays: As in `Snapshot`; no name may be in another part too.
        blobs: As in `Snapshot`.

    Returns:
        What to give to `OpenCommit.add_part` in that process; JSON can carry it.

    Raises:
        StoreError: It cannot be written.
    """
    name = _file_name(f"{part}.bin")
    path = os.path.join(directory, name)
    try:
        file = write_values(file_system(directory), path, name, arrays, blobs or {})
    except OSError as error:
        raise explained(error, f"write the part {part!r} of a commit", directory) from error
    return {"name": name, **file_record(file)}


class OpenCommit:
    """A commit that is being written.

    Attributes:
        directory: Where its files belong until it is complete.
        result: What it is once it is complete.
    """

    def __init__(self, files: FileSystem, directory: str, result: Commit):
        self.directory = directory
        self.result = result
        self._files = files
        self._contents: dict[str, DataFile] = {}
        self._facts: dict[str, Any] = {}

    def path(self, name: str) -> str:
        """Returns where another program or process puts its file `name`; see `add_file`."""
        return os.path.join(self.directory, _file_name(name))

    def write(
        self,
        facts: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        blobs: Mapping[str, bytes] | None = None,
        *,
        pace: Callable[[], None] | None = None,
    ) -> None:
        """Writes this process's values; once per commit.

        Args:
            facts: As in `Snapshot`.
            arrays: As in `Snapshot`; they must not change meanwhile.
            blobs: As in `Snapshot`.
            pace: Called now and then, to write no faster than it returns.
        """
        self._facts.update(facts or {})
        if arrays or blobs:
            path = self.path(_MAIN_FILE)
            file = write_values(self._files, path, _MAIN_FILE, arrays or {}, blobs or {}, pace)
            self._add(file)
        if pace is not None:
            pace()

    def add_part(self, part: Mapping[str, Any]) -> None:
        """Makes what `write_part` returned in another process a part of this commit."""
        record = dict(part)
        file = read_record(_file_name(record.pop("name", "")), record)
        size = self._files.size(self.path(file.name))
        if size != file.size:
            raise StoreError(
                f"the part {file.name} of {file.size} bytes in {self.directory}",
                f"{size} bytes",
                "give write_part's result to add_part once the part is complete",
            )
        self._add(file)

    def add_file(self, name: str) -> None:
        """Makes a file that lies at `path(name)` and is complete a part of this commit.

        It is read once, for its checksum. Readers find it at `Commit.path(name)`.
        """
        self._add(reading.describe(self._files, self.path(name), _file_name(name)))

    def seal(self) -> None:
        """Writes the facts and the manifest; done by the store."""
        text = plain_facts.to_bytes(self._facts)
        path = os.path.join(self.directory, FACTS)
        with self._files.create(path) as output:
            output.write(memoryview(text))
        self._add(DataFile(FACTS, len(text), zlib.crc32(text)))
        commit = self.result
        manifest = Manifest(commit.step, commit.incarnation, commit.number, dict(self._contents))
        with self._files.create(os.path.join(self.directory, MANIFEST)) as output:
            output.write(memoryview(manifest.to_bytes()))
        self._files.sync(self.directory)

    def _add(self, file: DataFile) -> None:
        taken = {value.name: other for other in self._contents.values() for value in other.values}
        twice = [value.name for value in file.values if value.name in taken]
        if file.name in self._contents or twice:
            raise ConfigError(
                "each value and each file of a commit once",
                f"{twice[0] if twice else file.name!r} in {file.name} again",
                "give the parts names and values of their own",
            )
        self._contents[file.name] = file


def _file_name(name: str) -> str:
    if not is_file_name(name):
        raise ConfigError(
            "a plain file name",
            repr(name),
            "use letters, digits and any of _ . = + -, without directories",
        )
    return name
