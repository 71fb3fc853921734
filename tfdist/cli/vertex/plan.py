"""`tfdist vertex plan`: what a job will be."""

from __future__ import annotations

import typer


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("plan")(lambda config: None)
