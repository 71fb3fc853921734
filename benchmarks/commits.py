"""What a training step pays for commits in the background.

    python benchmarks/commits.py [--json] [--rounds 8] [--directory DIR] [--pinned | --unpinned]

A multilayer perceptron of 20 million parameters trains with Adam (the state is 240 MB). Rounds of
steps without a commit and rounds that last as long as one takes are run in turns, so that both
see the same machine. Each worker process is pinned to one core, or free on all. Printed are medians
of a step and the ratio; a ratio of 1.10 is a step time that rises by 10 %. Last come the commits
themselves: what the copy costs that the caller has to make, and how long one takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCH = 64
WIDTH = 3100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each kind (8)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round without (2)")
    parser.add_argument("--directory", default=None, help="where to write (a temporary one)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--pinned", action="store_true", help="on one core only")
    kinds.add_argument("--unpinned", action="store_true", help="on all cores only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("RESULT " + json.dumps(measure(options)))
        return 0
    names = ["pinned", "unpinned"]
    if options.pinned or options.unpinned:
        names = ["pinned"] if options.pinned else ["unpinned"]
    results = {name: run(options, is_pinned=name == "pinned") for name in names}
    if options.json:
        print(json.dumps(results))
        return 0
    for name, result in results.items():
        print(
            f"{name:9} step {result['quiet_ms']:6.1f} ms, during commits "
            f"{result['busy_ms']:6.1f} ms: x {result['ratio']:.3f} "
            f"(rounds {min(result['ratios']):.2f} to {max(result['ratios']):.2f}); "
            f"a commit of {result['megabytes']:.0f} MB takes {result['commit_s']:.1f} s, "
            f"{result['alone_s']:.2f} s alone; copying {result['copy_ms']:.0f} ms"
        )
    return 0


def run(options: argparse.Namespace, is_pinned: bool) -> dict[str, Any]:
    """Measures in a process of its own."""
    command = [sys.executable, __file__, "--child", "--rounds", str(options.rounds)]
    command += ["--seconds", str(options.seconds)]
    if options.directory:
        command += ["--directory", options.directory]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if is_pinned:
        command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), *command]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    raise SystemExit(f"the measurement failed:\n{done.stdout}\n{done.stderr}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    from tfdist.state.store import Snapshot
    from tfdist.state.store import Store
    from tfdist.state.writer import AsyncWriter

    cores = len(os.sched_getaffinity(0))
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    import keras

    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    x = np.random.default_rng(0).random((BATCH, 784), "float32")
    y = np.arange(BATCH) % 10
    batch = (tf.constant(x), tf.constant(y))
    model.optimizer.build(model.trainable_variables)
    step = tf.function(model.train_step)

    directory = tempfile.mkdtemp(prefix="commits-", dir=options.directory)
    writer = AsyncWriter(Store(directory))
    copies: list[float] = []

    def snapshot(number: int) -> Snapshot:
        began = time.perf_counter()
        arrays = writer.copy(
            {
                v.path: tf.convert_to_tensor(v.value)
                for v in model.variables + model.optimizer.variables
            }
        )
        copies.append(time.perf_counter() - began)
        return Snapshot(number, {"epoch": 0}, arrays)

    commits: list[float] = []

    def round_of(is_busy: bool) -> float:
        """Returns the median time of a step."""
        times = []
        began = time.perf_counter()
        if is_busy:
            writer.submit(snapshot(len(commits)))
        while not writer.is_idle if is_busy else time.perf_counter() < began + options.seconds:
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
        if is_busy:
            commits.append(time.perf_counter() - began)
        return statistics.median(times)

    try:
        for _ in range(5):
            step(batch)
        began = time.perf_counter()
        state = snapshot(0)
        writer.submit(state)
        writer.wait()
        alone = time.perf_counter() - began
        round_of(False)
        pairs = [(round_of(False), round_of(True)) for _ in range(options.rounds)]
        writer.close()
    finally:
        shutil.rmtree(directory)
    quiet, busy = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratios = [b / q for q, b in pairs]
    return {
        "quiet_ms": 1e3 * quiet,
        "busy_ms": 1e3 * busy,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "megabytes": sum(array.nbytes for array in state.arrays.values()) / 1e6,
        "commit_s": statistics.median(commits),
        "alone_s": alone,
        "copy_ms": 1e3 * statistics.median(copies),
        "cores": cores,
    }


if __name__ == "__main__":
    sys.exit(main())
