"""Training as a custom job on this machine: a killed replica leaves no trace in the result."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.harness import LEAN
from tests.support.harness import ROOT
from tfdist.state.provenance import Provenance
from tfdist.vertex.local import Host
from tfdist.vertex.local import JobState
from tfdist.vertex.local import LocalJob
from tfdist.vertex.local.job import Buckets

pytestmark = pytest.mark.timeout(280)
DEADLINE = 120.0

DIGITS = """
experiment: {name: digits, options: {filters: 4}}
data: {global_batch_size: 64}
training: {epochs: 6, seed: 0, learning_rate: 0.002}
output: {backup: 4, tensorboard: false, checkpoint: none}
"""
FLIGHTS = """
experiment: {name: flights, options: {buckets: 256, embedding_dim: 4, max_rows: 20000}}
data: {global_batch_size: 128}
training: {epochs: 3, seed: 0}
output: {backup: 16, tensorboard: false, checkpoint: none}
"""


SCRIPT = """
import os
import time

import tfdist

strategy = tfdist.strategy()

import keras
import numpy as np

keras.utils.set_random_seed(3)
drawn = np.random.default_rng(0)
inputs, targets = drawn.normal(size=(160, 5)), drawn.normal(size=(160, 1))
data = tfdist.data.shard((inputs, targets), global_batch_size=16, shuffle=True, seed=1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
place = os.environ["AIP_CHECKPOINT_DIR"] + "backup"
backup = tfdist.callbacks.BackupAndRestore(place, save_every=3)
slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.03))
model.fit(data, epochs=4, verbose=0, callbacks=[backup, slow])
weights = [np.asarray(weight) for weight in model.get_weights()]
if tfdist.detect().is_chief:
    os.makedirs(os.environ["AIP_MODEL_DIR"], exist_ok=True)
    np.savez(os.environ["AIP_MODEL_DIR"] + "weights.npz", *weights)
"""


def custom_job(args: Sequence[str], roles: Mapping[int, int], **scheduling: Any) -> dict[str, Any]:
    """Returns a job whose pools all run the same, with so many replicas at each position."""
    container = {
        "imageUri": "europe-docker.pkg.dev/p/r/tfdist:1",
        "args": list(args),
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

    def __init__(self, output: Path, news: list[str]):
        self.output = output
        self.news = news

    @property
    def incarnations(self) -> list[Mapping[str, Any]]:
        """What the training says about each of its lives."""
        record = Provenance.read(str(self.output / "checkpoints" / "backup"))
        assert record is not None
        return list(record["incarnations"])

    def weights(self) -> list[np.ndarray]:
        """The final weights, in the model's order."""
        saved = self.output / "model" / "weights.npz"
        if saved.exists():
            with np.load(saved) as arrays:
                return [arrays[name] for name in arrays.files]
        import keras

        model = keras.models.load_model(self.output / "model" / "model.keras", compile=False)
        return [np.asarray(weight) for weight in model.get_weights()]


