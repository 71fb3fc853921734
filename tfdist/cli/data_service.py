"""`tfdist data-service`: a process that makes batches for those that train."""

from __future__ import annotations

from typing import Annotated

import typer

from tfdist.data import server


def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")],
    host: Annotated[str, typer.Option(help="Address to listen on; by default all.")] = "",
) -> None:
    """Make batches for tfdist.data.shard(..., service="HOST:PORT") until it is stopped.

    Needs the same TensorFlow, and the data under the same paths, as the processes that train. Each
    reader gets two more ports, any that are free. Whoever reaches them can run graphs here, as
    with TensorFlow's own servers.
    """
    raise typer.Exit(server.main(["--port", str(port), "--host", host]))


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("data-service")(serve)
