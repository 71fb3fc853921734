"""Batch scripts in a real Slurm of two nodes: `tfdist render --for slurm`, then sbatch."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.slurm import SlurmCluster
from tests.support.slurm import missing
from tfdist.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "digits-multiworker.yaml")

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


def script(directory: Path, settings: Mapping[str, Any], config: str = CONFIG) -> str:
    """Returns what `tfdist render` writes; settings are --set options."""
    path = directory / "rendered.sh"
    every = {
        "slurm.env": {
            "PYTHONPATH": str(ROOT),
            "TFDS_DATA_DIR": str(directory / "tfds"),
        },
        "slurm.time_limit": "10m",
        **settings,
    }
    options = [
        word for key, value in every.items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    code = main(["render", "--for", "slurm", config, *options, "--output", str(path), "--force"])
    assert code == 0
    return path.read_text()


def log_of(directory: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(directory.glob("*.log")))


def wait_for_text(directory: Path, text: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while text not in log_of(directory):
        assert time.monotonic() < deadline, f"no {text!r} in:\n{log_of(directory)}"
        time.sleep(0.2)


PROBE = [sys.executable, "-c"]
PRINT = """
import json, os, sys
from tfdist.cli.env import describe
where = describe(os.environ)
devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
line = {"node": os.environ["SLURMD_NODENAME"], "argument": sys.argv[1], **where}
line["gpus"] = str(len(devices.split(","))) if devices else ""
with open(f"{where['task']['type']}-{where['task']['index']}.json", "w") as file:
    json.dump(line, file)
"""


def probes(directory: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*-[0-9].json")}


def test_every_task_of_every_role_knows_its_place(slurm, tmp_path):
    odd = "a  b'c\"d $(touch bad) `touch bad` \\ é *"
    text = script(
        tmp_path,
        {
            "slurm.roles": {"chief": {}, "worker": {"count": 2}, "ps": {}, "evaluator": {}},
            "slurm.tasks_per_node": 3,
            "slurm.command": PROBE,
            "slurm.args": [PRINT, odd],
        },
    )
    assert slurm.wait(slurm.submit(text, tmp_path), 60) == ("COMPLETED", 0), log_of(tmp_path)
    found = probes(tmp_path)
    assert sorted(found) == ["chief-0", "evaluator-0", "ps-0", "worker-0", "worker-1"]
    assert {probe["node"] for probe in found.values()} == {"n1", "n2"}
    addresses = [address for tasks in found["ps-0"]["cluster"].values() for address in tasks]
    assert len(set(addresses)) == 4
    for probe in found.values():
        assert probe["cluster"] == found["chief-0"]["cluster"]
        assert probe["argument"] == odd
        assert not probe["warnings"]
    assert [name for name, probe in found.items() if probe["is_chief"]] == ["chief-0"]
    assert found["worker-1"]["strategy"] == "parameter_server"
    assert not (tmp_path / "bad").exists()
    assert not list(tmp_path.glob(".tfdist-*"))


def test_roles_that_need_different_machines_make_one_heterogeneous_job(slurm, tmp_path):
    text = script(
        tmp_path,
        {
            "slurm.roles": {"chief": {"cpus": 1}, "worker": {"count": 2, "cpus": 2, "gpus": 1}},
            "slurm.tasks_per_node": 2,
            "slurm.command": PROBE,
            "slurm.args": [PRINT, ""],
        },
    )
    assert slurm.wait(slurm.submit(text, tmp_path), 60) == ("COMPLETED", 0), log_of(tmp_path)
    found = probes(tmp_path)
    assert sorted(found) == ["chief-0", "worker-0", "worker-1"]
    assert found["chief-0"]["node"] != found["worker-0"]["node"] == found["worker-1"]["node"]
    assert [len(tasks) for tasks in found["chief-0"]["cluster"].values()] == [1, 2]


def test_components_get_what_they_asked_for_and_not_what_the_first_did(slurm, tmp_path):
    text = script(
        tmp_path,
        {
            "slurm.roles": {
                "worker": {"count": 2, "gpus": 1, "cpus": 2, "memory": "1500M"},
                "evaluator": {"memory": "100M", "cpus": 1},
            },
            "slurm.tasks_per_node": 2,
            "slurm.command": PROBE,
            "slurm.args": [PRINT, ""],
        },
    )
    job = slurm.submit(text, tmp_path)
    assert slurm.wait(job, 60) == ("COMPLETED", 0), log_of(tmp_path)
    found = probes(tmp_path)
    assert {name: probe["gpus"] for name, probe in found.items()} == {
        "worker-0": "1",
        "worker-1": "1",
        "evaluator-0": "",
    }
    assert "arning" not in log_of(tmp_path)


def test_a_program_that_is_not_there_is_told_at_once(slurm, tmp_path):
    job = slurm.submit(script(tmp_path, {"slurm.command": ["no-such-python"]}), tmp_path)
    assert slurm.wait(job, 30) == ("FAILED", 2)
    assert "no program no-such-python here" in log_of(tmp_path)


FAIL = """
import os, sys, time
n = os.environ.get("SLURM_RESTART_COUNT", "0")
print("start", n, os.environ["SLURM_PROCID"], flush=True)
if os.environ["SLURM_PROCID"] == "1":
    sys.exit(int(sys.argv[1 + int(n)]))
