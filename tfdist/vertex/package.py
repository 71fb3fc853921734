"""The user's code as a source distribution, for images that do not hold it.

It is built from `setup.cfg`, `setup.py` or `pyproject.toml` of the working directory by setuptools,
without a network and without a trace in that directory. The same content always makes the same
bytes and the same name, so that what was uploaded once is found again.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError

_METADATA = ("setup.cfg", "setup.py", "pyproject.toml")
#: What is no source: made by tools, or may be large.
_NOT_SOURCE = frozenset({"build", "dist", "runs", "__pycache__", "venv", "node_modules"})
_LARGEST_FILE = 16 << 20
_BUILD_SECONDS = 300
_BUILD = "import sys; from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]))"
#: Zip files, of which wheels are made on the other side, know no earlier time: 1980-02-01.
_TIME = 318_211_200
_IMPORT = re.compile(rb"^\s*(?:from|import)\s+tfdist\b", re.MULTILINE)
#: In requires.txt; the metadata of a source distribution has it only with newer setuptools.
_REQUIRES = re.compile(rb"^tfdist\b", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Package:
    """A source distribution.

    Attributes:
        name: File name, with a hash of the content.
        data: The gzipped tar file.
    """

    name: str
    data: bytes


def build(directory: str | Path = ".", module: str = "trainer.task") -> Package:
    """Builds the source distribution of a directory.

    Args:
        directory: Where `setup.cfg` is.
        module: What the job runs; it must be in the distribution.

    Raises:
        ConfigError: There is nothing to build from, it fails, or `module` or tfdist is not in it.
        UnsupportedError: setuptools is not installed.
    """
    source = Path(directory).resolve()
    if not any((source / name).is_file() for name in _METADATA):
        raise ConfigError(
            f"{', '.join(_METADATA[:-1])} or {_METADATA[-1]}, to build a source distribution from",
            f"{source} without any of them",
            "run it in the directory of the project, or set vertex.package_uri to one that is "
            "uploaded already",
        )
    with tempfile.TemporaryDirectory(prefix="tfdist-package-") as scratch:
        tree, out = Path(scratch, "source"), Path(scratch, "out")
        tree.mkdir()
        out.mkdir()
        _mirror(source, tree)
        archive = out / _run(tree, out)
        members = _members(archive)
    _check(members, module, source)
    root = next(iter(members)).split("/", 1)[0]
    return Package(f"{root}-{_digest(members)}.tar.gz", _pack(members))


def _mirror(source: Path, tree: Path) -> None:
    """Shows the sources in another directory, in which setuptools may leave its own files."""
    for entry in source.iterdir():
        hidden = entry.name.startswith(".") or entry.name.endswith(".egg-info")
        if hidden or entry.name in _NOT_SOURCE:
            continue
        if entry.is_dir():
            (tree / entry.name).symlink_to(entry, target_is_directory=True)
        elif entry.is_file() and entry.stat().st_size <= _LARGEST_FILE:
            shutil.copy2(entry, tree / entry.name)


def _run(tree: Path, out: Path) -> str:
    """Runs setuptools; returns the name of the file it made."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(out)],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            "a source distribution", f"none after {_BUILD_SECONDS} seconds", "run it by hand"
        ) from error
    if done.returncode == 0:
        return done.stdout.split()[-1]
    if "No module named 'setuptools'" in done.stderr:
        raise UnsupportedError(
            "the package setuptools, which builds the source distribution",
            "an installation without it",
            "pip install setuptools",
        )
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    raise ConfigError(
        "a project that setuptools can build",
        said[-1] if said else f"exit code {done.returncode}",
        "correct setup.cfg; python -m build --sdist shows the same in full",
    )


def _members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        files = sorted((each for each in tar if each.isfile()), key=lambda each: each.name)
        return {each.name: _content(tar, each) for each in files}


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _check(members: dict[str, bytes], module: str, source: Path) -> None:
    inside = {name.split("/", 1)[1] for name in members if "/" in name}
    path = module.replace(".", "/")
    if not {f"{path}.py", f"{path}/__main__.py"} & inside:
        raise ConfigError(
            f"the module {module} in the source distribution",
            f"packages of {source} without it",
            "name its package in setup.cfg, or set vertex.module to what the job runs",
        )
    if "tfdist/__init__.py" in inside:
        return
    required = any(
        _REQUIRES.search(content)
        for name, content in members.items()
        if name.endswith(".egg-info/requires.txt")
    )
    imported = any(
        name.endswith(".py") and _IMPORT.search(content) for name, content in members.items()
    )
    if imported and not required:
        raise ConfigError(
            "tfdist in the source distribution, which its code imports",
            f"packages of {source} without it, and no requirement of it",
            "add it to install_requires or to the packages in setup.cfg",
        )


def _digest(members: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in members.items():
        # With lengths, so that no two sets of files read the same.
        digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _pack(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped:
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.mode = len(content), _TIME, 0o644
                tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()
