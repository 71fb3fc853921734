"""A custom job on this machine: one process per replica, with the service's variables and rules.

job = LocalJob(custom_job, directory="runs/local")   # what a Create call carries, as a dict
job.start()
job.wait()                                            # JobState.SUCCEEDED
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from tfdist.vertex.local.bucket import CloudStorage as CloudStorage
    from tfdist.vertex.local.container import Container as Container
    from tfdist.vertex.local.custom_job import read_job as read_job
    from tfdist.vertex.local.job import LocalJob as LocalJob
    from tfdist.vertex.local.rules import JobState as JobState
    from tfdist.vertex.local.rules import Rules as Rules
    from tfdist.vertex.local.runner import Host as Host

_PUBLIC = {
    "Container": "tfdist.vertex.local.container",
    "CloudStorage": "tfdist.vertex.local.bucket",
    "Host": "tfdist.vertex.local.runner",
    "JobState": "tfdist.vertex.local.rules",
    "LocalJob": "tfdist.vertex.local.job",
    "Rules": "tfdist.vertex.local.rules",
    "read_job": "tfdist.vertex.local.custom_job",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdist.vertex.local' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
