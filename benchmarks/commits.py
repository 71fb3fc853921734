"""What training pays for commits in the background: the rise of the time of a step.

    python benchmarks/commits.py [--json FILE] [--cases small large small-2 large-2] [--commits 8]

A multilayer perceptron of 21 M or 0.8 M parameters trains with Adam (the state is 250 or 9.5 MB)
inside `fit`, with `BackupAndRestore`, under `tfdist run`: in one process on all cores, or as two
workers, each pinned to a core. Steps are timed from batch end to batch end, on the chief, for which
all others wait.

A commit is in flight from the boundary at which it is asked for until it is durable. Its *rise* is
the mean of the steps that lie in that time, even in part, over the mean of as many undisturbed ones
before and after it; the step that takes the snapshot is among them, and is told apart as well, in
multiples of the undisturbed median. 1.10 is a step time that rises by 10 %. Printed are medians of
commits; `median step` compares medians of steps instead of means, which on a machine that others
use say little. As control, `quiet` compares undisturbed steps after a commit with those before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

from sync_contenders import machine  # noqa: E402

BATCH = 64
#: Width of the two hidden layers, workers, steps from one commit to the next.
CASES = {
    "small": (512, 1, 500),
    "large": (4096, 1, 80),
    "small-2": (512, 2, 300),
    "large-2": (4096, 2, 60),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--commits", type=int, default=8, help="of each case (8)")
    parser.add_argument("--every", type=int, help="steps from one commit to the next")
    parser.add_argument(
        "--no-jit", action="store_true", help="without XLA; Keras's default is with"
    )
    parser.add_argument("--directory", default=None, help="where to write (a temporary one)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        found = measure(options)
        if found is not None:
            print("RESULT " + json.dumps(found), flush=True)
        return 0
    results = {}
    for name in options.cases:
        idle = machine.idle_share()
        results[name] = {**run(name, options), "idle_before": idle}
        print(line(name, results[name]), flush=True)
    print(f"{os.cpu_count()} cores, {machine.cpu()}; load now {machine.load():.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


def line(name: str, result: dict[str, Any]) -> str:
    def middle(key: str) -> float:
        return statistics.median(commit[key] for commit in result["commits"])

    rises = [commit["rise"] for commit in result["commits"]]
    return (
        f"{name:8} step {result['step_ms']:6.1f} ms; during a commit x {middle('rise'):.3f} "
        f"({min(rises):.2f} to {max(rises):.2f}; median step x {middle('typical'):.3f}), "
        f"quiet x {middle('quiet'):.3f}; "
        f"its first step x {middle('first'):.2f}, the longest x {middle('longest'):.2f}, "
        f"longest of the quiet x {middle('quiet_longest'):.2f}; {middle('steps'):.0f} steps, "
        f"{middle('seconds'):.2f} s; idle before {100 * result['idle_before']:.0f} %"
    )


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one case in processes of its own."""
    workers = CASES[name][1]
    command = [__file__, "--child", name, "--commits", str(options.commits)]
    command += ["--every", str(options.every)] if options.every else []
    command += ["--no-jit"] if options.no_jit else []
    with tempfile.TemporaryDirectory(prefix="commits-", dir=options.directory) as directory:
        command += ["--directory", directory]
        start = ["-m", "tfdist", "run", "--workers", str(workers)]
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        done = subprocess.run(
            [sys.executable, *start, *command],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=1200,
        )
    for text in done.stdout.splitlines():
        if "RESULT " in text:
            return dict(json.loads(text.partition("RESULT ")[2]))
    raise SystemExit(f"the measurement failed:\n{done.stdout}\n{done.stderr}")


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """Trains, and returns the result on the chief."""
    import tfdist

    width, workers, every = CASES[options.child]
    every = options.every or every
    if workers > 1:
        cores = sorted(os.sched_getaffinity(0))
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    tfdist.activate()
    scope = tfdist.strategy().scope() if workers > 1 else None
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    ends: list[float] = []
    asked: list[int] = []
    durable: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

    class Backup(tfdist.callbacks.BackupAndRestore):
        def commit(self, training: Any, *, wait: bool = False) -> None:
            asked.append(len(ends) - 1)
            super().commit(training, wait=wait)

        def _note_commit(self, commit: Any) -> None:
            durable.append(time.perf_counter())
            super()._note_commit(commit)

    keras.utils.set_random_seed(1)
    with scope or contextlib.nullcontext():
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        jit = False if options.no_jit else "auto"
        model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=jit)
    x = np.random.default_rng(0).standard_normal((8 * BATCH * workers, 1024), "float32")
    y = np.arange(8 * BATCH * workers) % 10
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH * workers).repeat()
    steps = every * (options.commits + 2) + 2
    backup = Backup(os.path.join(options.directory, "backup"), save_every=every)
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[Clock(), backup])
    if not durable:
        return None
    return {
        "megabytes": 4e-6 * sum(v.shape.num_elements() for v in map(_raw, _state(model))),
        **evaluate(ends, asked, durable),
    }


def _state(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def _raw(variable: Any) -> Any:
    return variable.value


def evaluate(ends: list[float], asked: list[int], durable: list[float]) -> dict[str, Any]:
    """Returns what the commits cost; the first is left out.

    Args:
        ends: When steps ended, in seconds.
        asked: After which steps commits were asked for.
        durable: When each was durable.
    """
    times = [b - a for a, b in zip(ends, ends[1:], strict=False)]  # times[i]: step i to i + 1.
    spans = []
    for begin, end in zip(asked, durable, strict=False):
        last = next((i for i, each in enumerate(ends) if each >= end), len(ends) - 1)
        spans.append((begin, max(last, begin + 1)))
    busy = {i for begin, end in spans for i in range(begin, end)}
    quiet = statistics.median(t for i, t in enumerate(times) if i not in busy and i > 20)
    commits = []
    for number, (begin, end) in enumerate(spans[1:-1], start=1):
        before = range(max(spans[number - 1][1] + 1, begin - (end - begin)), begin)
        after = range(end + 1, min(spans[number + 1][0], end + 1 + end - begin))
        inside = times[begin:end]
        around = [times[i] for i in (*before, *after)]
        if len(around) < 4:
            continue
        control = statistics.mean(times[i] for i in after) / statistics.mean(
            times[i] for i in before
        )
        commits.append(
            {
                "rise": statistics.mean(inside) / statistics.mean(around),
                "typical": statistics.median(inside) / statistics.median(around),
                "quiet": control,
                "first": inside[0] / quiet,
                "longest": max(inside) / quiet,
                "quiet_longest": max(around) / quiet,
                "steps": len(inside),
                "seconds": durable[number] - ends[begin],
            }
        )
    return {"step_ms": 1e3 * quiet, "commits": commits}


if __name__ == "__main__":
    sys.exit(main())
