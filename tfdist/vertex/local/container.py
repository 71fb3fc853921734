"""Runs programs in a working container of buildah's: its files, user and variables, no daemon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.vertex.local import enter
from tfdist.vertex.local.custom_job import Program
from tfdist.vertex.local.runner import Launch


class Container:
    """Runs programs in a working container (`buildah from IMAGE`).

    All replicas share its files, and the network of this machine. Of this machine's environment
    nothing reaches them. The process of a replica is the program itself, so that signals and exit
    codes are its own. Needs root, for mounts and chroot.

    Args:
        name: Name or id of the container.
        mounts: Directories and files of this machine that are seen inside under the same path.
        buildah: The command, with options of its own such as `--root`.

    Raises:
        UnsupportedError: There is no buildah, or this process is not root.
        ConfigError: There is no such container.
    """

    def __init__(
        self, name: str, mounts: Sequence[str] = (), buildah: Sequence[str] = ("buildah",)
    ):
        if shutil.which(buildah[0]) is None or shutil.which("unshare") is None:
            raise UnsupportedError(
                "buildah, and unshare of util-linux, to run a container",
                "not all of it",
                "apt-get install buildah util-linux",
            )
        if os.geteuid() != 0:
            raise UnsupportedError(
                "root, to run a container by mounts and chroot",
                f"user {os.geteuid()}",
                "run as root, or without --container",
            )
        self._name = name
        self._mounts = tuple(mounts)
        found = json.loads(_ask(buildah, "inspect", "--type", "container", name))
        config = found["OCIv1"]["config"]
        self._root = Path(_ask(buildah, "mount", name).strip())
        self._entry_point = tuple(config.get("Entrypoint") or ())
        self._arguments = tuple(config.get("Cmd") or ())
        self._environ = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
        self._user = config.get("User") or "0:0"
        self._directory = config.get("WorkingDir") or "/"

    def inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of the image."""
        del environ
        home = enter.home(self._root, self._user)
        return {"PATH": os.defpath, "HOME": home, **self._environ}

    def launch(self, program: Program, environ: Mapping[str, str]) -> Launch:
        """Returns the command that becomes the program."""
        if program.module:
            words = ["python", "-m", program.module, *program.args]
        elif program.command:
            words = [*program.command, *program.args]
        else:
            words = [*self._entry_point, *(program.args or self._arguments)]
        if not words:
            raise ConfigError(
                "an image with an entry point, or a command",
                f"neither, in {self._name}",
                "set command in the job",
            )
        # The way in is found by this machine's own path, not the image's.
        unshare = shutil.which("unshare") or "unshare"
        call = [
            *(unshare, "--mount", "--propagation", "private"),
            *(sys.executable, "-I", "-S", str(Path(enter.__file__).resolve())),
            *(str(self._root), self._user, self._directory),
            *(str(len(self._mounts)), *self._mounts),
            *words,
        ]
        return Launch(call, environ)


def _ask(buildah: Sequence[str], *words: str) -> str:
    asked = subprocess.run([*buildah, *words], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise ConfigError(
            "the name of a working container of buildah's",
            f"{words[-1]!r} ({asked.stderr.strip()})",
            "make one: buildah from IMAGE; buildah containers lists them",
        )
    return asked.stdout
