"""`tfdist render`: a job of a config as another scheduler takes it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from typing import Any

import typer

from tfdist.cli.output import write
from tfdist.errors import ConfigError
from tfdist.schedulers import plan
from tfdist.schedulers.plan import Plan


def render(
    config: Annotated[str, typer.Argument(help="YAML file, as for trainer.task.")],
    scheduler: Annotated[
        str, typer.Option("--for", metavar="|".join(plan.SCHEDULERS), help="Who runs the job.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Changes the config; repeatable."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="jobset|job|tfjob", help="For kubernetes: what makes the pods."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="yaml|json|sh|py", help="What to write, where there is a choice."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write instead of standard output.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write a job for Kubernetes, Slurm or Ray.

    A job that cannot work is refused. Nothing is sent anywhere.
    """
    if scheduler not in plan.SCHEDULERS:
        raise ConfigError(f"--for to be one of {', '.join(plan.SCHEDULERS)}", repr(scheduler))
    if kind is not None and scheduler != "kubernetes":
        raise ConfigError("--kind with --for kubernetes only", f"--for {scheduler}", "leave it out")
    forms = _FORMS[scheduler]
    form = forms[0] if form is None else form
    if form not in forms:
        raise ConfigError(
            f"--format {' or '.join(forms)} for {scheduler}", repr(form), "leave it out"
        )
    overrides = list(overrides or ())
    if kind is not None:
        overrides.append(f"kubernetes.kind={kind}")
    made, section = plan.load(config, scheduler, overrides)
    text = _RENDERERS[scheduler](made, section, form)
    module = importlib.import_module(f"tfdist.schedulers.{scheduler}")
    for warning in module.warnings(made, section):
        print(f"tfdist render: warning: {warning}", file=sys.stderr)
    write(text, output, force=force)


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("render")(render)


def _kubernetes(made: Plan, section: Any, form: str) -> str:
    from tfdist.schedulers import kubernetes
    from tfdist.schedulers import manifest

    return manifest.text(kubernetes.render(made, section), form)


def _slurm(made: Plan, section: Any, form: str) -> str:
    from tfdist.schedulers import slurm

    del form
    return slurm.render(made, section)


def _ray(made: Plan, section: Any, form: str) -> str:
    from tfdist.schedulers import ray

    del form
    return ray.render(made, section)


_FORMS: Mapping[str, tuple[str, ...]] = {
    "kubernetes": ("yaml", "json"),
    "slurm": ("sh",),
    "ray": ("py",),
}
_RENDERERS: Mapping[str, Callable[[Plan, Any, str], str]] = {
    "kubernetes": _kubernetes,
    "slurm": _slurm,
    "ray": _ray,
}
