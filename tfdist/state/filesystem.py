"""The few things that the store asks of a file system, on local disks and on object stores.

| | paths | a file appears | directories are renamed |
|---|---|---|---|
| `LocalFiles` | without `://`: disks, NFS | when it is created | yes, atomically |
| `LocalFiles(renames=False)` | mounted buckets (FUSE) | when it is created | not relied on |
| `RemoteFiles` | `gs://` and what else `tf.io.gfile` opens | when it is complete | no |

Both raise `OSError` and its children, and nothing else. TensorFlow is imported for the second kind
only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any
from typing import Protocol

#: One call of the system: long enough to be rare, short enough to share a core.
CHUNK = 4 << 20
#: So much is handed to the disk at once: more dirty pages make the system stop those who write.
_SYNC_EVERY = 32 << 20

_MOUNTS = "/proc/self/mountinfo"

#: Names of what is on its way in or out.
HIDDEN = "."


class OutputFile(Protocol):
    """A new file that is being written."""

    def write(self, data: memoryview) -> None:
        """Appends `data`."""

    def close(self) -> None:
        """Makes all that was written durable."""


class FileSystem(Protocol):
    """What the store needs.

    Attributes:
        renames: Whether a directory can be renamed at one stroke.
        is_local: Whether paths are those of the operating system.
    """

    renames: bool
    is_local: bool

    def make_directory(self, path: str) -> None:
        """Creates `path` and those above it, as far as they are missing."""

    def names(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted; none where there is no such directory."""

    def read(self, path: str) -> bytes:
        """Returns all of a file."""

    def chunks(self, path: str) -> Iterator[bytes]:
        """Gives a file piece by piece, `CHUNK` bytes at most each."""

    def size(self, path: str) -> int:
        """Returns the length of a file in bytes."""

    def create(self, path: str) -> contextlib.AbstractContextManager[OutputFile]:
        """Opens a new file; it is durable when the context ends without an exception."""

    def replace(self, path: str, data: bytes) -> None:
        """Writes a small file at one stroke: readers find the old one or the new one."""

    def rename(self, source: str, target: str) -> None:
        """Moves a directory, durably."""

    def remove(self, path: str) -> None:
        """Removes a file, if it is there."""

    def remove_directory(self, path: str) -> None:
        """Removes a directory with all in it, if it is there."""

    def sync(self, path: str) -> None:
        """Makes the names in a directory durable."""


def file_system(path: str) -> FileSystem:
    """Returns the file system that holds `path`."""
    if "://" in path:
        return RemoteFiles()
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            is_fuse = mount_type(file.read(), os.path.realpath(path)).startswith("fuse")
    except OSError:
        is_fuse = False
    return LocalFiles(renames=not is_fuse)


def mount_type(mounts: str, path: str) -> str:
    """Returns the type of the file system that holds `path`.

    Args:
        mounts: The text of Linux's `/proc/self/mountinfo`.
        path: A real path, which need not exist.
    """
    best, found = "", ""
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not kind:
            continue
        # Spaces and the like are written as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), columns[4])
        if f"{path}/".startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, found = point, kind.split(" ")[0]
    return found


class _LocalOutput:
    def __init__(self, descriptor: int, sync_every: int | None):
        self._descriptor = descriptor
        self._sync_every = sync_every
        self._unsynced = 0

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            piece = data[start : start + CHUNK]
            while len(piece):
                piece = piece[os.write(self._descriptor, piece) :]
            self._unsynced += min(CHUNK, len(data) - start)
            if self._sync_every is not None and self._unsynced >= self._sync_every:
                os.fdatasync(self._descriptor)
                self._unsynced = 0

    def close(self) -> None:
        os.fsync(self._descriptor)


class LocalFiles:
    """Files of this machine, or of one that it mounts.

    Args:
        renames: Whether directories can be renamed. Where a bucket is mounted it is a copy of one
            file after the other, or refused.
    """

    is_local = True

    def __init__(self, *, renames: bool = True):
        self.renames = renames
        # A mounted bucket would upload the whole file each time.
        self._sync_every = _SYNC_EVERY if renames else None

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes:
        return b"".join(self.chunks(path))

    def chunks(self, path: str) -> Iterator[bytes]:
        # A link in a commit would lead out of it, a pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            while piece := os.read(descriptor, CHUNK):
                yield piece
        except OSError as error:
            error.filename = path
            raise
        finally:
            os.close(descriptor)

    def size(self, path: str) -> int:
        return os.stat(path, follow_symlinks=False).st_size

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[OutputFile]:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        try:
            output = _LocalOutput(descriptor, self._sync_every)
            yield output
            output.close()
        finally:
            os.close(descriptor)

    def replace(self, path: str, data: bytes) -> None:
        directory, name = os.path.split(path)
        aside = os.path.join(directory, f"{HIDDEN}{name}.{os.getpid()}.tmp")
        try:
            with self.create(aside) as output:
                output.write(memoryview(data))
            os.replace(aside, path)
        except BaseException:
            self.remove(aside)
            raise
        self.sync(directory)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)
        self.sync(os.path.dirname(target))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)

    def remove_directory(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)

    def sync(self, path: str) -> None:
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have nothing to do here.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


class RemoteFiles:
    """Files behind `tf.io.gfile`: an object appears when it is complete, and is listed then."""

    renames = False
    is_local = False

    def make_directory(self, path: str) -> None:
        with _os_errors(path):
            if path.startswith("gs://"):
                # There a directory is but the beginning of names. Where the bucket does not exist,
                # `makedirs` never returns, and a file that failed takes minutes to be freed: so
                # look before. This asks for no right but to list objects.
                self._gfile().glob(f"{path}/{HIDDEN}nothing/*")
            else:
                self._gfile().makedirs(path)

    def names(self, path: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError), _os_errors(path):
            return sorted({name.rstrip("/") for name in self._gfile().listdir(path)} - {""})
        return []

    def read(self, path: str) -> bytes:
        return b"".join(self.chunks(path))

    def chunks(self, path: str) -> Iterator[bytes]:
        with _os_errors(path), self._gfile().GFile(path, "rb") as file:
            while piece := file.read(CHUNK):
                yield piece

    def size(self, path: str) -> int:
        with _os_errors(path):
            return int(self._gfile().stat(path).length)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[OutputFile]:
        with _os_errors(path):
            file = self._gfile().GFile(path, "wb")
            output = _RemoteOutput(file)
            yield output
            output.close()

    def replace(self, path: str, data: bytes) -> None:
        with self.create(path) as output:
            output.write(memoryview(data))

    def rename(self, source: str, target: str) -> None:
        raise NotImplementedError("object stores copy instead")

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors(path):
            self._gfile().remove(path)

    def remove_directory(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors(path):
            self._gfile().rmtree(path)

    def sync(self, path: str) -> None:
        """Does nothing: what is closed is durable."""

    @staticmethod
    def _gfile() -> Any:
        import tensorflow as tf

        return tf.io.gfile


class _RemoteOutput:
    def __init__(self, file: Any):
        self._file = file

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            self._file.write(bytes(data[start : start + CHUNK]))

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Turns TensorFlow's errors into those of Python."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, str(error), path) from error
    except (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, str(error), path) from error
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(errno.ENOSPC, str(error), path) from error
    except tf.errors.OpError as error:
        raise OSError(errno.EREMOTEIO, str(error), path) from error
