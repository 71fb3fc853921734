"""`tfdist vertex render`: the job as a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tfdist.cli.output import write
from tfdist.errors import ConfigError
from tfdist.vertex.checks import check
from tfdist.vertex.config import load
from tfdist.vertex.render import FORMATS
from tfdist.vertex.render import text


def render(
    config: Annotated[str, typer.Argument(help="YAML file with a vertex: section.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Changes the config; repeatable."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="What to write.")
    ] = "json",
    output: Annotated[
        Path | None, typer.Option(help="File to write instead of standard output.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write the job as JSON or YAML of the REST API, or for gcloud.

    A job that breaks a rule is refused. Nothing is sent anywhere.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format to be one of {', '.join(FORMATS)}", repr(form))
    spec = load(config, overrides or ())
    for warning in check(spec):
        print(f"tfdist vertex: warning: {warning}", file=sys.stderr)
    if spec.code == "package" and not spec.package_uri:
        print(
            "tfdist vertex: warning: nothing is at the packageUris below yet; submit uploads it "
            "under a name of its own",
            file=sys.stderr,
        )
    write(text(spec, form), output, force=force)


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("render")(render)
