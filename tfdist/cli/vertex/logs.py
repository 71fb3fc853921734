"""`tfdist vertex logs`: what a job prints."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from tfdist.cli.vertex.following import Console
from tfdist.cli.vertex.following import chosen
from tfdist.cli.vertex.following import follow
from tfdist.errors import EXIT_OK
from tfdist.vertex import client
from tfdist.vertex.logs import LogLine
from tfdist.vertex.logs import LogReader
from tfdist.vertex.logs import read_all
from tfdist.vertex.wait import EXIT_INTERRUPTED


class _Json(Console):
    """One JSON object for each line of the job."""

    def log(self, entry: LogLine) -> None:
        print(json.dumps(dataclasses.asdict(entry)), flush=True)


def logs(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Resource name, page in the console, or id.")
    ],
    follow_it: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
    project: Annotated[str | None, typer.Option(help="Project of an id.")] = None,
    region: Annotated[str | None, typer.Option(help="Region of an id.")] = None,
    config: Annotated[
        str | None, typer.Option(help="Config whose project and region are meant.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Address of the job service, as TFDIST_VERTEX_ENDPOINT.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each entry.")
    ] = False,
) -> None:
    """Show what a job prints, each line with its role: [worker 0] Epoch 1/3."""
    name = chosen(job, project, region, config)
    console = _Json(sys.stdout) if as_json else Console(sys.stdout)
    if follow_it:
        result = follow(
            name,
            console,
            endpoint=endpoint,
            timeout=None,
            show_logs=True,
            cancel_on_interrupt=False,
            paused="continue",
        )
        interrupted = result.exit_code == EXIT_INTERRUPTED
        raise typer.Exit(EXIT_INTERRUPTED if interrupted else EXIT_OK)
    access = client.connect(endpoint)
    status = client.JobService(name.region, access).get(name)
    reader = LogReader(name, access, has_reduction_server=status.has_reduction_server)
    for entry in read_all(reader, console.say):
        console.log(entry)


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("logs")(logs)
