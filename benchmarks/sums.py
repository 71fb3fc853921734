"""What a sum over workers takes, by itself: shared memory beside TensorFlow's ring.

    tfdist run --workers 2 benchmarks/sums.py

Every size is summed by both, turn by turn, float32, each worker on a core of its own. Printed are
medians of wall time, in milliseconds, and of the hub's gather of a number.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import tfdist

os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")
task = tfdist.detect().task
os.sched_setaffinity(0, {task.index % (os.cpu_count() or 1)})
strategy = tfdist.strategy()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist import collectives  # noqa: E402
from tfdist.cluster import current  # noqa: E402
from tfdist.engine.exchange import share_memory  # noqa: E402

SIZES = {"84 MB": 21_000_000, "20 MB": 5_000_000, "3.2 MB": 800_000, "4 KB": 1000}
ROUNDS = 15


def timed(function: Callable[[], Any]) -> float:
    """Returns how long a call takes, in milliseconds."""
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


def on_replica(tensor: tf.Tensor) -> tf.Tensor:
    """Sums as Keras's optimizers do."""
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, [tf.identity(tensor)])[0]


def main() -> None:
    """Measures and prints."""
    group = current.group()
    if group is None:
        raise SystemExit("run it with: tfdist run --workers 2 benchmarks/sums.py")
    for name, size in SIZES.items():
        values = np.ones(size, np.float32)
        reducer, why = share_memory(group, name, [collectives.Bucket("float32", ((size,),))])
        if reducer is None:
            raise SystemExit(f"these workers cannot share memory: {why}")
        tensor = tf.constant(values)

        @tf.function
        def ring(tensor: tf.Tensor) -> tf.Tensor:
            return strategy.run(on_replica, args=(tensor,))

        memory: list[float] = []
        wire: list[float] = []
        for _ in range(ROUNDS):
            memory.append(timed(lambda r=reducer, v=values: r.reduce(0, [v])))
            wire.append(timed(lambda f=ring, t=tensor: f(t)))
        shown = statistics.median(memory), statistics.median(wire)
        if task.index == 0:
            print(f"{name:>7}: shared memory {shown[0]:8.2f} ms   ring in one {shown[1]:8.2f} ms")
    gathers = [timed(lambda: group.all_gather("a number", 1, 60.0)) for _ in range(200)]
    if task.index == 0:
        print(f"a number over the hub: {statistics.median(gathers):.2f} ms")


main()
