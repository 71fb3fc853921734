"""Runs `program` on one device or in a local cluster, with a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tfdist.launch.environment import describes_a_cluster
from tfdist.testing import records

_SHOWN_LINES = 60


@dataclasses.dataclass(frozen=True)
class World:
    """Where a training runs.

    Attributes:
        kind: "single", "workers" or "replicas".
        count: Number of workers or of local replicas.
    """

    kind: str
    count: int = 1

    def __str__(self) -> str:
        if self.kind == "single":
            return "one device"
        plural = "" if self.count == 1 else "s"
        return f"{self.count} {self.kind.removesuffix('s')}{plural}"

    @property
    def tasks(self) -> int:
        """Number of processes."""
        return self.count if self.kind == "workers" else 1

    def command(self, folder: Path) -> list[str]:
        """Returns the command that trains as described in `folder`."""
        program = ["-m", "tfdist.testing.program", str(folder)]
        if self.kind == "single":
            return [sys.executable, *program, "single"]
        launcher = [sys.executable, "-m", "tfdist", "run", "--workers", str(self.tasks)]
        # A task that misses another knows at once; it need not be waited for.
        world = "workers" if self.kind == "workers" else f"replicas:{self.count}"
        return [*launcher, "--grace", "5", *program, world]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What one task has written down.

    Attributes:
        folder: Where.
        facts: History, steps and layers, as `program` writes them.
    """

    folder: Path
    facts: dict[str, Any]

    @property
    def variables(self) -> dict[str, Any]:
        """Variables after `fit`, by name."""
        return records.load(self.folder / "final.npz")

    @property
    def steps(self) -> records.Steps:
        """Variables after single steps; only the first task has any."""
        return records.Steps(self.folder / "steps")


def train(world: World, folder: Path, deadline: float) -> list[Trained]:
    """Runs the training to its end and returns what each task has written down.

    Args:
        world: Where.
        folder: Holds the job; results go below it.
        deadline: On the clock of `time.monotonic`.

    Raises:
        AssertionError: It failed or did not end in time; with the error or the last lines.
    """
    log = folder / f"{world.kind}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            world.command(folder),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # The guard of the launcher ends the tasks with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    folders = [folder / world.kind / str(index) for index in range(world.tasks)]
    if code == 0:
        return [
            Trained(each, json.loads((each / "facts.json").read_text(encoding="utf-8")))
            for each in folders
        ]
    what = "did not end before the deadline" if code is None else f"failed with exit code {code}"
    errors = [each / "error.txt" for each in folders if (each / "error.txt").exists()]
    if errors:
        text = errors[0].read_text(encoding="utf-8")
    else:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n".join(lines[-_SHOWN_LINES:]) or "(no output)"
    raise AssertionError(f"the training on {world} {what}:\n{text.rstrip()}")


def _environment() -> dict[str, str]:
    environ = {
        name: value
        for name, value in os.environ.items()
        # Settings of ours may change what is computed.
        if not describes_a_cluster(name) and not name.startswith("TFDIST_")
    }
    root = str(Path(__file__).resolve().parents[2])
    paths = [environ.get("PYTHONPATH", ""), root]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Accelerators multiply in lower precision than the tolerance, and workers would share them.
    environ["CUDA_VISIBLE_DEVICES"] = "-1"
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return environ
