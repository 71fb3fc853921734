"""tfdist beside one device, stock TensorFlow, PyTorch DDP and Keras on JAX: examples per second.

    python3 -m venv .venv-bench
    .venv-bench/bin/pip install --editable . -r benchmarks/requirements.txt
    .venv-bench/bin/python benchmarks/sync.py --json sync.json --png sync.png

(PyTorch without CUDA is smaller: add `--extra-index-url https://download.pytorch.org/whl/cpu` and
`torch==2.13.0+cpu`.)

Every measurement runs in fresh processes, each pinned to a core of its own, with one thread for
each of the framework's pools: TensorFlow's intra-op and inter-op, OpenMP. Rounds are interleaved: a
round measures every contender once, so that noise hits all alike. Examples per second are taken
inside `fit`, from batch end to batch end, without the warm-up: the median over tenths of the
measured time, then over rounds. "End of fit" is the time from the end of the last step to the
return of `fit`. CPU time is a process's own; a step of one worker is 64 examples.

All train the same architectures with SGD on random data that lies in memory, one batch an element,
float32. A contender that is not installed is named with the line that installs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

# For tfdist, which this interpreter need not have installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from sync_contenders import machine
from sync_contenders import report
from sync_contenders import run
from sync_contenders.contenders import CONTENDERS
from sync_contenders.workloads import WORKLOADS

QUIET = 0.9


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for option, known in (("--models", WORKLOADS), ("--contenders", CONTENDERS)):
        add(
            option,
            nargs="+",
            choices=known,
            default=list(known),
            metavar=option[2:-1].upper(),
            help=", ".join(known),
        )
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=8.0, help="of each measurement, without warm-up")
    add("--batch", type=int, default=64, help="examples per worker and step")
    add("--quick", action="store_true", help="one round of 2 seconds")
    add(
        "--python",
        action="append",
        default=[],
        metavar="[STACK=]PATH",
        help="interpreter for all or for keras, tfdist, tf_keras, torch or jax; "
        "without it .venv-bench, or the one that runs this",
    )
    add("--json", metavar="FILE", help="write all measurements, after every round")
    add("--png", metavar="FILE", help="draw a bar chart")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.seconds = 1, 2.0
    if chosen.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")
    return chosen


def interpreters(given: list[str]) -> dict[str, str]:
    """Returns stack to interpreter."""
    own = run.ROOT / ".venv-bench" / "bin" / "python"
    default = str(own) if own.exists() else sys.executable
    chosen = {}
    for word in given:
        stack, equals, path = word.rpartition("=")
        if equals:
            chosen[stack] = path
        else:
            default = path
    return {stack: chosen.get(stack, default) for stack in {c.stack for c in CONTENDERS.values()}}


def main() -> None:
    chosen = arguments()
    # As an exception it unwinds through the code that ends the contenders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pythons = interpreters(chosen.python)
    results: dict[str, dict[str, Any]] = {model: {} for model in chosen.models}
    idle: list[float] = []
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    for number in range(chosen.rounds):
        for model in chosen.models:
            for name in chosen.contenders:
                _measure(chosen, pythons, results[model], idle, number, model, name)
        if chosen.json:
            _write(chosen, results, idle, started)
    print(report.table(results))
    print()
    for name, value in report.ratios(results).items():
        print(f"{value:7.2f}  {name}")
    quiet = "" if min(idle, default=1.0) >= QUIET else "   WARNING: not quiet, measure again"
    print(
        f"\nidle before the measurements: median {100 * sorted(idle)[len(idle) // 2]:.0f} %, "
        f"lowest {100 * min(idle):.0f} %; load now {machine.load():.2f}; "
        f"{os.cpu_count()} cores{quiet}"
        if idle
        else "\nnothing was measured"
    )
    if chosen.png:
        report.picture(results, chosen.png)


def _measure(
    chosen: argparse.Namespace,
    pythons: dict[str, str],
    results: dict[str, Any],
    idle: list[float],
    number: int,
    model: str,
    name: str,
) -> None:
    """Measures one contender once, says so, and adds it to `results`."""
    contender = CONTENDERS[name]
    if isinstance(results.get(name), str):
        return
    python = pythons[contender.stack]
    label = f"round {number + 1}  {model:12} {name:22}"
    try:
        absent = run.missing(contender, python)
        if absent:
            results[name] = absent
            print(f"{label} {absent}", flush=True)
            return
        share = machine.idle_share()
        idle.append(share)
        before = machine.load()
        one = run.measure(
            contender, model, batch=chosen.batch, seconds=chosen.seconds, python=python
        )
    except run.Failed as error:
        results[name] = "failed"
        print(f"{label} failed:\n{error}", flush=True)
        return
    results.setdefault(name, []).append({**one, "idle_before": share, "load_before": before})
    print(
        f"{label} {one['examples_per_second']:8.0f} examples/s, {one['cpu_ms_per_step']:7.1f} ms "
        f"CPU a step, end of fit {one['end_seconds']:5.2f} s   "
        f"(idle before {100 * share:.0f} %, load {before:.2f})",
        flush=True,
    )


def _write(
    chosen: argparse.Namespace, results: report.Results, idle: list[float], started: str
) -> None:
    """Writes all that is known; the file is whole at any time."""
    record = {
        "started": started,
        "machine": {"cores": os.cpu_count(), "cpu": machine.cpu(), "idle": idle},
        "arguments": vars(chosen),
        "settings": {
            m: {n: CONTENDERS[n].described(m) for n in chosen.contenders} for m in chosen.models
        },
        "ratios": report.ratios(results),
        "results": results,
    }
    part = f"{chosen.json}.part"
    pathlib.Path(part).write_text(json.dumps(record, indent=1), encoding="utf-8")
    os.replace(part, chosen.json)


if __name__ == "__main__":
    main()
