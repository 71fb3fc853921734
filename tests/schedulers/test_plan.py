"""The plan that every scheduler is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfdist.errors import ConfigError
from tfdist.schedulers import plan as plans
from trainer import config

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "configs" / "digits-multiworker.yaml")


def load(*overrides: str, scheduler: str = "slurm", path: str = DIGITS) -> plans.Plan:
    return plans.load(path, scheduler, overrides)[0]


def test_without_a_section_one_process_trains():
    plan = load()
    assert [(task.role, task.count) for task in plan.tasks] == [("chief", 1)]
    assert (plan.name, plan.strategy, plan.main_role) == ("digits-multiworker", "default", "chief")


def test_the_strategy_is_the_one_that_the_tasks_will_choose():
    assert load("slurm.roles={worker: {count: 2}}").strategy == "multi_worker"
    assert load("slurm.roles={chief: {}, worker: {}, ps: {}}").strategy == "parameter_server"
    assert load("slurm.gpus=2").strategy == "mirrored"
    assert load("slurm.gpus=2", "strategy.name=default").strategy == "default"
    assert load("slurm.roles={worker: {}}").main_role == "worker"


def test_a_role_has_its_own_resources_or_those_of_the_section():
    plan = load(
        "slurm.cpus=2",
        "slurm.memory=4G",
        "slurm.gpus=1",
        "slurm.roles={chief: {cpus: 1}, worker: {gpus: 3}, ps: {memory: 9G}, evaluator: {gpus: 1}}",
    )
    assert {task.role: task.resources for task in plan.tasks} == {
        "chief": (1, "4G", 0),  # It coordinates.
        "worker": (2, "4G", 3),
        "ps": (2, "9G", 0),
        "evaluator": (2, "4G", 1),
    }


def test_what_is_set_on_the_way_travels_with_the_config(tmp_path):
    plan = load("training.epochs=7", "experiment.options.filters=8", "slurm.name=x")
    assert plan.command[:4] == ("python", "-m", "trainer.task", "--config")
    assert "slurm" not in json.loads(plan.command[4])
    there = config.load(plan.command[4])
    assert (there.training.epochs, there.experiment.options.filters) == (7, 8)
    assert there.output.directory == "runs/digits-multiworker"


def test_a_config_by_value_is_named_after_its_experiment(tmp_path):
    value = '{"experiment": {"name": "digits"}}'
    assert load(path=value).name == "digits"
    odd = tmp_path / "my job (2).yaml"
    odd.write_text("experiment: {name: digits}\n")
    assert load(path=str(odd)).name == "my-job-2"


def test_several_mistakes_of_a_section_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load("slurm.roles={wroker: {}}", "slurm.cpus=two", "slurm.partiton=a")
    for word in ("did you mean slurm.roles.worker?", "slurm.cpus", "slurm.partition?"):
        assert word in str(caught.value)
