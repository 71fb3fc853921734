"""Runs one measurement of one contender: its processes, their results."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from typing import Any

from sync_contenders.contenders import Contender
from tfdist.launch import ports

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: For start and warm-up of a measurement, and for its end; it has the measured time on top.
TIMEOUT_SECONDS = 240.0
#: For what takes no time: to look for a package, to die of SIGKILL.
SHORT_SECONDS = 30.0


class Failed(Exception):
    """A contender did not run to its end."""


def missing(contender: Contender, python: str) -> str | None:
    """Returns what to install for `contender`, or None where all is there.

    Raises:
        Failed: The interpreter did not answer in time.
    """
    code = (
        "import importlib.util, sys\n"
        "print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None])"
    )
    try:
        result = subprocess.run(
            [python, "-c", code, *contender.needs],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=SHORT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(str(error)) from None
    lines = [contender.needs[name] for name in result.stdout.split()]
    return "not installed: " + "; ".join(lines) if lines else None


def measure(
    contender: Contender, model: str, *, batch: int, seconds: float, python: str
) -> dict[str, Any]:
    """Returns one measurement; rates are the first worker's, the end of fit is the slowest's.

    Args:
        contender: What to run.
        model: A name of `workloads.WORKLOADS`.
        batch: Examples per worker and step.
        seconds: How long to measure, without start and warm-up.
        python: The interpreter that has the contender's packages.

    Raises:
        Failed: A process failed, or was not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="sync-") as directory:
        orders = {
            "model": model,
            "batch": batch,
            "seconds": seconds,
            "processes": contender.processes,
            "directory": directory,
            "options": contender.settings(model),
        }
        script = [str(HERE / contender.script), json.dumps(orders)]
        if contender.stack == "tfdist":
            workers = str(contender.processes)
            commands = [[python, "-m", "tfdist", "run", "--workers", workers, *script]]
        else:
            commands = [[python, *script]] * contender.processes
        with ports.reserve(contender.processes) as reservation:
            environments = _environments(contender, len(commands), reservation.addresses)
            output = _run(commands, environments, directory, TIMEOUT_SECONDS + seconds)
    results = [json.loads(line.split("RESULT ")[1]) for line in output if "RESULT {" in line]
    if len(results) != contender.processes:
        raise Failed("\n".join(output[-15:]))
    results.sort(key=lambda result: result["rank"])
    return {
        **results[0],
        "end_seconds": max(result["end_seconds"] for result in results),
        "workers": results,
    }


def _environments(
    contender: Contender, processes: int, addresses: tuple[str, ...]
) -> list[dict[str, str]]:
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "SYNC_COORDINATOR": addresses[0],
        **contender.environment,
    }
    common.pop("TF_CONFIG", None)
    if contender.stack == "tf_keras":
        common["TF_USE_LEGACY_KERAS"] = "1"
    if contender.stack == "jax":
        common["KERAS_BACKEND"] = "jax"
    each = []
    for rank in range(processes):
        own = {**common, "SYNC_RANK": str(rank)}
        if contender.stack == "tf_keras":
            task = {"type": "worker", "index": rank}
            own["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        each.append(own)
    return each


def _run(
    commands: list[list[str]], environments: list[dict[str, str]], directory: str, timeout: float
) -> list[str]:
    """Returns the lines of all processes, one after the other; ends them after `timeout`."""
    deadline = time.monotonic() + timeout
    logs = [pathlib.Path(directory, f"log-{rank}") for rank in range(len(commands))]
    processes = []
    try:
        for command, environment, log in zip(commands, environments, logs, strict=True):
            with log.open("w", encoding="utf-8") as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # One that failed leaves its peers waiting until all have had their time.
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            os.killpg(process.pid, signal.SIGKILL)
        for process in alive:
            process.wait(SHORT_SECONDS)
    return [line for log in logs for line in log.read_text("utf-8", errors="replace").splitlines()]
