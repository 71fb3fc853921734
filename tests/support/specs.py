"""Custom jobs for tests: valid ones, to be changed in one place."""

from __future__ import annotations

from typing import Any

from tfdist.vertex import Accelerator
from tfdist.vertex import JobSpec
from tfdist.vertex import Pool
from tfdist.vertex import Pools

N1 = Pool(machine_type="n1-standard-8")


def gpus(machine_type: str, kind: str, count: int, **given: Any) -> Pool:
    """Returns machines with accelerators."""
    return Pool(machine_type=machine_type, accelerator=Accelerator(type=kind, count=count), **given)


A100 = gpus("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1)


def pools(chief: Pool = N1, **others: Pool) -> Pools:
    return Pools(chief=chief, **others)


def job(**given: Any) -> JobSpec:
    """Returns a job without a mistake or a doubt, but for what is given."""
    fields: dict[str, Any] = {
        "project": "my-project",
        "region": "us-central1",
        "image": "us-central1-docker.pkg.dev/my-project/training/tfdist:1",
        "pools": pools(),
        "display_name": "digits",
        "args": ("--config", '{"experiment": {"name": "digits"}}'),
        "base_output_directory": "gs://my-bucket/runs",
    }
    return JobSpec(**{**fields, **given})
