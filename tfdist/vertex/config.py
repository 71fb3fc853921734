"""A custom job from the `vertex:` section of a trainer's config.

    experiment: {name: digits}
    vertex:
      project: my-project
      region: us-central1
      image: us-central1-docker.pkg.dev/my-project/training/tfdist:1
      pools:
        chief: {machine_type: n1-standard-8}
        worker: {machine_type: n1-standard-8, replicas: 3}

The section holds the fields of `tfdist.vertex.JobSpec` by their names. The container is given the
rest of the config by value, so that the image needs no file of that name.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdist.errors import ConfigError
from tfdist.vertex.spec import JobSpec

#: What runs where `vertex.command`, `vertex.args` and `vertex.module` name nothing else.
TRAINER = "trainer.task"


def load(path: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Reads the job that a config describes.

    Args:
        path: The YAML file.
        overrides: `key.path=value` texts, the value in YAML; later ones win.

    Returns:
        The job. Its display name is the experiment's and its strategy the config's where the
        section names none; its program is `trainer.task` with this config unless the section
        says `command`, `args` or `module`. A file for such a program needs no experiment, and
        its name is then that of the job.

    Raises:
        ConfigError: The config is not valid, or has no `vertex:` section.

    Example:
        >>> load("configs/digits-vertex.yaml").display_name
        'digits'
    """
    from trainer import config

    content = config.read(path, overrides)
    source = " ".join([path, *(f"--set {override}" for override in overrides)])
    loaded = config.check(_complete(content), source)
    spec = loaded.vertex
    if not isinstance(spec, JobSpec):
        raise ConfigError(
            f"a section vertex: in {path}",
            "none",
            "add project, region, image and pools as in configs/digits-vertex.yaml",
        )
    changes: dict[str, Any] = {}
    if not spec.display_name:
        named = "experiment" in content
        changes["display_name"] = loaded.experiment.name if named else pathlib.Path(path).stem
    if spec.strategy is None:
        changes["strategy"] = loaded.strategy.name
    if spec.strategy_replicas is None:
        changes["strategy_replicas"] = loaded.strategy.replicas
    if runs_trainer(spec):
        changes["args"] = ("--config", config.as_argument(path, overrides))
    return dataclasses.replace(spec, **changes)


def _complete(content: dict[Any, Any]) -> dict[Any, Any]:
    """Adds an experiment to a file that is for a program of the user's own and needs none."""
    section = content.get("vertex")
    if "experiment" in content or not isinstance(section, dict):
        return content
    own = section.get("command") or section.get("args") or section.get("module", TRAINER) != TRAINER
    return {**content, "experiment": {"name": "digits"}} if own else content


def runs_trainer(spec: JobSpec) -> bool:
    """Whether a section leaves the program to us."""
    return not spec.command and not spec.args and spec.module == TRAINER
