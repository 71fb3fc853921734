"""Where the program of a replica runs: with this Python, or in a container of buildah's."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Protocol

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from tfdist.vertex.local.custom_job import Program

#: What the images of this project run.
ENTRY_POINT = ("python", "-m", "trainer.task")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the process of a replica is started.

    Attributes:
        words: The command.
        environ: Environment of that command.
        directory: Where it starts, or None for the directory of this process.
        wrapper: Processes whose first word begins so are not the program and end after it: they
            are not asked to end. "" where there are none.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    directory: str | None = None
    wrapper: str = ""


class Runner(Protocol):
    """Turns a program into a command of this machine."""

    def inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns what a replica's environment is built upon.

        Args:
            environ: The environment of this process.
        """

    def launch(self, program: Program, environ: Mapping[str, str]) -> Launch:
        """Returns how to start a program.

        Args:
            program: What the pool runs.
            environ: The whole environment that the program is to see.

        Raises:
            ConfigError: It cannot be started here.
        """


@dataclasses.dataclass(frozen=True)
class Host:
    """Runs programs with this Python, which stands for the image and what is in it.

    Attributes:
        entry_point: In place of the image's own.
        directory: Where programs start, or None for this process's directory.
        path: Directories in front of `PYTHONPATH`.
    """

    entry_point: Sequence[str] = ENTRY_POINT
    directory: str | None = None
    path: Sequence[str] = ()

    def inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns `environ`, with this Python first on the path, unbuffered as in an image."""
        found = dict(environ)
        here = os.path.dirname(sys.executable)
        found["PATH"] = os.pathsep.join(filter(None, [here, found.get("PATH", os.defpath)]))
        if self.path:
            found["PYTHONPATH"] = os.pathsep.join(
                filter(None, [*self.path, found.get("PYTHONPATH")])
            )
        found.setdefault("PYTHONUNBUFFERED", "1")
        return found

    def launch(self, program: Program, environ: Mapping[str, str]) -> Launch:
        """Returns the program's own words."""
        if program.module:
            words = ["python", "-m", program.module, *program.args]
        else:
            words = [*(program.command or self.entry_point), *program.args]
        if words[0] in ("python", "python3"):
            words[0] = sys.executable
        if shutil.which(words[0], path=environ.get("PATH")) is None:
            raise ConfigError(
                "a program that is on this machine, too",
                f"{words[0]!r}, not found",
                "run the job in its image with --container, or give another --entry-point",
            )
        return Launch(words, environ, self.directory)


class Buildah:
    """Runs programs in a working container of buildah's, with chroot isolation and no daemon.

    All replicas share the container. Nothing of this machine's environment reaches it. A program
    that a signal ends has exit code 1: buildah does not tell more.

    Args:
        container: Name or id of a working container (`buildah from IMAGE`).
        mounts: Directories that are seen inside under the same path.
        command: buildah, with options of its own such as `--root`.

    Raises:
        UnsupportedError: There is no buildah.
        ConfigError: There is no such container.
    """

    def __init__(
        self, container: str, mounts: Sequence[str] = (), command: Sequence[str] = ("buildah",)
    ):
        if shutil.which(command[0]) is None:
            raise UnsupportedError(
                "buildah, to run a container", "none", "apt-get install buildah crun"
            )
        self._container = container
        self._mounts = tuple(mounts)
        self._command = tuple(command)
        config = _inspect(self._command, container)
        self._entry_point = tuple(config.get("Entrypoint") or ())
        self._arguments = tuple(config.get("Cmd") or ())

    def inherited(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns nothing: the image brings its own variables."""
        return {}

    def launch(self, program: Program, environ: Mapping[str, str]) -> Launch:
        """Returns the call of buildah that runs the program with exactly `environ` added."""
        if program.module:
            words = ["python", "-m", program.module, *program.args]
        elif program.command:
            words = [*program.command, *program.args]
        else:
            words = [*self._entry_point, *(program.args or self._arguments)]
        if not words:
            raise ConfigError(
                "an image with an entry point, or a command",
                f"neither, in {self._container}",
                "set command in the job",
            )
        call = [
            *(*self._command, "run", "--isolation", "chroot"),
            *(word for name, value in environ.items() for word in ("--env", f"{name}={value}")),
            *(word for path in self._mounts for word in ("--volume", f"{path}:{path}")),
            *(self._container, "--", *words),
        ]
        # By its host name the guard knows what belongs to the replica.
        own = {**os.environ, "HOSTNAME": environ.get("HOSTNAME", "")}
        return Launch(call, own, wrapper="buildah")


def _inspect(command: Sequence[str], container: str) -> Mapping[str, Sequence[str] | None]:
    asked = subprocess.run(
        [*command, "inspect", "--type", "container", container],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise ConfigError(
            "the name of a working container of buildah's",
            f"{container!r} ({asked.stderr.strip()})",
            "make one: buildah from IMAGE; buildah containers lists them",
        )
    config: Mapping[str, Sequence[str] | None] = json.loads(asked.stdout)["OCIv1"]["config"]
    return config
