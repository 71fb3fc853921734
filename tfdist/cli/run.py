"""`tfdist run`: a real cluster on this machine, one process per task."""

from __future__ import annotations

from typing import Annotated
from typing import Any

import typer
from typer.core import TyperCommand

from tfdist.launch.launcher import launch
from tfdist.launch.spec import Command
from tfdist.launch.spec import LaunchSpec


class _RunCommand(TyperCommand):
    """Ends our options where the user's program begins, at its path or after `-m module`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._split(args))

    def _split(self, args: list[str]) -> list[str]:
        # The parser stops by itself at the script's path. After -m it would go on and take the
        # module's own options for ours.
        takes_value = {
            name
            for param in self.params
            for name in param.opts
            if not getattr(param, "is_flag", False)
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            arg = args[position]
            if arg.startswith("-m"):
                end = position + (2 if arg == "-m" else 1)
                return [*args[:end], "--", *args[end:]] if end <= len(args) else args
            position += 2 if arg in takes_value else 1
        return args


def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]",
            show_default=False,
            help="The script; all that follows it belongs to it.",
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead of a script.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 1,
    ps: Annotated[int, typer.Option(help="Parameter servers; with any, a chief is added.")] = 0,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="Add an evaluator.")] = False,
    data_workers: Annotated[
        int, typer.Option(help="Processes that make batches for shard(..., service=True).")
    ] = 0,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Start the job again so often after a failure; with --ps, a lost worker alone."
        ),
    ] = 0,
    log_dir: Annotated[
        str | None, typer.Option(help="Directory for one log file per task.")
    ] = None,
    rendezvous_timeout: Annotated[
        float,
        typer.Option(
            envvar="TFDIST_RENDEZVOUS_TIMEOUT",
            help="Seconds that tasks wait for each other at start-up.",
        ),
    ] = 300.0,
    grace: Annotated[
        float, typer.Option(help="Seconds that tasks have to end after a failure or a signal.")
    ] = 20.0,
    backoff: Annotated[
        float,
        typer.Option(help="Seconds before a restart; doubled while no restart commits anything."),
    ] = 1.0,
    max_backoff: Annotated[float, typer.Option(help="Most seconds before a restart.")] = 60.0,
) -> None:
    """Run a script in a real local cluster, one process per task.

    Each task has its own TF_CONFIG. The first that fails decides the exit code.
    """
    words = program or []
    if module is not None:
        command = Command(module, tuple(words), is_module=True)
    else:
        command = Command(words[0] if words else "", tuple(words[1:]))
    spec = LaunchSpec(
        command=command,
        workers=workers,
        ps=ps,
        evaluator=evaluator,
        data_workers=data_workers,
        max_restarts=max_restarts,
        log_dir=log_dir,
        rendezvous_timeout=rendezvous_timeout,
        grace=grace,
        backoff=backoff,
        max_backoff=max_backoff,
    )
    raise typer.Exit(launch(spec))


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command(
        "run",
        cls=_RunCommand,
        context_settings={"allow_interspersed_args": False},
    )(run)
