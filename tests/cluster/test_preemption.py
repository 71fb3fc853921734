"""SIGTERM while a model trains: all tasks save after the same step, and end with 143."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.harness import run_script

SCRIPT = Path(__file__).parent / "scripts" / "recovery" / "train.py"
STEPS = 9
SAME = ("weights", "history", "iterations", "seen", "epochs")

pytestmark = pytest.mark.timeout(600)


def _run(tmp_path, *args, workers, restarts=0, timeout=200):
    return run_script(
        SCRIPT,
        workers=workers,
        launcher_args=["--max-restarts", str(restarts), "--grace", "15"],
        args=[str(tmp_path / "run"), "--signal", "15", *args],
        tmp_path=tmp_path,
        timeout=timeout,
    )


def _assert_exact(run, workers):
    for worker in range(workers):
        result = run.result(f"worker {worker}")
        for key in SAME:
            assert result[key] == result["undisturbed"][key], key


def test_two_workers(tmp_path):
    kills = ["--kill", "0:1:14", "--kill", "1:0:20"]
    run = _run(tmp_path, *kills, "--every", "epoch", "--reference", workers=2, restarts=2)
    assert run.code == 0, run.output
    _assert_exact(run, 2)
    print(run.output)
