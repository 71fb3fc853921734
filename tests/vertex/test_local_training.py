"""Training as a custom job on this machine: a killed replica leaves no trace in the result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.harness import ROOT
from tfdist.state.provenance import Provenance
from tfdist.vertex.local import Host
from tfdist.vertex.local import JobState
from tfdist.vertex.local import LocalJob

pytestmark = pytest.mark.timeout(280)
DEADLINE = 120.0

DIGITS = """
experiment: {name: digits, options: {filters: 4}}
data: {global_batch_size: 64}
training: {epochs: %d, seed: 0, learning_rate: 0.002}
output: {backup: 4, tensorboard: false, checkpoint: none}
"""
FLIGHTS = """
experiment: {name: flights, options: {buckets: 256, embedding_dim: 4, max_rows: 20000}}
data: {global_batch_size: 128}
training: {epochs: 3, seed: 0}
output: {backup: 16, tensorboard: false, checkpoint: none}
"""


def custom_job(config: str, roles: Mapping[int, int], **scheduling: Any) -> dict[str, Any]:
    """Returns a job whose pools all run the trainer, with so many replicas at each position."""
    container = {
        "imageUri": "europe-docker.pkg.dev/p/r/tfdist:1",
        "args": ["--config", config],
        "env": [
            {"name": "TF_DETERMINISTIC_OPS", "value": "1"},
            {"name": "TF_CPP_MIN_LOG_LEVEL", "value": "1"},
        ],
    }
    pools = [
        {"replicaCount": roles[place], "containerSpec": container} if roles.get(place) else {}
        for place in range(max(roles) + 1)
    ]
    return {
        "displayName": "training",
        "jobSpec": {
            "workerPoolSpecs": pools,
            "scheduling": scheduling,
            "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/run"},
        },
    }


class Outcome:
    """A job that has ended: its news, and where its output is."""

    def __init__(self, output: Path, news: list[str], lines: list[str]):
        self.output = output
        self.news = news
        self.lines = lines

    @property
    def incarnations(self) -> list[Mapping[str, Any]]:
        record = Provenance.read(str(self.output / "checkpoints" / "backup"))
        assert record is not None
        return list(record["incarnations"])

    def weights(self) -> list[np.ndarray]:
        import keras

        model = keras.models.load_model(self.output / "model" / "model.keras", compile=False)
        return [np.asarray(weight) for weight in model.get_weights()]


def train(
    tmp_path: Path, name: str, config: str, roles: Mapping[int, int], *kills: str, **scheduling: Any
) -> Outcome:
    """Trains; kills one replica after the other, each when a new commit is there."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(config)
    news: list[str] = []
    lines: list[str] = []
    job = LocalJob(
        custom_job(str(path), roles, **scheduling),
        directory=tmp_path / name,
        environ={**os.environ, "PYTHONPATH": str(ROOT)},
        runner=Host(directory=str(ROOT)),
        say=news.append,
        show=lines.append,
    )
    output = tmp_path / name / "gcs" / "bucket" / "run"
    until = time.monotonic() + DEADLINE
    job.start()
    try:
        seen: set[str] = set()
        for replica in kills:
            while not (new := {p.name for p in output.glob("checkpoints/backup/step-*")} - seen):
                assert time.monotonic() < until and not job.state.is_final, tail(news, lines)
                time.sleep(0.01)
            seen |= new
            os.kill(job.pids[replica], signal.SIGKILL)
        state = job.wait(until - time.monotonic())
        assert state is JobState.SUCCEEDED, tail(news, lines)
    finally:
        job.cancel(hurry=True)
        job.wait(20)
    return Outcome(output, news, lines)


def tail(news: list[str], lines: list[str]) -> str:
    return "\n".join([*news, *lines[-60:]])


def assert_equal(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_two_replicas_that_train_together_go_on_after_one_is_killed(tmp_path):
    outcome = train(
        tmp_path,
        "killed",
        DIGITS % 4,
        {0: 1, 1: 1},
        "workerpool1-0",
        restartJobOnWorkerRestart=True,
    )
    assert any("restarting all replicas, restart 1 of 5" in line for line in outcome.news)
    first, second = outcome.incarnations
    assert first["resumed_step"] == 0
    assert second["resumed_step"] > 0
    assert second["ended"] == "finished"
    history = (outcome.output / "logs" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in history] == ["epoch", "0", "1", "2", "3"]
    assert (outcome.output / "model" / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("restart_all", [True, False])
def test_workers_that_are_killed_end_with_the_weights_of_a_run_in_peace(tmp_path, restart_all):
    roles = {0: 1, 1: 1}
    peace = train(tmp_path, "peace", DIGITS % 6, roles)
    killed = train(
        tmp_path,
        "killed",
        DIGITS % 6,
        roles,
        "workerpool1-0",
        "workerpool0-0",
        restartJobOnWorkerRestart=restart_all,
    )
    assert len(killed.incarnations) >= 3
    assert_equal(killed.weights(), peace.weights())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["workerpool2-0", "workerpool0-0"])
def test_a_lost_server_or_coordinator_leaves_no_trace_in_the_weights(tmp_path, victim):
    roles = {0: 1, 1: 1, 2: 1}
    peace = train(tmp_path, "peace", FLIGHTS, roles)
    killed = train(tmp_path, "killed", FLIGHTS, roles, victim)
    assert len(killed.incarnations) == 2
    assert killed.incarnations[1]["resumed_step"] > 0
    assert_equal(killed.weights(), peace.weights())


@pytest.mark.slow
def test_a_lost_worker_of_parameter_servers_is_replaced_while_training_goes_on(tmp_path):
    outcome = train(tmp_path, "killed", FLIGHTS, {0: 1, 1: 2, 2: 1, 3: 1}, "workerpool1-1")
    assert len(outcome.incarnations) == 1
    assert any("worker 1 has ended with exit code 137" in line for line in outcome.news)
    assert sum("worker 1 is process" in line for line in outcome.news) == 2
    assert sum("chief is process" in line for line in outcome.news) == 1
