"""Vertex AI custom jobs: worker pools from a config, checked, rendered, submitted, followed.

spec = tfdist.vertex.load("configs/digits-vertex.yaml")
tfdist.vertex.check(spec)             # every mistake with its rule and its fix, nothing billed
body = tfdist.vertex.render(spec)     # the CustomJob, as the service takes it
job = tfdist.vertex.submit(spec)      # created once, its name and its page in the console
tfdist.vertex.wait(job).exit_code     # 0 if it succeeded
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from tfdist.vertex.checks import check as check
    from tfdist.vertex.checks.finding import Finding as Finding
    from tfdist.vertex.checks.finding import JobError as JobError
    from tfdist.vertex.config import load as load
    from tfdist.vertex.jobs import JobName as JobName
    from tfdist.vertex.jobs import JobStatus as JobStatus
    from tfdist.vertex.local.job import LocalJob as LocalJob
    from tfdist.vertex.logs import LogReader as LogReader
    from tfdist.vertex.plan import Plan as Plan
    from tfdist.vertex.plan import plan as plan
    from tfdist.vertex.render import render as render
    from tfdist.vertex.spec import Accelerator as Accelerator
    from tfdist.vertex.spec import Disk as Disk
    from tfdist.vertex.spec import JobSpec as JobSpec
    from tfdist.vertex.spec import Pool as Pool
    from tfdist.vertex.spec import Pools as Pools
    from tfdist.vertex.spec import Reservation as Reservation
    from tfdist.vertex.spec import Scheduling as Scheduling
    from tfdist.vertex.submit import SubmittedJob as SubmittedJob
    from tfdist.vertex.submit import submit as submit
    from tfdist.vertex.wait import JobResult as JobResult
    from tfdist.vertex.wait import Pace as Pace
    from tfdist.vertex.wait import Reporter as Reporter
    from tfdist.vertex.wait import wait as wait

_PUBLIC = {
    "Accelerator": "tfdist.vertex.spec",
    "Disk": "tfdist.vertex.spec",
    "Finding": "tfdist.vertex.checks.finding",
    "JobError": "tfdist.vertex.checks.finding",
    "JobName": "tfdist.vertex.jobs",
    "JobResult": "tfdist.vertex.wait",
    "JobSpec": "tfdist.vertex.spec",
    "JobStatus": "tfdist.vertex.jobs",
    "LocalJob": "tfdist.vertex.local.job",
    "LogReader": "tfdist.vertex.logs",
    "Pace": "tfdist.vertex.wait",
    "Plan": "tfdist.vertex.plan",
    "Pool": "tfdist.vertex.spec",
    "Pools": "tfdist.vertex.spec",
    "Reporter": "tfdist.vertex.wait",
    "Reservation": "tfdist.vertex.spec",
    "Scheduling": "tfdist.vertex.spec",
    "SubmittedJob": "tfdist.vertex.submit",
    "check": "tfdist.vertex.checks",
    "load": "tfdist.vertex.config",
    "plan": "tfdist.vertex.plan",
    "render": "tfdist.vertex.render",
    "submit": "tfdist.vertex.submit",
    "wait": "tfdist.vertex.wait",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdist.vertex' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """Keeps `tfdist.vertex.render` the function after someone imports the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _PUBLIC or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
