"""The choice of a strategy: a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfdist.cluster import Cluster
from tfdist.cluster import Task
from tfdist.cluster import detect
from tfdist.errors import StrategyError
from tfdist.strategies.choose import NAMES
from tfdist.strategies.choose import choose
from tfdist.strategies.choose import requested
from tfdist.strategies.hardware import Hardware

CPU = Hardware()
ONE_GPU = Hardware(1, "gpu")
FOUR_GPUS = Hardware(4, "gpu")


def make(type: str = "worker", index: int = 0, **addresses: int) -> Cluster:
    """Returns a cluster with so many tasks of each role."""
    named = {
        role: [f"{role}{number}:1" for number in range(count)] for role, count in addresses.items()
    }
    value = {"cluster": named, "task": {"type": type, "index": index}}
    return detect({"TF_CONFIG": json.dumps(value)})


ALONE = detect({})
TPU = detect({"TPU_NAME": "pod"})
TPU_SLICE = detect({"TPU_NAME": "pod", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"})
TWO = make(worker=2)
CHIEF = make("chief", chief=1)
SERVERS = make("chief", chief=1, worker=2, ps=1)
EVALUATOR = make("evaluator", chief=1, worker=2)
EVALUATOR_OF_SERVERS = make("evaluator", chief=1, worker=2, ps=1)

TABLE: list[tuple[Cluster, Hardware | None, dict[str, Any], str]] = [
    (ALONE, None, {}, "default"),
    (ALONE, CPU, {}, "default"),
    (ALONE, ONE_GPU, {}, "default"),
    (ALONE, FOUR_GPUS, {}, "mirrored"),
    (ALONE, CPU, {"replicas": 2}, "mirrored"),
    (ALONE, CPU, {"replicas": 1}, "default"),
    (ALONE, FOUR_GPUS, {"replicas": 1}, "default"),
    (CHIEF, CPU, {}, "default"),
    (CHIEF, FOUR_GPUS, {}, "mirrored"),
    (make(worker=1), FOUR_GPUS, {}, "mirrored"),
    (TWO, CPU, {}, "multi_worker"),
    (TWO, FOUR_GPUS, {}, "multi_worker"),
    (make("chief", chief=1, worker=1), CPU, {}, "multi_worker"),
    (SERVERS, CPU, {}, "parameter_server"),
    (make("ps", chief=1, worker=1, ps=2), CPU, {}, "parameter_server"),
    (make("worker", chief=1, worker=1, ps=1), FOUR_GPUS, {}, "parameter_server"),
    (EVALUATOR, CPU, {}, "default"),
    (EVALUATOR, FOUR_GPUS, {}, "mirrored"),
    (EVALUATOR_OF_SERVERS, CPU, {}, "default"),
    (TPU, CPU, {}, "tpu"),
    (TPU_SLICE, CPU, {}, "tpu"),
    # By name.
    (ALONE, CPU, {"name": "default"}, "default"),
    (ALONE, FOUR_GPUS, {"name": "default"}, "default"),
    (ALONE, CPU, {"name": "mirrored"}, "mirrored"),
    (ALONE, CPU, {"name": "mirrored", "replicas": 2}, "mirrored"),
    (ALONE, CPU, {"name": "multi_worker"}, "multi_worker"),
    (ALONE, CPU, {"name": "Multi-Worker"}, "multi_worker"),
    (ALONE, CPU, {"name": " MIRRORED "}, "mirrored"),
    (TWO, CPU, {"name": "multi_worker"}, "multi_worker"),
    (SERVERS, CPU, {"name": "parameter_server"}, "parameter_server"),
    (TPU, CPU, {"name": "default"}, "default"),
    (TPU, CPU, {"name": "tpu"}, "tpu"),
    (EVALUATOR, CPU, {"name": "mirrored"}, "mirrored"),
    (EVALUATOR, CPU, {"name": "multi_worker"}, "default"),
    (EVALUATOR, FOUR_GPUS, {"name": "multi_worker"}, "mirrored"),
    (EVALUATOR_OF_SERVERS, CPU, {"name": "parameter_server"}, "default"),
]


@pytest.mark.parametrize(("cluster", "hardware", "asked", "expected"), TABLE)
def test_choice(
    cluster: Cluster, hardware: Hardware | None, asked: dict[str, Any], expected: str
) -> None:
    choice = choose(cluster, hardware, **asked)
    assert choice.name == expected
    assert choice.reasons
    assert all(reason.endswith(".") for reason in choice.reasons + choice.warnings)


@pytest.mark.parametrize(
    ("cluster", "asked", "words"),
    [
        (TWO, {"name": "mirrored"}, ["mirrored", "2 workers", "use multi_worker"]),
        (TWO, {"name": "default"}, ["default", "2 workers", "use multi_worker"]),
        (SERVERS, {"name": "mirrored"}, ["parameter servers", "use parameter_server"]),
        (SERVERS, {"name": "multi_worker"}, ["parameter servers"]),
        (TPU_SLICE, {"name": "mirrored"}, ["use tpu"]),
        (TWO, {"name": "parameter_server"}, ["ps"]),
        (ALONE, {"name": "parameter_server"}, ["ps", "one process"]),
        (EVALUATOR, {"name": "parameter_server"}, ["ps"]),
        (EVALUATOR_OF_SERVERS, {"name": "multi_worker"}, ["parameter servers"]),
        (ALONE, {"name": "tpu"}, ["TPU_NAME"]),
        (TWO, {"name": "tpu"}, ["TPU"]),
        (ALONE, {"name": "nonsense"}, list(NAMES)),
        (ALONE, {"name": "miror"}, ["did you mean mirrored"]),
        (ALONE, {"name": "MirroredStrategy"}, ["did you mean mirrored"]),
        (ALONE, {"name": "multiworker"}, ["did you mean multi_worker"]),
        (ALONE, {"name": "ParameterServerStrategy"}, ["did you mean parameter_server"]),
        (ALONE, {"name": ""}, list(NAMES)),
        (TWO, {"replicas": 2}, ["replicas=2", "multi_worker"]),
        (SERVERS, {"replicas": 2}, ["replicas=2"]),
        (ALONE, {"name": "default", "replicas": 2}, ["replicas=2", "default"]),
        (ALONE, {"replicas": 0}, ["replicas=0"]),
        (ALONE, {"replicas": -1}, ["replicas=-1"]),
        (ALONE, {"replicas": True}, ["replicas=True"]),
        (ALONE, {"replicas": 2.0}, ["replicas=2.0"]),
    ],
)
def test_what_cannot_work_is_refused_with_reason_and_fix(
    cluster: Cluster, asked: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(StrategyError) as caught:
        choose(cluster, CPU, **asked)
    assert caught.value.exit_code == 2
    assert "Fix: " in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_plugin_is_known_by_name_and_never_refused() -> None:
    assert choose(TWO, CPU, name="mine", known=(*NAMES, "mine")).name == "mine"


@pytest.mark.parametrize(
    ("promised", "hardware", "name", "warns"),
    [
        (8, None, "mirrored", False),
        (8, Hardware(8, "gpu"), "mirrored", False),
        (8, FOUR_GPUS, "mirrored", True),
        (8, CPU, "mirrored", True),
        (1, CPU, "default", True),
        (0, FOUR_GPUS, "mirrored", False),
        (None, FOUR_GPUS, "mirrored", False),
        (0, CPU, "default", False),
    ],
)
def test_promised_accelerators_that_are_not_visible_are_a_warning(
    promised: int | None, hardware: Hardware | None, name: str, warns: bool
) -> None:
    cluster = Cluster("test", Task("worker", 0), accelerators=promised)
    choice = choose(cluster, hardware)
    assert choice.name == name
    assert bool(choice.warnings) == warns


@pytest.mark.parametrize(
    ("environ", "name"),
    [({}, None), ({"TFDIST_STRATEGY": " "}, None), ({"TFDIST_STRATEGY": " tpu "}, "tpu")],
)
def test_the_variable_that_names_a_strategy(environ: dict[str, str], name: str | None) -> None:
    assert requested(environ) == name
