from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tfdist.state import surroundings
from tfdist.state.code_version import code_version
from tfdist.state.provenance import Provenance

GIT = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]


def load(directory) -> dict:
    with open(os.path.join(directory, "run.json"), encoding="utf-8") as file:
        return json.load(file, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


@pytest.fixture
def repository(tmp_path):
    path = tmp_path / "code"
    path.mkdir()
    (path / "train.py").write_text("print(1)\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *command], cwd=path, check=True)
    return path


def test_code_is_told_by_its_commit_and_by_what_was_changed(repository):
    clean = code_version(str(repository))
    head = subprocess.run([*GIT, "rev-parse", "HEAD"], cwd=repository, capture_output=True)
    assert clean["commit"] == head.stdout.decode().strip()
    assert clean["dirty"] is False and "diff_sha256" not in clean
    (repository / "train.py").write_text("print(2)\n")
    changed = code_version(str(repository))
    assert changed["dirty"] is True and changed["changed"] == ["train.py"]
    (repository / "train.py").write_text("print(3)\n")
    assert code_version(str(repository))["diff_sha256"] != changed["diff_sha256"]
    (repository / "train.py").write_text("print(2)\n")
    assert code_version(str(repository))["diff_sha256"] == changed["diff_sha256"]
    (repository / "train.py").write_text("print(1)\n")
    (repository / "new.py").write_text("")
    assert code_version(str(repository))["changed"] == ["new.py"]


def test_without_git_or_a_repository_the_reason_is_told(tmp_path, monkeypatch):
    assert "not a git repository" in code_version(str(tmp_path))["reason"]
    assert "commit" not in code_version(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(str(tmp_path))["reason"] == "git is not installed"


def test_a_git_that_hangs_costs_a_second_not_the_run(tmp_path, monkeypatch):
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    assert code_version(str(tmp_path), seconds=0.3)["reason"] == "git took more than 0.3 s"
    assert time.monotonic() - began < 5


def test_commands_that_a_repository_configures_are_not_run(repository, tmp_path):
    mark = tmp_path / "ran"
    for key in ("diff.external", "core.fsmonitor", "core.pager"):
        subprocess.run([*GIT, "config", key, f"touch {mark}; true"], cwd=repository, check=True)
    (repository / "train.py").write_text("print(2)\n")
    assert code_version(str(repository))["dirty"] is True
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TF_API_TOKEN", "x"),
        ("TFDIST_DB_PASSWORD", "x"),
        ("NCCL_AUTH", "x"),
        ("CUDA_SECRET_THING", "x"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/x.json"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("MY_OWN_VARIABLE", "x"),
        ("TF_PLAIN", "AKIAIOSFODNN7EXAMPLE"),
        ("TF_PLAIN", "-----BEGIN RSA PRIVATE KEY-----"),
        ("TF_PLAIN", "https://user:hunter2@host/path"),
        ("TF_PLAIN", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc"),
        ("TF_PLAIN", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYaZ09"),
        ("TF_PLAIN", "gs://b/o?sig=abc"),
    ],
)
def test_secrets_and_variables_that_change_nothing_are_left_out(tmp_path, name, value):
    Provenance.start(tmp_path, environ={name: value, "TF_NUM": "1"})
    text = (tmp_path / "run.json").read_text()
    assert load(tmp_path)["environment"] == {"TF_NUM": "1"}
    assert f'"{name}": ' not in text
    if len(value) > 8:
        assert value not in text


def test_ordinary_values_are_no_secrets():
    environ = {
        "TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}',
        "XLA_FLAGS": "--xla_gpu_strict_conv_algorithm_picker=false --xla_dump_to=/tmp/Some/Dir_01",
        "LD_LIBRARY_PATH": "/usr/local/cuda-12.3/lib64:/opt/NVIDIA/Nsight_Systems-2024/lib",
        "AIP_MODEL_DIR": "gs://bucket/aiplatform-custom-training-2026-11-30-12:00:00.123/model/",
        "SLURM_JOB_NODELIST": "node[001-128]",
    }
    told, left_out = surroundings.environment(environ)
    assert told == environ and left_out == []


def test_of_a_cluster_description_only_the_cluster_is_told():
    spec = {
        "cluster": {"workerpool0": ["a:1"]},
        "task": {"type": "workerpool0", "index": 0},
        "job": '{"worker_pool_specs": [{"container_spec": {"env": ["hunter2"]}}]}',
    }
    told, _ = surroundings.environment({"CLUSTER_SPEC": json.dumps(spec)})
    assert "hunter2" not in told["CLUSTER_SPEC"]
    assert json.loads(told["CLUSTER_SPEC"])["cluster"] == spec["cluster"]


def test_secrets_in_parameters_and_on_the_command_line_are_left_out():
    parameters = {"lr": 0.1, "max_tokens": 512, "key_dim": 64, "pad_token": "<pad>", "n": None}
    assert surroundings.without_secrets(parameters) == parameters
    nested = surroundings.without_secrets({"db": {"password": "p"}, "l": [{"api_key": "k"}]})
    assert nested == {"db": {"password": "(left out)"}, "l": [{"api_key": "(left out)"}]}
    line = ["train.py", "--lr=0.1", "--api-key=k", "--password", "p", "--steps", "3"]
    assert surroundings.command_line(line) == [
        *("train.py", "--lr=0.1", "--api-key=(left out)"),
        *("--password", "(left out)", "--steps", "3"),
    ]


def test_what_was_given_is_told_as_json_can_say_it(tmp_path):
    facts = {
        "data": {"name": "mnist", "fingerprint": "ab"},
        "parameters": {"lr": np.float32(0.5), "worst": float("nan"), "layer": object},
        "seeds": {"global": 7},
        "topology": {"workers": 2},
    }
    record = Provenance.start(tmp_path / "new dir", facts)
    record.finish({"loss": float("inf")})
    found = load(tmp_path / "new dir")
    assert found["data"] == facts["data"] and found["seeds"] == {"global": 7}
    assert found["parameters"]["lr"] == 0.5 and found["parameters"]["worst"] is None
    assert found["parameters"]["layer"] == "<class 'object'>"
    assert found["incarnations"][0]["topology"] == {"workers": 2}
    assert found["result"] == {"loss": None} and found["finished"]
    assert found["packages"]["numpy"] == np.__version__
    assert sorted(os.listdir(tmp_path / "new dir")) == ["run.json"]


CHILD = """
import os, signal, sys, time
from tfdist.state.provenance import Provenance

directory, resumed, saved, last = sys.argv[1], *map(int, sys.argv[2:5])
record = Provenance.start(directory, environ={})
if resumed >= 0:
    record.resumed(resumed)
for step in range(max(0, resumed) + 1, last + 1):
    time.sleep(0.01)
    record.progress(step)
    if step == saved:
        record.saved(step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(directory, resumed: int, saved: int, last: int) -> None:
    arguments = [str(directory), str(resumed), str(saved), str(last)]
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], timeout=60)
    assert done.returncode == -9


def test_restarts_are_counted_with_the_steps_and_seconds_that_they_lost(tmp_path):
    killed(tmp_path, -1, 20, 35)
    live = Provenance.read(tmp_path)
    assert live is not None and live["incarnations"][0]["last_step"] == 35
    assert live["restarts"]["count"] == 0
    time.sleep(0.3)
    killed(tmp_path, 20, 40, 40)
    record = Provenance.start(tmp_path)
    record.resumed(40)
    for step in range(41, 44):
        time.sleep(0.01)
        record.progress(step)
    record.finish()
    found = load(tmp_path)
    first, second, third = found["incarnations"]
    assert (first["last_step"], first["saved_step"], first["steps_lost"]) == (35, 20, 15)
    assert 0.1 < first["seconds_redone"] < 5
    assert (second["resumed_step"], second["steps_lost"], second["seconds_redone"]) == (20, 0, 0)
    assert second["seconds_down"] > 0.3
    assert third["ended"] == "finished" and second["ended"] == "without a word"
    assert found["restarts"]["count"] == 2 and found["restarts"]["steps_lost"] == 15
    lost = first["seconds_redone"] + second["seconds_down"] + third["seconds_down"]
    assert found["restarts"]["seconds_lost"] == pytest.approx(lost)
    goodput = found["goodput"]
    worked = sum(e["last_step_seconds"] - e["first_step_seconds"] for e in found["incarnations"])
    assert goodput["useful_seconds"] == pytest.approx(worked - first["seconds_redone"])
    whole = third["last_step_seconds"] - first["started_seconds"]
    assert goodput["all_seconds"] == pytest.approx(whole)
    assert goodput["goodput"] == pytest.approx(goodput["useful_seconds"] / whole)
    assert 0 < goodput["goodput"] < 1
    assert os.listdir(tmp_path) == ["run.json"]


def test_what_changed_between_incarnations_is_told(tmp_path):
    Provenance.start(tmp_path, {"parameters": {"lr": 0.1}}, environ={}).stop("preempted")
    Provenance.start(tmp_path, {"parameters": {"lr": 0.2}}, environ={})
    first, second = load(tmp_path)["incarnations"]
    assert first["ended"] == "preempted"
    assert second["changes"] == {"parameters": {"before": {"lr": 0.1}, "now": {"lr": 0.2}}}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "tfdist-run"}', "\x00" * 9])
def test_a_damaged_record_is_kept_aside_and_stops_nothing(tmp_path, text, caplog):
    (tmp_path / "run.json").write_text(text)
    with caplog.at_level(logging.WARNING, "absl"):
        record = Provenance.start(tmp_path)
    record.progress(1)
    assert load(tmp_path)["incarnations"][0]["number"] == 1
    (aside,) = tmp_path.glob("run.json.damaged-*")
    assert aside.read_text() == text and str(aside) in caplog.text


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "absl"):
        record = Provenance.start(tmp_path / "file" / "sub")
        record.resumed(3)
        record.progress(4)
        record.saved(4)
        record.finish()
    assert len(caplog.records) == 1
    assert "is not kept up" in caplog.text


def test_an_old_incarnation_that_wakes_up_does_not_overwrite_the_new_ones_record(tmp_path):
    old = Provenance.start(tmp_path)
    old.progress(5)
    new = Provenance.start(tmp_path)
    new.resumed(3)
    old.progress(6)
    old.finish()
    new.progress(4)
    entries = load(tmp_path)["incarnations"]
    assert [entry["number"] for entry in entries] == [1, 2]
    assert entries[0]["ended"] == "without a word" and entries[0]["steps_lost"] == 2
    assert "finished" not in load(tmp_path)


def test_a_heartbeat_costs_microseconds(tmp_path):
    record = Provenance.start(tmp_path)
    times = []
    for step in range(2000):
        began = time.perf_counter()
        record.progress(step)
        times.append(time.perf_counter() - began)
    assert sorted(times)[1000] < 100e-6
