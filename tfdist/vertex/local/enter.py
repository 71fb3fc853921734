"""Becomes a program inside of a directory that holds the files of an image.

    unshare --mount python -I -S enter.py ROOT USER DIRECTORY COUNT PATH... WORD...

Run as a script of its own, by `tfdist.vertex.local.container`. ROOT gets this machine's /proc,
/dev, /sys and names of hosts, and COUNT paths of it, in mounts that nobody else sees; then this
process gives up its rights for those of USER and is replaced by the words. `buildah run` would
start the program as a child instead, and a SIGTERM would not reach it: it could not save anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SYSTEM = ("/proc", "/dev", "/sys")
_FILES = ("/etc/hosts", "/etc/resolv.conf")


def enter(root: Path, user: str, directory: str, paths: list[str], words: list[str]) -> None:
    """Replaces this process by a program in `root`; returns only by an exception.

    Args:
        root: Files of the image.
        user: Name or number, and a group after a colon where it is not the user's own.
        directory: Where the program starts.
        paths: What of this machine is seen under the same path.
        words: The program and its arguments.
    """
    for path in (*_SYSTEM, *_FILES, *paths):
        if os.path.exists(path):
            _mount(path, root)
    user_id, group_id = _numbers(root, user)
    os.chroot(root)
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    os.setgroups([group_id])
    os.setgid(group_id)
    os.setuid(user_id)
    os.execvp(words[0], words)


def home(root: Path, user: str) -> str:
    """Returns the home directory of a user of the image, "/" where it has none."""
    name = user.partition(":")[0]
    for entry in _entries(root / "etc/passwd"):
        if name in (entry[0], entry[2]) and len(entry) > 5:
            return entry[5]
    return "/"


def _mount(path: str, root: Path) -> None:
    place = root / path.lstrip("/")
    if os.path.isdir(path):
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    subprocess.run(["mount", "--rbind", path, str(place)], check=True)


def _numbers(root: Path, user: str) -> tuple[int, int]:
    """Returns the numbers of a user and a group, by the image's own lists."""
    name, _, group = user.partition(":")
    user_id, group_id = (int(name), 0) if name.isdecimal() else (None, 0)
    for entry in _entries(root / "etc/passwd"):
        if name in (entry[0], entry[2]):
            user_id, group_id = int(entry[2]), int(entry[3])
    if user_id is None:
        raise LookupError(f"the image has no user {name!r}")
    if group.isdecimal():
        return user_id, int(group)
    for entry in _entries(root / "etc/group"):
        if group and entry[0] == group:
            return user_id, int(entry[2])
    if group:
        raise LookupError(f"the image has no group {group!r}")
    return user_id, group_id


def _entries(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    return [line.split(":") for line in path.read_text().splitlines() if line.count(":") >= 3]


def main(arguments: list[str]) -> int:
    """Reads the command line; returns only where the program could not be started."""
    root, user, directory, count, *rest = arguments
    paths, words = rest[: int(count)], rest[int(count) :]
    try:
        enter(Path(root), user, directory, paths, words)
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        print(f"{words[0]} could not be started in {root}: {error}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
