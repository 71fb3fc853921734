"""`tfdist vertex VERB`: custom jobs of Vertex AI.

A verb is one module `tfdist/cli/vertex/VERB.py` with `app_register(app: typer.Typer) -> None` and
one line in `VERBS`. Only the module of the verb that is called is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from tfdist.errors import ConfigError

#: Every verb and what it does, in the order of `tfdist vertex --help`.
VERBS = {
    "plan": "Check a job and show its machines, roles, strategies and restarts.",
    "render": "Write the job as JSON, YAML or for gcloud.",
    "local": "Run the job on this machine, in the environment the cloud would give it.",
    "submit": "Check, upload and create the job, and follow it.",
    "wait": "Follow a job until it ends.",
    "logs": "Show what a job prints.",
}


class _Verbs(TyperGroup):
    """Commands that are imported when they are called, and only listed until then."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(cmd_name, help=VERBS[cmd_name])(_placeholder)
        return get_command(app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _command(name) if name in VERBS else command, rest


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    jobs = typer.Typer(cls=_Verbs, no_args_is_help=True, help="Custom jobs of Vertex AI.")
    jobs.callback()(_group)
    app.add_typer(jobs, name="vertex")


def _command(verb: str) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    name = f"tfdist.cli.vertex.{verb}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(
            f"this installation of tfdist to have the verb vertex {verb}",
            f"no module {name}",
            "install tfdist again",
        ) from None
    module.app_register(app)
    return get_command(app)


def _group() -> None:
    """Plan, check, render, submit and follow a custom job of Vertex AI."""


def _placeholder() -> None:
    """Stands for the verbs that are not called, to list them in the help."""
