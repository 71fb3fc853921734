"""A script that runs a job with Ray Train: `python SCRIPT`, or `ray job submit -- python SCRIPT`.

    script = render(*tfdist.schedulers.plan.load("configs/digits-ray.yaml", "ray"))

Ray's `TensorflowTrainer` starts the workers, places them and sets their `TF_CONFIG`; each runs the
program in a process of its own (`tfdist.schedulers.ray_worker` says why). Ray knows workers alone:
parameter servers and evaluators are refused.

Source: https://docs.ray.io/en/latest/train/api/doc/ray.train.tensorflow.TensorflowTrainer.html
"""

from __future__ import annotations

import json
import re
from typing import Any

from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.errors import ConfigError
from tfdist.schedulers import names
from tfdist.schedulers.plan import Plan
from tfdist.schedulers.sections import Ray

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
    f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)
}

_SCRIPT = '''"""{name}: {workers} workers, strategy {strategy}, with Ray Train.

    python {name}.py
    ray job submit -- python {name}.py

Written by: tfdist render --for ray
"""

import sys

import ray
from ray.train import FailureConfig
from ray.train import RunConfig
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

from tfdist.schedulers.ray_worker import exit_code
from tfdist.schedulers.ray_worker import run_program

PROGRAM = {program}
ENVIRONMENT = {environment}


def main() -> int:
    ray.init({address})
    trainer = TensorflowTrainer(
        run_program,
        train_loop_config={{
            "program": PROGRAM,
            "environment": ENVIRONMENT,
            "grace_seconds": {grace_seconds},
        }},
        scaling_config=ScalingConfig(
            num_workers={workers},
            use_gpu={use_gpu},
            resources_per_worker={resources},
            placement_strategy={placement},
        ),
        run_config=RunConfig(
            name={run_name},
            storage_path={storage_path},
            failure_config=FailureConfig(max_failures={restarts}),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''


def render(plan: Plan, section: Ray) -> str:
    """Returns the script.

    Args:
        plan: The job.
        section: What Ray has to know.

    Raises:
        ConfigError: Ray cannot run it.
    """
    _check(plan, section)
    task = plan.tasks[0]
    resources: dict[str, Any] = {"CPU": 1 if task.cpus is None else task.cpus}
    if task.gpus:
        resources["GPU"] = task.gpus
    if task.memory is not None:
        resources["memory"] = _bytes(task.memory)
    resources.update(section.resources)
    return _SCRIPT.format(
        name=plan.name,
        workers=plan.size,
        strategy=plan.strategy,
        program=_listed(plan.command),
        environment=_mapped(plan.env),
        address="" if section.address is None else f"address={_text(section.address)}",
        grace_seconds=section.grace_seconds,
        use_gpu=bool(task.gpus),
        resources=json.dumps(resources),
        placement=_text(section.placement),
        run_name=_text(plan.name),
        storage_path="None" if section.storage_path is None else _text(section.storage_path),
        restarts=plan.restarts,
    )


def warnings(plan: Plan, section: Ray) -> tuple[str, ...]:
    """Returns what looks wrong without being an error, one sentence each."""
    found = []
    if section.storage_path is None and plan.size > 1:
        found.append(
            "ray.storage_path is not set: on several machines Ray needs a shared or remote place."
        )
    for output in plan.outputs:
        if "://" not in output and not output.startswith("/"):
            found.append(
                f"results go to {output}, which is relative to Ray's own directory of each "
                "worker: name an absolute one that is shared, or a bucket."
            )
    return tuple(found)


def _check(plan: Plan, section: Ray) -> None:
    if not _NAME.fullmatch(plan.name):
        raise ConfigError(
            "ray.name of letters, digits, -, _ and .", repr(plan.name), "--set ray.name=NAME"
        )
    for role, why in (
        (PS, "its TensorflowTrainer puts workers alone in TF_CONFIG, no parameter servers"),
        (EVALUATOR, "all its workers train; start an evaluator beside it with tfdist run"),
    ):
        if role in plan.roles:
            raise ConfigError(
                f"no {role} for Ray: {why}", f"roles {', '.join(plan.roles)}", f"leave {role} out"
            )
    if len({task.resources for task in plan.tasks}) > 1:
        raise ConfigError(
            "the same resources for chief and workers: Ray gives all its workers the same",
            "; ".join(f"{task.role} {task.resources}" for task in plan.tasks),
            "name them in ray.cpus, ray.memory and ray.gpus",
        )
    names.check_bytes(plan.tasks[0].memory, "memory of a worker of Ray")
    if section.grace_seconds < 0:
        raise ConfigError("ray.grace_seconds to be 0 or more", f"{section.grace_seconds}")
    reserved = {"CPU", "GPU", "memory"} & set(section.resources)
    if reserved:
        raise ConfigError(
            "ray.resources without CPU, GPU and memory",
            ", ".join(sorted(reserved)),
            "use ray.cpus, ray.gpus and ray.memory",
        )


def _bytes(memory: str) -> int:
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]+)", memory)
    assert match  # It has been checked.
    return int(float(match[1]) * _UNITS[match[2]])


def _text(value: str) -> str:
    """Returns a text as Python reads it."""
    return json.dumps(value, ensure_ascii=False)  # Its escapes of rare characters are not ours.


def _listed(words: tuple[str, ...]) -> str:
    return "\n".join(["[", *(f"    {_text(word)}," for word in words), "]"])


def _mapped(values: Any) -> str:
    if not values:
        return "{}"
    lines = (f"    {_text(key)}: {_text(value)}," for key, value in values.items())
    return "\n".join(["{", *lines, "}"])
