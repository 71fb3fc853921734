"""`tfdist env`: where this process is, and why. Never imports TensorFlow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

from tfdist.cluster.detect import detect
from tfdist.cluster.topology import Cluster
from tfdist.strategies.choose import Choice
from tfdist.strategies.choose import choose
from tfdist.strategies.choose import requested
from tfdist.strategies.hardware import detect_hardware

if TYPE_CHECKING:
    import typer

_WIDTH = 13


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    import typer

    @app.command("env")
    def env(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
        """Say where this process is: environment, task, cluster, strategy, and why.

        Reads the environment, contacts nobody, and never imports TensorFlow.
        """
        show(as_json)


def show(as_json: bool) -> None:
    """Prints where this process is."""
    report = describe(os.environ)
    print(json.dumps(report) if as_json else "\n".join(_lines(report)))


def describe(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns what `tfdist env --json` prints.

    Args:
        environ: Environment variables.

    Raises:
        ConfigError: The variables cannot be right.
    """
    cluster = detect(environ)
    choice = choose(cluster, detect_hardware(environ), requested(environ))
    return {
        "environment": cluster.environment,
        "task": {"type": cluster.task.type, "index": cluster.task.index},
        "cluster": {
            # A dynamic cluster does not tell every address.
            role: [address for address in cluster.addresses[role] if address]
            for role in cluster.roles
        },
        "is_chief": cluster.is_chief,
        "num_workers": cluster.num_workers,
        "strategy": choice.name,
        "reasons": [reason for reason in (cluster.source, *choice.reasons) if reason],
        "warnings": _warnings(environ, cluster, choice),
    }


def _warnings(environ: Mapping[str, str], cluster: Cluster, choice: Choice) -> list[str]:
    found = [*cluster.warnings, *choice.warnings]
    # The values that make `tf.keras` load the package tf_keras instead of Keras 3.
    if environ.get("TF_USE_LEGACY_KERAS", "").strip() in ("1", "true", "True"):
        found.append(
            "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2 (tf_keras), which tfdist does not "
            "make right; unset it."
        )
    return found


def _lines(report: Mapping[str, Any]) -> list[str]:
    task = report["task"]
    lines = [
        _line("environment", report["environment"]),
        _line(
            "task", f"{task['type']} {task['index']}" + (" (chief)" if report["is_chief"] else "")
        ),
        _line("workers", report["num_workers"]),
    ]
    lines += [_line(role, ", ".join(tasks)) for role, tasks in report["cluster"].items()]
    lines.append(_line("strategy", report["strategy"]))
    lines += [_line("reason", reason) for reason in report["reasons"]]
    lines += [_line("warning", warning) for warning in report["warnings"]]
    return lines


def _line(label: str, value: object) -> str:
    return f"{label:<{_WIDTH}}{value}"
