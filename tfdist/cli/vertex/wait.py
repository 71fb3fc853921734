"""`tfdist vertex wait`: follows a job until it ends."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated
from typing import Literal
from typing import cast

import typer

from tfdist.cli.vertex.following import Console
from tfdist.cli.vertex.following import check_timeout
from tfdist.cli.vertex.following import chosen
from tfdist.cli.vertex.following import follow
from tfdist.errors import ConfigError

_ON_PAUSE = ("end", "continue")


def wait(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Resource name, page in the console, or id.")
    ],
    project: Annotated[str | None, typer.Option(help="Project of an id.")] = None,
    region: Annotated[str | None, typer.Option(help="Region of an id.")] = None,
    config: Annotated[
        str | None, typer.Option(help="Config whose project and region are meant.")
    ] = None,
    logs: Annotated[
        bool | None, typer.Option("--logs/--no-logs", help="Show what the job prints.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which waiting ends and the job goes on.")
    ] = None,
    on_pause: Annotated[
        str, typer.Option(metavar="|".join(_ON_PAUSE), help="What a paused job means.")
    ] = "end",
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C cancels the job, unasked.")
    ] = False,
    endpoint: Annotated[
        str | None, typer.Option(help="Address of the job service, as TFDIST_VERTEX_ENDPOINT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Follow a job until it ends.

    Exit code 0 if it succeeded, 1 if it failed, expired or was cancelled, 130 if it goes on after
    Ctrl-C.
    """
    check_timeout(timeout)
    if on_pause not in _ON_PAUSE:
        raise ConfigError(f"--on-pause to be {' or '.join(_ON_PAUSE)}", repr(on_pause))
    name = chosen(job, project, region, config)
    console = Console(sys.stderr if as_json else sys.stdout)
    result = follow(
        name,
        console,
        endpoint=endpoint,
        timeout=timeout,
        show_logs=logs,
        cancel_on_interrupt=cancel_on_interrupt,
        paused=cast(Literal["end", "continue"], on_pause),
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
    console.say(result.reason)
    raise typer.Exit(result.exit_code)


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("wait")(wait)
