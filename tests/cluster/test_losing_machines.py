"""`fit` on parameter servers goes on without workers, and from the last commit without servers."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from pathlib import Path

import pytest

from tests.support.harness import start_script

SCRIPT = Path(__file__).parent / "scripts" / "losing.py"
STEPS = math.ceil(509 / 8)  # Of an epoch.
EXECUTION = 16  # Steps that are done again if a worker is lost in the last of them.
#: Who says nothing is stuck.
SOON = {"TFDIST_SILENCE_TIMEOUT": "10"}

pytestmark = pytest.mark.timeout(200)


@contextlib.contextmanager
def _hurt(tmp_path, *args, ps=1, epoch, victim, how):
    """Runs losing.py, does something to a task in the middle of an epoch, and yields the job."""
    options = ["--ps", str(ps), "--max-restarts", "1", "--grace", "60"]
    with start_script(
        SCRIPT, workers=2, launcher_args=options, args=args, tmp_path=tmp_path, env=SOON
    ) as job:
        job.wait_for_line(f"epoch {epoch} begins", 90)
        time.sleep(0.5)
        job.kill(victim, how)
        yield job


def _finished(job, epochs):
    """Waits for the end; returns the run and the report, of which it checks the counts."""
    run = job.wait(150)
    assert run.code == 0, run.output
    result = run.result("chief 0")
    # In no epoch was an example left out or trained twice.
    assert result["seen"] == [[1.0, 1.0]] * len(epochs)
    assert result["epochs"] == epochs
    assert result["evaluated"] == 8 * 8
    return run, result


def test_a_worker_that_is_killed_costs_nothing_and_joins_in_again(tmp_path):
    with _hurt(tmp_path, "5", epoch=1, victim="worker 1", how=signal.SIGKILL) as job:
        run, result = _finished(job, list(range(5)))
    # What the dead one had begun was done again, from its first step.
    assert 5 * STEPS <= result["iterations"] <= 5 * STEPS + EXECUTION
    assert run.output.count("tfdist run: worker 1 is process") == 2
    assert run.output.count("tfdist run: chief 0 is process") == 1


def test_a_worker_that_is_stopped_does_not_stop_the_others(tmp_path):
    with _hurt(tmp_path, "4", epoch=1, victim="worker 1", how=signal.SIGSTOP) as job:
        run, result = _finished(job, list(range(4)))
    assert 4 * STEPS <= result["iterations"] <= 4 * STEPS + EXECUTION
    assert "another does its steps again" in run.output
    # Whatever must be told to every worker waits until it is known to be stuck.
    assert "worker 1 says nothing any more; killing it" in run.output


@pytest.mark.parametrize("victim", ["ps 0", pytest.param("chief 0", marks=pytest.mark.slow)])
def test_after_the_loss_of_a_server_training_goes_on_from_the_last_commit(victim, tmp_path):
    backup = str(tmp_path / "backup")
    with _hurt(tmp_path, "5", backup, ps=2, epoch=3, victim=victim, how=signal.SIGKILL) as job:
        # Epochs 0 to 2 were committed: none of their examples is trained again.
        run, result = _finished(job, [3, 4])
    assert result["start"] == 1
    assert result["iterations"] == 5 * STEPS
    named = [line for line in run.lines("chief 0") if "Expected every" in line]
    assert victim == "chief 0" or any("ps 0" in line for line in named), run.output
