"""`tfdist vertex plan`: what a job will be."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tfdist.vertex.config import load
from tfdist.vertex.plan import as_json
from tfdist.vertex.plan import lines
from tfdist.vertex.plan import plan as make


def plan(
    config: Annotated[str, typer.Argument(help="YAML file with a vertex: section.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Changes the config; repeatable."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a job and show its machines, roles, strategies and restarts.

    Asks nobody, costs nothing. A job that breaks rules ends it with code 2
    and the name of each rule.
    """
    made = make(load(config, overrides or ()))
    print(json.dumps(as_json(made)) if json_ else "\n".join(lines(made)))


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("plan")(plan)
