"""`tfdist vertex submit`: creates a job, and follows it if asked."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from tfdist.cli.vertex.following import Console
from tfdist.cli.vertex.following import check_timeout
from tfdist.cli.vertex.following import follow
from tfdist.vertex.config import load
from tfdist.vertex.jobs import parse_job
from tfdist.vertex.submit import preview
from tfdist.vertex.submit import submit as submit_job


def submit(
    config: Annotated[str, typer.Argument(help="YAML file with a vertex: section.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Changes the config; repeatable."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")
    ] = False,
    logs: Annotated[
        bool | None, typer.Option("--logs/--no-logs", help="With --wait: what the job prints.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="With --wait: seconds; then the job goes on alone.")
    ] = None,
    cancel_on_interrupt: Annotated[
        bool,
        typer.Option("--cancel-on-interrupt", help="With --wait: Ctrl-C cancels it, unasked."),
    ] = False,
    check_buckets: Annotated[
        bool | None,
        typer.Option("--check-buckets/--no-check-buckets", help="Ask where the buckets are."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Address of the job service, as TFDIST_VERTEX_ENDPOINT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a job, upload its code where the image lacks it, and create it exactly once.

    A job that breaks a rule is refused before anything is sent. Exit code 2 for what cannot be
    right: config, permission, bucket; 1 for no quota or no answer; with --wait as tfdist vertex
    wait.
    """
    check_timeout(timeout)
    spec = load(config, overrides or ())
    console = Console(sys.stderr if as_json else sys.stdout)
    if dry_run:
        print(json.dumps(preview(spec, say=console.say), indent=2, ensure_ascii=False))
        console.say("nothing was sent")
        return
    job = submit_job(spec, endpoint=endpoint, check_buckets=check_buckets, say=console.say)
    described = dataclasses.asdict(job)
    if not as_json:
        print(f"{job.name}\n{job.console_url}", flush=True)
    if not wait:
        if as_json:
            print(json.dumps(described))
        console.say(f"follow it with: tfdist vertex wait {job.name}")
        return
    result = follow(
        parse_job(job.name),
        console,
        endpoint=endpoint,
        timeout=timeout,
        show_logs=logs,
        cancel_on_interrupt=cancel_on_interrupt,
    )
    if as_json:
        # The address in the submission has the project's id, which people know.
        print(json.dumps({**dataclasses.asdict(result), **described, "state": result.state}))
    console.say(result.reason)
    raise typer.Exit(result.exit_code)


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("submit")(submit)
