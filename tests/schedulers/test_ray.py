"""The script for Ray Train; with Ray installed (not an extra: 350 MB) it runs, too."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import ConfigError
from tfdist.schedulers import plan as plans
from tfdist.schedulers import ray
from tfdist.schedulers import ray_worker

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "digits-ray.py.txt"
DIGITS = str(ROOT / "configs" / "digits-multiworker.yaml")
FLIGHTS = str(ROOT / "configs" / "flights-ps.yaml")

FULL = {
    "roles": {"chief": {}, "worker": {"count": 3}},
    "address": "auto",
    "cpus": 2,
    "memory": "1.5Gi",
    "gpus": 1,
    "resources": {"fast": 0.5},
    "placement": "SPREAD",
    "storage_path": "/shared/ray",
    "env": {"A": 'x "y" {z}\\'},
    "max_restarts": 7,
}


def render(section: dict[str, Any], config: str = DIGITS, *more: str) -> str:
    overrides = [f"ray.{key}={json.dumps(value)}" for key, value in section.items()]
    return ray.render(*plans.load(config, "ray", [*overrides, *more]))


def test_the_script_is_the_one_that_was_looked_at():
    assert render(FULL) == GOLDEN.read_text(), f"look at {GOLDEN} again"


def test_the_script_says_what_the_config_says():
    tree = ast.parse(render(FULL))
    calls = {
        node.func.id: {word.arg: ast.unparse(word.value) for word in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    scaling = calls["ScalingConfig"]
    assert (scaling["num_workers"], scaling["use_gpu"]) == ("4", "True")
    assert ast.literal_eval(scaling["resources_per_worker"]) == {
        "CPU": 2, "GPU": 1, "memory": 1610612736, "fast": 0.5,
    }  # fmt: skip
    assert calls["FailureConfig"] == {"max_failures": "7"}
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert values["ENVIRONMENT"] == FULL["env"]
    assert values["PROGRAM"][:4] == ["python", "-m", "trainer.task", "--config"]
    assert json.loads(values["PROGRAM"][4])["experiment"]["name"] == "digits"


def test_one_worker_where_no_roles_are_named():
    assert "num_workers=1," in render({})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"roles": {"chief": {}, "worker": {}, "ps": {}}}, ["no ps for Ray", "TF_CONFIG"]),
        ({"roles": {"worker": {}, "evaluator": {}}}, ["no evaluator for Ray", "tfdist run"]),
        ({"roles": {"chief": {"cpus": 1}, "worker": {"cpus": 2}}}, ["same resources"]),
        ({"memory": "16"}, ["memory", "'16'"]),
        ({"resources": {"GPU": 1}}, ["ray.gpus"]),
        ({"name": 'a"b'}, ["ray.name"]),
        ({"placement": "pack"}, ["ray.placement"]),
    ],
)
def test_what_ray_cannot_do_is_refused(section, words):
    with pytest.raises(ConfigError) as caught:
        render(section)
    for word in words:
        assert word in str(caught.value)


def run(tmp_path: Path, code: str, **environment: str) -> None:
    config = {
        "program": ["python", "-c", code, str(tmp_path)],
        "environment": environment,
        "grace_seconds": 5,
    }
    ray_worker.run_program(config)


def test_a_program_gets_tf_config_and_keras_3(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.setenv("TF_CONFIG", "{}")
    code = "import os, sys, json; json.dump(dict(os.environ), open(sys.argv[1] + '/e', 'w'))"
    run(tmp_path, code, A="b")
    environ = json.loads((tmp_path / "e").read_text())
    assert "TF_USE_LEGACY_KERAS" not in environ
    assert (environ["TF_CONFIG"], environ["A"]) == ("{}", "b")


@pytest.mark.parametrize(("code", "told"), [("7", 7), ("os.kill(os.getpid(), 15)", 143)])
def test_how_a_program_ends_is_told(tmp_path, code, told):
    with pytest.raises(ray_worker.ProgramFailedError) as caught:
        run(tmp_path, f"import os, sys; sys.exit({code})")
    assert ray_worker.exit_code(caught.value) == told


def test_a_mistake_in_the_configuration_is_told_before_the_failures_of_the_others():
    error = RuntimeError("worker 0 ended with exit code 143; worker 1 ended with exit code 2")
    assert ray_worker.exit_code(error) == 2
    assert ray_worker.exit_code(ValueError("something else")) == 1


def test_the_program_of_a_worker_that_dies_is_told_to_save(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "def save(*_):\n    open(sys.argv[1] + '/saved', 'w').close(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(sys.argv[1] + '/up', 'w').close()\n"
        "time.sleep(60)"
    )
    config = {
        "program": ["python", "-c", code, str(tmp_path)],
        "environment": {},
        "grace_seconds": 1,
    }
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from tfdist.schedulers.ray_worker import run_program; run_program({config!r})",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert _appears(tmp_path / "up")
        worker.send_signal(signal.SIGKILL)
        assert _appears(tmp_path / "saved")
    finally:
        worker.kill()
        worker.wait()


def _appears(path: Path, timeout: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'ray[train]'")
def test_two_workers_of_ray_train_and_go_on_after_one_was_killed(tmp_path):
    script = tmp_path / "job.py"
    section = {
        "roles": {"worker": {"count": 2}},
        "storage_path": str(tmp_path / "ray"),
        "env": {"TFDS_DATA_DIR": str(tmp_path / "tfds"), "PYTHONPATH": str(ROOT)},
        "max_restarts": 2,
    }
    script.write_text(
        render(
            section,
            DIGITS,
            f"output.directory={tmp_path / 'out'}",
            "output.tensorboard=false",
            "output.backup=5",
            "training.epochs=6",
        )
    )
    log = tmp_path / "log"
    with log.open("wb") as file:
        job = subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 120
            while "Epoch 3/" not in log.read_text():
                assert time.monotonic() < deadline and job.poll() is None, log.read_text()[-5000:]
                time.sleep(0.2)
            victims = _programs(str(tmp_path))
            assert len(victims) == 2
            os.kill(victims[-1], signal.SIGKILL)
            assert job.wait(150) == 0, log.read_text()[-5000:]
        finally:
            job.kill()
            job.wait()
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
    found = json.loads((tmp_path / "out" / "model" / "metrics.json").read_text())
    assert (found["epochs"], found["replicas"]) == (6, 2)
    assert text.count("Epoch 1/6") == 1, "it has begun anew"
    assert "exit code 137" in text or "exit code 1" in text


def _programs(mark: str) -> list[int]:
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "trainer.task" in words and any(mark in word for word in words):
            found.append(process.pid)
    return sorted(found)
