"""`tfdist drill`: a job in peace and with faults, and whether it recovered exactly."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from tfdist.errors import EXIT_FAILED
from tfdist.errors import EXIT_OK
from tfdist.errors import ConfigError
from tfdist.launch.spec import Command
from tfdist.launch.spec import LaunchSpec
from tfdist.measure import faults as kinds
from tfdist.measure import report
from tfdist.measure.drill import as_json
from tfdist.measure.drill import drill as run_drill
from tfdist.measure.runs import Job


def drill(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]",
            show_default=False,
            help="The script; all that follows it belongs to it.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 1,
    ps: Annotated[int, typer.Option(help="Parameter servers; with any, a chief is added.")] = 0,
    faults: Annotated[
        str,
        typer.Option(help=f"Some of {', '.join(kinds.FAULTS)}; kill-chief@30 strikes at step 30."),
    ] = "kill-worker,kill-chief,damage",
    out: Annotated[
        Path, typer.Option(help="Directory for report.html, report.json and the evidence.")
    ] = Path("drill-report"),
    timeout: Annotated[
        float, typer.Option(help="Seconds that each of the two runs may take.")
    ] = 600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds that tasks have to end after a failure.")
    ] = 20.0,
    as_json_: Annotated[
        bool, typer.Option("--json", help="Print report.json instead of the verdict.")
    ] = False,
) -> None:
    """Run a job in peace and with faults, and say whether it recovered exactly.

    The script needs a tfdist.callbacks.BackupAndRestore and a seed.

    In a drill its commits go to a directory of each run under --out,
    whatever directory it names; all else goes where it always does.

    Exit code 0 if weights, optimizer, history and examples are the same,
    1 if not, 2 for usage.
    """
    words = program or []
    command = Command(words[0] if words else "", tuple(words[1:]))
    command.check()
    LaunchSpec(
        command=command, workers=workers, ps=ps, grace=grace
    )  # Says what is wrong with a number.
    if not 0 < timeout < math.inf:
        raise ConfigError("--timeout to be a positive number of seconds", f"{timeout}")
    asked = kinds.parse(faults)
    _prepare(out)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    job = Job(command.target, command.args, workers, ps, grace, timeout)
    result = run_drill(job, asked, out, _say)
    report.write(result, out)
    print(json.dumps(as_json(result)) if as_json_ else "\n".join(report.lines(result)))
    _say(f"report: {out / report.HTML}")
    raise typer.Exit(EXIT_OK if result.is_exact else EXIT_FAILED)


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("drill", context_settings={"allow_interspersed_args": False})(drill)


def _say(text: str) -> None:
    print(f"tfdist drill: {text}", file=sys.stderr, flush=True)


def _prepare(out: Path) -> None:
    """Makes the directory; one with other things in it is left alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in out.iterdir()}
    except OSError as error:
        raise ConfigError(
            "--out to be a directory that can be written",
            f"{str(out)!r} ({error.strerror})",
            "name another directory",
        ) from error
    if names and not names <= {"peace", "faults", "peace-again", report.HTML, report.JSON}:
        raise ConfigError(
            "--out to be a new directory, or that of an earlier drill",
            f"{str(out)!r}, with other things in it",
            "name another directory",
        )
    for name in (report.HTML, report.JSON):
        (out / name).unlink(missing_ok=True)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)  # On its way out it ends the job.
