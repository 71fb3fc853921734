"""Checks of this machine alone: packages, directories, shared memory. Part of `tfdist doctor`."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path

from tfdist.cluster.checks import Check
from tfdist.cluster.checks import are

#: The versions that tfdist is tested with.
TESTED = {"tensorflow": "2.21", "keras": "3.15"}
#: Where Vertex AI tells a job to write.
OUTPUT_VARIABLES = ("AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")
GIB = 2**30


def check_versions(found: Mapping[str, str]) -> Check:
    """Checks that TensorFlow and Keras are installed in the versions that tfdist is tested with.

    Args:
        found: Package to its version, as `rendezvous.versions` returns them.
    """
    text = versions_text(found)
    missing = [package for package in TESTED if package not in found]
    if missing:
        return Check(
            "versions",
            "failed",
            f"{' and '.join(missing)} {are(missing, 'is', 'are')} not installed; found {text}",
            "pip install 'tfdist[cpu]', or 'tfdist[gpu]' with NVIDIA GPUs",
        )
    if any(not f"{found[p]}.".startswith(f"{tested}.") for p, tested in TESTED.items()):
        pair = " and ".join(f"{package} {version}" for package, version in TESTED.items())
        return Check("versions", "warning", text, f"tfdist is tested with {pair}; install these")
    return Check("versions", "ok", text)


def outputs_from(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the directories that Vertex AI tells the job to write to.

    Args:
        environ: Environment variables.
    """
    values = (environ.get(name, "").strip() for name in OUTPUT_VARIABLES)
    return tuple(value for value in values if value)


def check_output(folder: str) -> Check:
    """Checks that files can be written, made durable, renamed and deleted in a directory.

    A directory that does not exist is not created: its nearest existing parent is tried.

    Args:
        folder: Path of the directory.
    """
    if is_remote(folder):
        return Check(
            "output",
            "skipped",
            f"{folder}: only TensorFlow can write there, so doctor, which does without it, has "
            "not checked it",
        )
    wanted, place = Path(_path(folder)), _nearest(folder)
    if not place.is_dir():
        return Check(
            "output", "failed", f"{folder}: {place} is not a directory", "choose another directory"
        )
    try:
        _write_in(place)
    except OSError as error:
        fixes = {
            errno.ENOSPC: "free some space there",
            errno.EDQUOT: "raise the quota, or free some space there",
            errno.EROFS: "mount it for writing, or choose another directory",
        }
        return Check(
            "output",
            "failed",
            f"{folder}: cannot write in {place} ({error.strerror})",
            fixes.get(
                error.errno or 0, f"let user {os.getuid()} write there, or choose another directory"
            ),
        )
    if place == wanted:
        return Check("output", "ok", f"{folder} is writable")
    return Check("output", "ok", f"{folder} does not exist yet; {place} is writable")


def check_space(
    folder: str, statvfs: Callable[[str], os.statvfs_result] = os.statvfs, least: int = GIB
) -> Check:
    """Checks that the file system of a directory has space left.

    Args:
        folder: Path of the directory, which need not exist.
        statvfs: Tells about a file system.
        least: Bytes below which it warns.
    """
    try:
        found = statvfs(str(_nearest(folder)))
    except OSError as error:
        return Check("space", "warning", f"{folder}: {error.strerror}", "look at the file system")
    if not found.f_blocks:
        return Check("space", "skipped", f"{folder}: its file system does not tell")
    free = found.f_bavail * found.f_frsize
    if free < least:
        return Check(
            "space",
            "warning",
            f"{folder} has {_size(free)} left",
            "free some space, or choose another directory: checkpoints are written in full beside "
            "the old ones",
        )
    return Check("space", "ok", f"{folder} has {_size(free)} left")


def check_shm(
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs, path: str = "/dev/shm"
) -> Check:
    """Checks the size of shared memory, of which Docker gives a container 64 MiB.

    Args:
        statvfs: Tells about a file system.
        path: Where shared memory is mounted.
    """
    try:
        found = statvfs(path)
    except OSError:
        return Check("shm", "skipped", f"this system has no {path}")
    size = found.f_blocks * found.f_frsize
    if size < GIB:
        return Check(
            "shm",
            "warning",
            f"{path} has {_size(size)}; with GPUs, NCCL may crash or hang below 1 GiB, without "
            "GPUs it does not matter",
            "with GPUs, docker run --shm-size=1g (Kubernetes: an emptyDir of medium Memory there)",
        )
    return Check("shm", "ok", f"{path} has {_size(size)}")


def check_keras(environ: Mapping[str, str]) -> Check:
    """Checks that `tf.keras` is Keras 3.

    Args:
        environ: Environment variables.
    """
    if environ.get("TF_USE_LEGACY_KERAS", "").strip() in ("1", "true", "True"):
        return Check(
            "keras",
            "warning",
            "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2 (tf_keras), which tfdist does not "
            "make right",
            "unset TF_USE_LEGACY_KERAS",
        )
    return Check("keras", "ok", "TF_USE_LEGACY_KERAS is not set, so tf.keras is Keras 3")


def is_remote(folder: str) -> bool:
    """Whether the directory is in an object store such as gs://."""
    scheme, found, _ = folder.partition("://")
    return bool(found) and scheme != "file"


def _path(folder: str) -> str:
    return folder.removeprefix("file://")


def _nearest(folder: str) -> Path:
    """Returns the path itself if it exists, else its nearest parent that does."""
    path = Path(_path(folder))
    return next((p for p in (path, *path.parents) if os.path.lexists(p)), Path("."))


def _write_in(folder: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=".tfdist-doctor-", dir=folder)
    renamed = f"{name}.renamed"
    try:
        try:
            os.write(handle, b"tfdist doctor\n" * 512)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(name, renamed)
        os.unlink(renamed)
    except OSError:
        for left in (name, renamed):
            with contextlib.suppress(OSError):
                os.unlink(left)
        raise


def versions_text(versions: Mapping[str, str]) -> str:
    """Returns packages and their versions in one line."""
    return ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))


def _size(count: int) -> str:
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1024:.0f} KiB"
