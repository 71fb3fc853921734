"""`tfdist vertex local`: a custom job on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tfdist.errors import EXIT_FAILED
from tfdist.errors import EXIT_OK
from tfdist.errors import ConfigError
from tfdist.launch.signals import Inbox
from tfdist.launch.signals import inbox
from tfdist.vertex.local.container import Container
from tfdist.vertex.local.custom_job import ReceivedJob
from tfdist.vertex.local.custom_job import read_job
from tfdist.vertex.local.job import Buckets
from tfdist.vertex.local.job import LocalJob
from tfdist.vertex.local.job_file import install_packages
from tfdist.vertex.local.job_file import load_job
from tfdist.vertex.local.rules import JobState
from tfdist.vertex.local.rules import Rules
from tfdist.vertex.local.runner import ENTRY_POINT
from tfdist.vertex.local.runner import Host
from tfdist.vertex.local.runner import Runner

_POLL_SECONDS = 0.2
#: Two signals within this time are one request: timeout(1) signals the process and its group.
_SAME_REQUEST_SECONDS = 0.3


def local(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="Config with a vertex: section, or a CustomJob in JSON or YAML."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Changes the config; repeatable."),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option("--dir", help="Receives logs and output; runs/local/NAME-TIME by default."),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(help="Run in this working container of buildah's, not with this Python."),
    ] = None,
    buildah: Annotated[
        str, typer.Option(help="The command for containers, with options of its own.")
    ] = "buildah",
    entry_point: Annotated[
        str, typer.Option(help="What stands for the image's entry point.")
    ] = shlex.join(ENTRY_POINT),
    package: Annotated[
        list[str] | None,
        typer.Option(help="Distribution to install for a pythonPackageSpec; repeatable."),
    ] = None,
    bucket_emulator: Annotated[
        bool, typer.Option("--bucket-emulator", help="Run an emulator of Cloud Storage.")
    ] = False,
    bucket_dir: Annotated[
        str | None,
        typer.Option(help="Folder per bucket, in place of gs://; DIR/gcs by default."),
    ] = None,
    real_buckets: Annotated[
        bool, typer.Option("--real-buckets", help="Let the job write to the real gs://.")
    ] = False,
    project_number: Annotated[str | None, typer.Option(help="For CLOUD_ML_PROJECT_ID.")] = None,
    region: Annotated[str | None, typer.Option(help="For CLOUD_ML_REGION.")] = None,
    replica_restarts: Annotated[
        int | None, typer.Option(min=0, help="Restarts of each replica; 5 as the service.")
    ] = None,
    job_retries: Annotated[
        int | None, typer.Option(min=0, help="Further tries of the job; as the service by default.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL.")] = 10.0,
) -> None:
    """Run the job here: one process per replica, the service's variables and restart rules.

    Exit code 0: succeeded; 1: failed or expired; 2: no such job. Ctrl-C cancels it.
    """
    custom_job, parent, notes = load_job(job, overrides or ())
    for note in notes:
        _say(f"warning: {note}")
    received = read_job(custom_job)
    place = Path(directory or _default_directory(received)).absolute()
    if project_number or region:
        _, project, _, where = (parent or "projects/local/locations/us-central1").split("/")
        parent = f"projects/{project_number or project}/locations/{region or where}"
    rules = _rules(received, replica_restarts, job_retries)
    buckets: Buckets = "local"
    if bucket_emulator and real_buckets:
        raise ConfigError("one of --bucket-emulator and --real-buckets", "both", "drop one")
    if bucket_emulator or real_buckets:
        buckets = "emulator" if bucket_emulator else "real"
    folder = Path(bucket_dir).absolute() if bucket_dir else place / "gcs"
    if container is not None:
        runner: Runner = _container(container, shlex.split(buildah), place, folder)
    else:
        runner = _host(received, entry_point, package or [], place, folder)
    with inbox() as received_signals:
        running = LocalJob(
            custom_job,
            directory=place,
            parent=parent,
            runner=runner,
            buckets=buckets,
            bucket_directory=folder,
            rules=rules,
            grace=grace,
            say=_say,
            show=_show,
        )
        running.start()
        number = _follow(running, received_signals)
    raise typer.Exit(_end(running, place, number))


def _follow(job: LocalJob, received: Inbox) -> int | None:
    """Waits for the end; returns the signal that came, if any."""
    first: int | None = None
    at = 0.0
    while not job.wait(0).is_final:
        received.wait(_POLL_SECONDS)
        while (number := received.take()) is not None:
            if first is None:
                first, at = number, time.monotonic()
                job.cancel()
            elif time.monotonic() - at > _SAME_REQUEST_SECONDS:
                job.cancel(hurry=True)
    job.wait()
    return first


def _end(job: LocalJob, place: Path, number: int | None) -> int:
    state, error = job.state, job.error
    if error is not None and state is not JobState.CANCELLED:
        _say(error.message)
    _say(f"{state}; logs and output: {place}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if state is JobState.SUCCEEDED:
        return EXIT_OK
    return EXIT_FAILED if number is None else 128 + number


def _rules(job: ReceivedJob, replica_restarts: int | None, job_retries: int | None) -> Rules:
    rules = Rules.of(job)
    return Rules(
        replica_restarts=rules.replica_restarts if replica_restarts is None else replica_restarts,
        job_retries=rules.job_retries if job_retries is None else job_retries,
        restart_all=rules.restart_all,
    )


def _container(name: str, command: list[str], place: Path, folder: Path) -> Runner:
    # The job writes there under the same paths; they must exist to be mounted.
    for path in (place, folder):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "a directory that can be written",
                f"{str(path)!r} ({error.strerror})",
                "name another",
            ) from error
    with contextlib.suppress(OSError):
        folder.chmod(0o777)  # programs in images have users of their own
    return Container(name, list(dict.fromkeys((str(place), str(folder)))), command)


def _host(
    job: ReceivedJob, entry_point: str, packages: list[str], place: Path, folder: Path
) -> Runner:
    named = [uri for replica in job.replicas for uri in replica.program.package_uris]
    found = packages or [file for uri in dict.fromkeys(named) if (file := _here(uri, folder))]
    if named and not found:
        _say(f"{', '.join(dict.fromkeys(named))} is not here; what is installed here runs instead")
    target = place / "packages"
    installed = (install_packages(found, target),) if found else ()
    return Host(entry_point=tuple(shlex.split(entry_point)), path=installed)


def _here(uri: str, folder: Path) -> str:
    """Returns the file that stands for a distribution's address, or ""."""
    path = folder / uri.removeprefix("gs://") if uri.startswith("gs://") else Path(uri)
    return str(path) if path.is_file() else ""


def _default_directory(job: ReceivedJob) -> str:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in job.display_name) or "job"
    return os.path.join("runs", "local", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tfdist vertex local: {text}", file=sys.stderr, flush=True)


def _show(text: str) -> None:
    data = memoryview(f"{text}\n".encode("utf-8", "replace"))
    while data:
        data = data[os.write(1, data) :]


def app_register(app: typer.Typer) -> None:
    """Adds the verb to the command line."""
    app.command("local")(local)
