"""`tfdist VERB`: finds the verb, runs it, turns errors into one line and an exit code.

A verb is one module `tfdist/cli/VERB.py` with `app_register(app: typer.Typer) -> None`, which adds
the command to `app`, and one line in `VERBS`. Only the module of the verb that is called is
imported. `tfdist env` and `tfdist env --json`, which programs call often, run without typer: to
import it takes longer than to answer.

Exit codes: 0 done; 1 the program failed; 2 usage or configuration; 130 interrupted; others come
from the verb.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist._version import __version__
from tfdist.errors import EXIT_OK
from tfdist.errors import EXIT_USAGE
from tfdist.errors import TfdistError

if TYPE_CHECKING:
    import typer

#: Every verb and what it does, in the order of `tfdist --help`.
VERBS = {
    "env": "Say where this process is: environment, task, cluster, strategy.",
    "doctor": "Check names, ports, peers, versions and folders before a run.",
    "run": "Run a script in a real cluster of processes on this machine.",
    "data-service": "Make batches for processes that train, on this or other hosts.",
    "drill": "Run a script in peace and with faults, and say whether it recovered exactly.",
    "vertex": "Plan, check, render, submit and follow a custom job of Vertex AI.",
    "render": "Write a job for Kubernetes, Slurm or Ray.",
}

_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments in (["env"], ["env", "--json"]):
            from tfdist.cli import env

            env.show(as_json="--json" in arguments)
        else:
            _application(arguments)(args=arguments, prog_name="tfdist")
    except SystemExit as error:
        return _code(error)
    except TfdistError as error:
        print(f"tfdist: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return EXIT_OK


def _code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or EXIT_OK
    print(error.code, file=sys.stderr)
    return 1


def _application(arguments: Sequence[str]) -> typer.Typer:
    """Returns the application, with the real command of the verb that is called only."""
    import typer

    app = typer.Typer(
        name="tfdist",
        help="A Keras model and model.fit, made right and fast under every strategy.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def print_version(asked: bool) -> None:
        if asked:
            print(f"tfdist {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=print_version, help="Print the version."
        ),
    ) -> None:
        pass

    # Options before the verb take no value, so the first word is the verb.
    called = next((word for word in arguments if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        if verb == called:
            _register(app, verb)
        else:
            app.command(verb, help=summary)(_placeholder)
    return app


def _register(app: typer.Typer, verb: str) -> None:
    module = f"tfdist.cli.{verb.replace('-', '_')}"
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise _NoSuchVerb(verb) from None
    imported.app_register(app)


class _NoSuchVerb(TfdistError):
    exit_code = EXIT_USAGE

    def __init__(self, verb: str):
        super().__init__(
            f"this installation of tfdist to have the verb {verb!r}",
            f"no module tfdist.cli.{verb.replace('-', '_')}",
            "install tfdist again",
        )


def _placeholder() -> None:
    """Stands for the verbs that are not called, to list them in the help."""


if __name__ == "__main__":
    sys.exit(main())