def train(
    directory: Path,
    program: str,
    roles: Mapping[int, int],
    *kills: str,
    buckets: Buckets = "local",
    **scheduling: Any,
) -> Outcome:
    """Trains; kills one replica after the other, each when its life has made a commit.

    Args:
        directory: Of the job.
        program: The script, or a config of the trainer.
        roles: Position of a pool to its number of replicas.
        kills: Names of replicas; of those of an emulator's job, each in its life's second epoch.
        buckets: What the job's bucket is.
        scheduling: Of the job.
    """
    directory.mkdir()
    paths = [str(ROOT)]
    if program is SCRIPT:
        (directory / "train.py").write_text(program)
        runner = Host(entry_point=("python", str(directory / "train.py")))
        args = []
        paths.insert(0, str(LEAN))
    else:
        (directory / "config.yaml").write_text(program)
        runner = Host(directory=str(ROOT))
        args = ["--config", str(directory / "config.yaml")]
    news: list[str] = []
    lines: list[str] = []
    job = LocalJob(
        custom_job(args, roles, **scheduling),
        directory=directory,
        environ={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        runner=runner,
        buckets=buckets,
        say=news.append,
        show=lines.append,
    )
    output = directory / "gcs" / "bucket" / "run"

    def said() -> str:
        return "\n".join([*news, *lines[-80:]])

    def is_under_way(life: int) -> bool:
        """Whether a life of the job, from 0, has something that it would not like to lose."""
        if buckets == "local":
            commits = output.glob("checkpoints/backup/step-*")
            found = {match[1] for path in commits if (match := re.search(r"-i(\d+)-", path.name))}
            new = found - seen
            seen.update(found)
            return bool(new)
        begun = [number for number, line in enumerate(lines) if "Training digits" in line]
        epochs = [line for line in lines[begun[life] :] if "Epoch " in line] if begun[life:] else []
        return len(epochs) >= 2

    seen: set[str] = set()
    until = time.monotonic() + DEADLINE
    job.start()
    try:
        for life, replica in enumerate(kills):
            while not is_under_way(life):
                assert time.monotonic() < until and not job.state.is_final, said()
                time.sleep(0.01)
            os.kill(job.pids[replica], signal.SIGKILL)
        assert job.wait(until - time.monotonic()) is JobState.SUCCEEDED, said()
    finally:
        job.cancel(hurry=True)
        job.wait(20)
    return Outcome(output, news)


def assert_equal(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_replicas_that_train_together_go_on_exactly_after_one_is_killed(tmp_path):
    roles = {0: 1, 1: 1}
    peace = train(tmp_path / "peace", SCRIPT, roles)
    killed = train(
        tmp_path / "killed", SCRIPT, roles, "workerpool1-0", restartJobOnWorkerRestart=True
    )
    assert any("restarting all replicas, restart 1 of 5" in line for line in killed.news)
    first, second = killed.incarnations
    assert first["resumed_step"] == 0
    assert 0 < second["resumed_step"] < 40
    assert second["ended"] == "finished"
    assert_equal(killed.weights(), peace.weights())


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Training with a parameter server in peace."""
    return train(tmp_path_factory.mktemp("flights") / "peace", FLIGHTS, {0: 1, 1: 1, 2: 1})


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["workerpool2-0", "workerpool0-0"])
def test_a_lost_server_or_coordinator_leaves_no_trace_in_the_weights(tmp_path, flights, victim):
    killed = train(tmp_path / "killed", FLIGHTS, {0: 1, 1: 1, 2: 1}, victim)
    assert len(killed.incarnations) == 2
    assert killed.incarnations[1]["resumed_step"] > 0
    assert_equal(killed.weights(), flights.weights())


@pytest.mark.slow
@pytest.mark.parametrize("restart_all", [True, False])
def test_the_trainer_ends_with_the_weights_of_a_run_in_peace(tmp_path, restart_all):
    roles = {0: 1, 1: 1}
    peace = train(tmp_path / "peace", DIGITS, roles)
    kills = ("workerpool1-0", "workerpool0-0")
    killed = train(
        tmp_path / "killed", DIGITS, roles, *kills, restartJobOnWorkerRestart=restart_all
    )
    assert len(killed.incarnations) >= 3
    history = (killed.output / "logs" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in history] == ["epoch", *map(str, range(6))]
    assert_equal(killed.weights(), peace.weights())


@pytest.mark.slow
def test_a_lost_worker_of_parameter_servers_is_replaced_while_training_goes_on(tmp_path):
    outcome = train(tmp_path / "killed", FLIGHTS, {0: 1, 1: 2, 2: 1, 3: 1}, "workerpool1-1")
    assert len(outcome.incarnations) == 1
    assert any("worker 1 has ended with exit code 137" in line for line in outcome.news)
    assert sum("worker 1 is process" in line for line in outcome.news) == 2
    assert sum("chief is process" in line for line in outcome.news) == 1


@pytest.mark.slow
def test_the_trainer_goes_on_from_a_bucket_as_from_a_directory(tmp_path):
    peace = train(tmp_path / "peace", DIGITS, {0: 1})
    killed = train(tmp_path / "killed", DIGITS, {0: 1}, *["workerpool0-0"] * 2, buckets="emulator")
    assert len(killed.incarnations) == 3
    assert_equal(killed.weights(), peace.weights())
    tables = [(each.output / "logs" / "history.csv").read_text() for each in (peace, killed)]
    assert tables[0] == tables[1]
