"""Where the program of a replica runs: with this Python, or as `container` says."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Protocol

from tfdist.errors import ConfigError
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
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    directory: str | None = None


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
