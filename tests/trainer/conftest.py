"""What the trainer's tests share: one prepared data set, and a way to run the entry point."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

#: Variables that would make a test depend on where it runs.
_FOREIGN = ("AIP_", "CLUSTER_SPEC", "SLURM_", "TFDIST_", "TFDS_DATA_DIR", "TF_CONFIG", "TPU_")

Train = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory in which tfds data sets are prepared once for all tests."""
    return str(tmp_path_factory.mktemp("tfds"))


@pytest.fixture(scope="session")
def environment(data_dir: str) -> dict[str, str]:
    """The environment of processes under test."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    path = os.pathsep.join(filter(None, [str(ROOT), own.get("PYTHONPATH")]))
    return {**own, "PYTHONPATH": path, "TFDS_DATA_DIR": data_dir}


@pytest.fixture(scope="session")
def train(environment: dict[str, str]) -> Train:
    """Runs `python -m trainer.task` and returns the finished process."""

    def run(
        *arguments: str,
        cwd: pathlib.Path,
        env: dict[str, str] | None = None,
        python: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *python, "-m", "trainer.task", *arguments],
            cwd=cwd,
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    return run