time.sleep(60 if sys.argv[1 + int(n)] != "0" else 0)
"""


def failing(directory: Path, *codes: int, **settings: int) -> str:
    return script(
        directory,
        {
            "slurm.roles": {"worker": {"count": 2}},
            "slurm.stop_seconds": 1,
            "slurm.command": PROBE,
            "slurm.args": [FAIL, *map(str, codes)],
            **{f"slurm.{key}": value for key, value in settings.items()},
        },
    )


def test_a_mistake_in_the_configuration_ends_the_job_for_good(slurm, tmp_path):
    job = slurm.submit(failing(tmp_path, 2, 0), tmp_path)
    assert slurm.wait(job, 30) == ("FAILED", 2), log_of(tmp_path)
    assert slurm.field(job, "Restarts") == "0"


@pytest.mark.slow  # Slurm waits ten seconds before it starts a job again.
def test_a_failure_is_tried_again_as_often_as_was_said(slurm, tmp_path):
    job = slurm.submit(failing(tmp_path, 7, 9, max_restarts=1), tmp_path)
    assert slurm.wait(job, 60) == ("FAILED", 9), log_of(tmp_path)
    assert slurm.field(job, "Restarts") == "1"
    assert "ended with exit code 7: queued again" in log_of(tmp_path)


SAVE = """
import os, signal, sys, time
from tfdist.cluster import detect
task = detect().task
start = os.environ.get("SLURM_RESTART_COUNT", "0")
def save(*_):
    time.sleep(2)  # Servers must still be there.
    open(f"saved-{start}", "w").close()
    sys.exit(143)
if task.type == "chief":
    signal.signal(signal.SIGTERM, save)
open(f"up-{start}-{task.type}", "w").close()
deadline = time.monotonic() + float(sys.argv[1])
while time.monotonic() < deadline:
    time.sleep(0.1)
    if task.type in ("worker", "ps") and os.path.exists(f"saved-{start}"):
        open(f"served-{start}-{task.type}", "w").close()
        sys.exit(0)
