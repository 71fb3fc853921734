"""Parameter servers: tfdist beside stock Keras 2 (tf_keras), on the same model and cluster.

    python3 -m venv .venv-bench
    .venv-bench/bin/pip install --editable '.[experiments]' -r benchmarks/requirements.txt
    .venv-bench/bin/python benchmarks/parameter_server.py --json servers.json

Two workers and one parameter server on this machine, batches of 64, both stacks with 8 steps an
execution, started by `tfdist run`, so that both have the same settings of TensorFlow and malloc.
Milliseconds a step are the wall time of a whole `fit` over its steps, all workers together; the
median of three, after one that is not counted. The coordinator's own CPU time a step is the least
time in which it can hand out steps: with 0.5 ms it can hand out 2,000 a second, to any number of
workers. Only the ratios of one run count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from sync_contenders import machine  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).parent / "server_contenders" / "program.py"
#: Model, optimizer, rows of its (largest) table.
CASES = [
    *(
        ("synthetic", optimizer, rows)
        for optimizer in ("adagrad", "adam")
        for rows in (10**5, 10**6, 10**7)
    ),
    ("flights", "adam", 16384),
]
STACKS = ("tfdist", "tf_keras")


def measure(
    stack: str, case: tuple[str, str, int], steps: int, limit: float
) -> dict[str, Any] | str:
    """Returns what one cluster has measured, or why it has not."""
    command = [sys.executable, "-m", "tfdist", "run", "--workers", "2", "--ps", "1", str(PROGRAM)]
    command += [stack, *map(str, case), str(steps)]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    if stack != "tfdist":
        env["TFDIST_ENGINE"] = "0"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return f"none within {limit:.0f} s"
    found = [line for line in output.splitlines() if "BENCHMARK " in line]
    if not found:
        return "failed: " + (output.strip().splitlines() or ["no output"])[-1][:200]
    measured: dict[str, Any] = json.loads(found[0].partition("BENCHMARK ")[2])
    return measured


def table(results: list[dict[str, Any]]) -> str:
    """Returns a Markdown table."""
    lines = [
        "| model | optimizer | rows | tfdist, ms a step | stock, ms a step | stock / tfdist "
        "| coordinator of tfdist, CPU ms a step |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        ours, stock = (result["stacks"].get(stack) for stack in STACKS)
        ratio = ""
        coordinator = f"{ours['coordinator_cpu_ms']:.2f}" if isinstance(ours, dict) else ""
        if isinstance(ours, dict) and isinstance(stock, dict):
            ratio = f"{_median(stock) / _median(ours):.2f}"
        lines.append(
            f"| {result['model']} | {result['optimizer']} | {result['rows']:.0e} "
            f"| {_shown(ours)} | {_shown(stock)} | {ratio} | {coordinator} |"
        )
    return "\n".join(lines)


def growth(results: list[dict[str, Any]]) -> list[str]:
    """Returns the time of the largest table over that of the smallest, for each optimizer."""
    found = []
    for optimizer in ("adagrad", "adam"):
        own = {
            r["rows"]: r["stacks"].get("tfdist")
            for r in results
            if r["optimizer"] == optimizer and r["model"] == "synthetic"
        }
        small, large = own.get(10**5), own.get(10**7)
        if isinstance(small, dict) and isinstance(large, dict):
            ratio = _median(large) / _median(small)
            found.append(f"tfdist, {optimizer}, 1e7 rows / 1e5 rows: {ratio:.2f}")
    return found


def _median(measured: dict[str, Any]) -> float:
    return statistics.median(measured["ms_per_step"])


def _shown(measured: dict[str, Any] | str | None) -> str:
    if not isinstance(measured, dict):
        return measured or ""
    times = measured["ms_per_step"]
    return f"{_median(measured):.1f} ({min(times):.1f} to {max(times):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="of each timed fit")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each cluster")
    parser.add_argument("--rows", type=float, nargs="+", help="only tables of so many rows")
    parser.add_argument("--optimizers", nargs="+", default=["adagrad", "adam"])
    parser.add_argument("--stacks", nargs="+", default=list(STACKS), choices=STACKS)
    parser.add_argument("--json", help="write all measurements")
    arguments = parser.parse_args()
    rows = None if arguments.rows is None else {int(number) for number in arguments.rows}
    results: list[dict[str, Any]] = []
    for case in CASES:
        if case[1] not in arguments.optimizers or (rows is not None and case[2] not in rows):
            continue
        result: dict[str, Any] = dict(zip(("model", "optimizer", "rows"), case, strict=True))
        result |= {"stacks": {}, "idle": machine.idle_share()}
        for stack in arguments.stacks:
            result["stacks"][stack] = measure(stack, case, arguments.steps, arguments.limit)
            print(*case, stack, result["stacks"][stack], flush=True)
        results.append(result)
        if arguments.json:
            part = Path(f"{arguments.json}.part")
            part.write_text(json.dumps({"cpu": machine.cpu(), "results": results}, indent=1))
            part.replace(arguments.json)
    idle = ", ".join(f"{result['idle']:.0%}" for result in results)
    print(f"\n{machine.cpu()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d %H:%M')}")
    print(f"idle before each case: {idle}\n")
    print(table(results))
    print(*growth(results), sep="\n")


if __name__ == "__main__":
    main()
