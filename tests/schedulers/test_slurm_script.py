"""Batch scripts for Slurm, as text; tests/schedulers/test_slurm_cluster.py runs them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tfdist.errors import ConfigError
from tfdist.schedulers import plan as plans
from tfdist.schedulers import slurm

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
DIGITS = str(ROOT / "configs" / "digits-multiworker.yaml")
FLIGHTS = str(ROOT / "configs" / "flights-ps.yaml")

FULL = {
    "name": "full",
    "partition": "gpu",
    "account": "team-a",
    "qos": "high",
    "constraint": "a100&nvlink",
    "reservation": "mine",
    "time_limit": "1-12:00:00",
    "roles": {
        "chief": {"memory": "8G"},
        "worker": {"count": 4},
        "ps": {"count": 2, "cpus": 4, "memory": "100G"},
    },
    "tasks_per_node": 2,
    "cpus": 8,
    "memory": "32G",
    "gpus": 1,
    "exclusive": True,
    "output": "logs/my %x-%j.log",
    "working_directory": "/home/a b/work",
    "setup": ["module load cuda/12.8", "source .venv/bin/activate"],
    "env": {"DATA": "/data/it's $HOME"},
    "container_image": "registry#team/tfdist:1",
    "container_mounts": ["/data:/data", "/home/a b:/b"],
    "max_restarts": 5,
    "save_seconds": 300,
    "options": ["--mail-type=END"],
    "srun_options": ["--cpu-bind=none", "--comment=a b"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "slurm-sync": (DIGITS, {"roles": {"worker": {"count": 2}}, "time_limit": "90m"}),
    "slurm-full": (FLIGHTS, FULL),
}


def render(config: str, section: dict[str, Any]) -> str:
    overrides = [f"slurm.{key}={json.dumps(value)}" for key, value in section.items()]
    return slurm.render(*plans.load(config, "slurm", overrides))


def options(script: str) -> list[list[str]]:
    """Returns the options of each component."""
    parts: list[list[str]] = [[]]
    for option in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE):
        if option == "hetjob":
            parts.append([])
        else:
            parts[-1].append(option)
    return parts


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_those_that_were_looked_at(name):
    path = GOLDEN / f"{name}.sh"
    assert render(*CASES[name]) == path.read_text(), f"look at {path} again"


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_valid_for_bash(name):
    done = subprocess.run(
        ["bash", "-n"], input=render(*CASES[name]), text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_options_come_before_all_commands():
    head = render(*CASES["slurm-full"]).split("\n\nroles=")[0]
    for line in head.splitlines():
        assert not line or line.startswith("#")


def test_roles_that_need_other_machines_are_components_of_their_own():
    chief, workers, servers = options(render(FLIGHTS, FULL))
    assert {"--nodes=1", "--ntasks=1", "--mem=8G", "--time=1-12:00:00"} <= set(chief)
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--mem=64G"} <= set(workers)
    assert "--gpus-per-task=1" in workers
    assert {"--nodes=1", "--ntasks=2", "--cpus-per-task=4", "--mem=200G"} <= set(servers)
    assert not any("gpus" in option for option in [*chief, *servers])
    for component in (chief, workers, servers):
        assert {"--partition=gpu", "--account=team-a", "--exclusive"} <= set(component)


def test_roles_that_need_the_same_share_nodes():
    roles = {"chief": {}, "worker": {"count": 2}, "ps": {}, "evaluator": {}}
    (component,) = options(render(FLIGHTS, {"roles": roles, "tasks_per_node": 3}))
    assert {"--nodes=2", "--ntasks=5"} <= set(component)


@pytest.mark.parametrize(
    ("limit", "told"),
    [("90m", "0-01:30:00"), ("7d", "7-00:00:00"), ("61s", "0-00:01:01"), ("2:00:00", "2:00:00")],
)
def test_time_limits(limit, told):
    (component,) = options(render(DIGITS, {"time_limit": limit}))
    assert f"--time={told}" in component


def test_a_time_limit_that_is_not_set_is_told():
    made = plans.load(DIGITS, "slurm", ["slurm.roles.worker.count=2"])
    assert "slurm.time_limit" in slurm.warnings(*made)[0]
    made = plans.load(DIGITS, "slurm", ["slurm.roles.worker.count=2", "slurm.time_limit=1h"])
    assert slurm.warnings(*made) == ()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"name": "a b"}, ["slurm.name", "'a b'"]),
        ({"time_limit": "2 hours"}, ["slurm.time_limit", "'2 hours'", '"2h"']),
        ({"time_limit": 7200}, ["slurm.time_limit", "7200", "text"]),  # 2:00:00 without quotes
        ({"time_limit": 1.5}, ["slurm.time_limit"]),
        ({"memory": "16Gi"}, ["memory of chief", "16Gi", "16G"]),
        ({"cpus": 0}, ["cpus", "above 0"]),
        ({"cpus": 1.5}, ["slurm.cpus"]),
        ({"roles": {"worker": {"cpus": 1.5}}}, ["whole number", "worker"]),
        ({"tasks_per_node": 0}, ["tasks_per_node"]),
        ({"save_seconds": 1}, ["save_seconds"]),
        ({"save_seconds": 65536}, ["save_seconds"]),
        ({"stop_seconds": -1}, ["stop_seconds"]),
        ({"options": ["mail"]}, ["slurm.options"]),
        ({"options": ["--a\n#SBATCH --b"]}, ["slurm.options"]),
        ({"output": 'a"b'}, ["slurm.output"]),
        ({"partition": "a\nb"}, ["slurm.partition"]),
        ({"setup": ["#SBATCH --nodes=2"]}, ["slurm.setup", "slurm.options"]),
        ({"container_mounts": ["a:b"]}, ["container_image"]),
        ({"env": {"TF_CONFIG": "x"}}, ["TF_CONFIG"]),
        ({"roles": {"worker": {"count": 2}, "ps": {}}}, ["chief"]),
        ({"role": {}}, ["slurm.role", "roles"]),
    ],
)
def test_what_slurm_would_refuse_is_refused_here(section, words):
    with pytest.raises(ConfigError) as caught:
        render(DIGITS, section)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
