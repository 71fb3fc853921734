"""`tfdist doctor`: preflight of the task it runs in. Never imports TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Annotated
from typing import Any

import typer

from tfdist.cluster.checks import Check
from tfdist.cluster.detect import detect
from tfdist.cluster.doctor import DEFAULT_TIMEOUT
from tfdist.cluster.doctor import examine
from tfdist.cluster.topology import Cluster
from tfdist.errors import EXIT_FAILED
from tfdist.errors import EXIT_OK
from tfdist.errors import ConfigError

_MOST_SECONDS = 3600.0


def doctor(
    output_dir: Annotated[
        list[str] | None,
        typer.Option(help="Directory the job writes to; may be given again. AIP_* are added."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that each check may take.")
    ] = DEFAULT_TIMEOUT,
    rendezvous: Annotated[
        bool,
        typer.Option(
            "--rendezvous",
            help="Meet the other tasks, compare versions, try every port. It uses TensorFlow's "
            "ports: run it in every task at once, before the job.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check names, ports, peers, versions and folders before a run.

    Exit code 1 if a check failed, 2 if the environment describes no possible cluster.
    """
    if not 0 < timeout <= _MOST_SECONDS:
        raise ConfigError(
            f"--timeout to be above 0 and at most {_MOST_SECONDS:.0f} seconds",
            f"{timeout:g}",
            f"write for example --timeout {DEFAULT_TIMEOUT:g}",
        )
    if any(not folder.strip() for folder in output_dir or ()):
        raise ConfigError("--output-dir to be a directory", "an empty value", "name a directory")
    cluster = detect()
    checks = examine(
        cluster, os.environ, timeout=timeout, output_dirs=output_dir or (), meet=rendezvous
    )
    report = describe(cluster, checks)
    print(json.dumps(report) if as_json else "\n".join(_lines(checks)))
    raise typer.Exit(EXIT_OK if report["ok"] else EXIT_FAILED)


def describe(cluster: Cluster, checks: Sequence[Check]) -> dict[str, Any]:
    """Returns what `tfdist doctor --json` prints.

    Args:
        cluster: The cluster.
        checks: What was found.
    """
    return {
        "ok": not any(check.status == "failed" for check in checks),
        "environment": cluster.environment,
        "task": {"type": cluster.task.type, "index": cluster.task.index},
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("doctor")(doctor)


def _lines(checks: Sequence[Check]) -> list[str]:
    lines = []
    for check in checks:
        fix = f". Fix: {check.fix}" if check.fix else ""  # no full stop: it may be a command
        detail = check.detail.rstrip(".") if fix else check.detail
        lines.append(f"{check.status:<8} {check.name:<11} {detail}{fix}")
    counts = Counter(check.status for check in checks)
    lines.append(", ".join(f"{number} {status}" for status, number in counts.items()))
    return lines
