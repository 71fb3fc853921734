"""A job to submit, and the command that does it, run in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tfdist.vertex as vertex
from tests.support.jobs import FakeJobService
from tests.support.specs import job
from tfdist.cli.main import main

ROOT = Path(__file__).parents[2]
CONFIG = "configs/digits-vertex.yaml"


def spec(**changes: Any) -> vertex.JobSpec:
    """Returns a job of one machine."""
    return job(
        **{
            "project": "demo",
            "args": ("--name", "two words", "it's"),
            "staging_bucket": "gs://stage",
            "base_output_directory": None,
            **changes,
        }
    )


class Kept(vertex.Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.states: list[str] = []
        self.lines: list[str] = []

    def change(self, history: Any, now: float) -> None:
        self.states.append(history.state)

    def say(self, text: str) -> None:
        self.said.append(text)

    def log(self, entry: Any) -> None:
        self.lines.append(str(entry))


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@dataclasses.dataclass
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


def run(service: FakeJobService, *words: str, **variables: str) -> Done:
    """Runs `tfdist vertex` in this process: to import the client takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    variables |= {"TFDIST_VERTEX_ENDPOINT": service.endpoint, "TFDIST_VERTEX_POLL": "0.1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(_inside(ROOT))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = main(["vertex", *words])
    return Done(code, out.getvalue(), err.getvalue())