sys.exit(9)
"""
ROLES = ("chief", "evaluator", "ps", "worker")


def saving(directory: Path, seconds: int, **settings: Any) -> str:
    return script(
        directory,
        {
            "slurm.roles": {role: {} for role in ROLES},
            "slurm.tasks_per_node": 2,
            "slurm.command": PROBE,
            "slurm.args": [SAVE, str(seconds)],
            "slurm.max_restarts": 0,  # After a preemption that is no limit.
            **{f"slurm.{key}": value for key, value in settings.items()},
        },
    )


def wait_for_files(directory: Path, names: list[str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while missing_ones := [name for name in names if not (directory / name).exists()]:
        assert time.monotonic() < deadline, f"no {missing_ones} in:\n{log_of(directory)}"
        time.sleep(0.1)


def test_a_job_that_is_queued_again_or_cancelled_has_time_to_save(slurm, tmp_path):
    job = slurm.submit(saving(tmp_path, 30), tmp_path)
    wait_for_files(tmp_path, [f"up-0-{role}" for role in ROLES], 20)
    slurm.run("scontrol", "requeue", str(job))
    wait_for_files(tmp_path, ["saved-0", "served-0-ps", "served-0-worker"], 10)
    wait_for_files(tmp_path, [f"up-1-{role}" for role in ROLES], 40)
    slurm.run("scancel", str(job))
    wait_for_files(tmp_path, ["saved-1", "served-1-ps", "served-1-worker"], 10)
    slurm.wait_for(job, ("CANCELLED",), 20)
    assert slurm.field(job, "Restarts") == "1"


@pytest.mark.slow  # It waits: a minute is the shortest limit.
def test_before_the_time_limit_a_job_saves_and_is_queued_again(slurm, tmp_path):
    text = saving(tmp_path, 110, time_limit="2m", save_seconds=60)
    job = slurm.submit(text, tmp_path)
    wait_for_files(tmp_path, [f"up-0-{role}" for role in ROLES], 20)
    wait_for_files(tmp_path, ["saved-0", "served-0-ps", "served-0-worker"], 100)
    assert "the time limit is near: saving" in log_of(tmp_path)
    wait_for_files(tmp_path, [f"up-1-{role}" for role in ROLES], 40)
    assert "ended with exit code 143: queued again, after 0 restarts" in log_of(tmp_path)
    slurm.run("scancel", str(job))
    slurm.wait_for(job, ("CANCELLED",), 20)


def training(directory: Path, **more: Any) -> str:
    return script(
        directory,
        {
            "slurm.roles": {"worker": {"count": 2}},
            "slurm.command": [sys.executable, "-m", "trainer.task"],
            "output.directory": str(directory / "out"),
            "output.tensorboard": False,
            "training.epochs": 2,
            **more,
        },
    )


def result(directory: Path) -> Any:
    return json.loads((directory / "out" / "model" / "metrics.json").read_text())


@pytest.mark.slow
def test_digits_trains_on_two_nodes(slurm, tmp_path):
    job = slurm.submit(training(tmp_path), tmp_path)
    assert slurm.wait(job, 180) == ("COMPLETED", 0), log_of(tmp_path)
    found = result(tmp_path)
    assert (found["epochs"], found["replicas"]) == (2, 2)
    assert found["test"]["accuracy"] > 0.8


@pytest.mark.slow
def test_a_training_that_is_requeued_goes_on_where_it_was(slurm, tmp_path):
    text = training(tmp_path, **{"training.epochs": 200, "output.backup": 10})
    job = slurm.submit(text, tmp_path)
    wait_for_text(tmp_path, "Epoch 3/", 120)
    slurm.run("scontrol", "requeue", str(job))
    wait_for_text(tmp_path, "preempted at step", 90)
    step = int(re.findall(r"preempted at step (\d+)", log_of(tmp_path))[0])
    slurm.wait_for(job, ("PENDING",), 60)
    before = log_of(tmp_path)
    wait_for_text(tmp_path, f"training goes on after {step} steps", 120)
    epoch = max(int(found) for found in re.findall(r"Epoch (\d+)/", before))
    wait_for_text(tmp_path, f"Epoch {epoch + 2}/", 120)
    slurm.run("scancel", str(job))
    slurm.wait_for(job, ("CANCELLED",), 60)
    assert slurm.field(job, "Restarts") == "1"
    deadline = time.monotonic() + 60
    while (log := log_of(tmp_path)).count("Ending with exit code 143") < 4:
        assert time.monotonic() < deadline, log
        time.sleep(0.2)
    assert log.count("Epoch 1/") == before.count("Epoch 1/"), "it has begun anew"
    assert int(re.findall(r"preempted at step (\d+)", log)[-1]) > step


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_saves_before_its_servers_end(slurm, tmp_path):
    text = script(
        tmp_path,
        {
            "slurm.roles": {"chief": {}, "worker": {}, "ps": {}},
            "slurm.tasks_per_node": 2,
            "slurm.command": [sys.executable, "-m", "trainer.task"],
            "output.directory": str(tmp_path / "out"),
            "output.tensorboard": False,
            "output.backup": 20,
            "experiment.options.max_rows": 20_000,
            "training.epochs": 40,
        },
        str(ROOT / "configs" / "flights-ps.yaml"),
    )
    job = slurm.submit(text, tmp_path)
    wait_for_text(tmp_path, "Epoch 2/", 120)
    slurm.run("scontrol", "requeue", str(job))
    wait_for_text(tmp_path, "preempted at step", 60)
    step = int(re.findall(r"preempted at step (\d+), which is saved", log_of(tmp_path))[0])
    wait_for_text(tmp_path, f"training goes on after {step} steps", 120)
    slurm.run("scancel", str(job))
    slurm.wait_for(job, ("CANCELLED",), 60)
