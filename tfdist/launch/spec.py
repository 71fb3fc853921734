"""What to launch: the user's command and the cluster to run it in."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import math
import os

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import DATA
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Task
from tfdist.errors import ConfigError

USAGE = "tfdist run [OPTIONS] script.py [ARGS], or tfdist run [OPTIONS] -m module [ARGS]"


@dataclasses.dataclass(frozen=True)
class Command:
    """The user's program: a script or a module, with its arguments.

    Attributes:
        target: Path of the script, or dotted name of the module.
        args: The program's own arguments, passed on untouched.
        is_module: Whether `target` is a module (`python -m`).
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Looks for the program without importing or running any of it.

        Raises:
            ConfigError: There is no such program.
        """
        if self.is_module:
            _check_module(self.target)
        else:
            _check_script(self.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One job of `tfdist run`.

    Attributes:
        command: What every task runs.
        workers: Number of `worker` tasks, at least 1.
        ps: Number of `ps` tasks. With any, a `chief` task that coordinates is added.
        evaluator: Whether to add an `evaluator` task beside the cluster.
        data_workers: Number of processes beside the cluster that make batches for
            `tfdist.data.shard(..., service=True)`.
        max_restarts: How often the whole job may be started again after a failure, and alone the
            evaluator and each worker of a cluster with parameter servers.
        log_dir: Directory for one log file per task, or None.
        rendezvous_timeout: Seconds that the tasks wait for each other at start-up.
        grace: Seconds that tasks get to end by themselves when the job has failed or is stopped.
        backoff: Seconds before a restart that follows progress; doubled with each one without.
        max_backoff: Most seconds before a restart.

    Raises:
        ConfigError: A number is out of its range.
    """

    command: Command
    workers: int = 1
    ps: int = 0
    evaluator: bool = False
    data_workers: int = 0
    max_restarts: int = 0
    log_dir: str | None = None
    rendezvous_timeout: float = 300.0
    grace: float = 20.0
    backoff: float = 1.0
    max_backoff: float = 60.0

    def __post_init__(self) -> None:
        _check_at_least("--workers", self.workers, 1, "write --workers 1 or more")
        _check_at_least("--ps", self.ps, 0, "write --ps 0 or more")
        _check_at_least("--data-workers", self.data_workers, 0, "write --data-workers 0 or more")
        _check_at_least("--max-restarts", self.max_restarts, 0, "write --max-restarts 0 or more")
        _check_at_least("--grace", self.grace, 0, "write seconds, for example --grace 20")
        _check_at_least("--backoff", self.backoff, 0, "write seconds, for example --backoff 1")
        _check_at_least(
            "--max-backoff", self.max_backoff, 0, "write seconds, for example --max-backoff 60"
        )
        if not 0 < self.rendezvous_timeout < math.inf:
            raise ConfigError(
                "--rendezvous-timeout to be a positive number of seconds",
                f"{self.rendezvous_timeout}",
                "write for example --rendezvous-timeout 300",
            )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks to start, one process each."""
        chiefs = 1 if self.ps else 0
        counts = {CHIEF: chiefs, WORKER: self.workers, PS: self.ps, EVALUATOR: int(self.evaluator)}
        counts[DATA] = self.data_workers
        return tuple(Task(role, index) for role, n in counts.items() for index in range(n))


def _check_at_least(flag: str, value: float, least: int, fix: str) -> None:
    if not least <= value < math.inf:
        raise ConfigError(f"{flag} to be at least {least}", f"{value}", fix)


def _check_script(path: str) -> None:
    if not path:
        raise ConfigError("a script or -m module to run", "nothing", USAGE)
    if os.path.isdir(path):
        raise ConfigError(
            "a Python script",
            f"{path!r}, which is a directory",
            "name the file in it to run, or run a package with -m",
        )
    if not os.path.exists(path):
        raise ConfigError(
            "a Python script that exists",
            f"{path!r}, not found from {os.getcwd()!r}",
            "check the path; options of tfdist come before the script",
        )
    if not os.access(path, os.R_OK):
        raise ConfigError("a Python script that can be read", f"{path!r}", "check its permissions")


def _check_module(name: str) -> None:
    if not name or name.startswith("-"):
        raise ConfigError("the name of a module after -m", f"{name!r}", USAGE)
    fix = "check the name; modules are looked for in the current directory and where pip installs"
    spec = _find_module(name)
    if spec is None:
        raise ConfigError("a module that can be found", f"-m {name}", fix)
    if spec.submodule_search_locations is not None and _find_module(f"{name}.__main__") is None:
        raise ConfigError(
            "a module that can be run",
            f"-m {name}, a package without __main__.py",
            "name the module in it to run",
        )


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    # importlib.util.find_spec("a.b") imports a: the user's package, and TensorFlow with it. Parents
    # are located by their search path instead.
    top, *rest = name.split(".")
    finder = importlib.machinery.PathFinder
    try:
        spec = finder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    except ValueError:  # find_spec refuses what has no spec, for example __main__
        return None
    found = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        found = f"{found}.{part}"
        spec = finder.find_spec(found, list(spec.submodule_search_locations))
    return spec
