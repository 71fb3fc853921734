"""What every contender does alike: take its core, its orders, the time; hand back one result.

Imports no framework: a process takes its core before a framework counts the cores.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

#: Parts of the measured time whose rates the median is taken of: a pause hits only its own part.
PARTS = 10
#: How long a worker waits for the first after warm-up. They take the last step together, but the
#: `fit` of stock TensorFlow has returned up to a minute later.
PATIENCE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Orders:
    """What one process of one measurement is to do.

    Attributes:
        model: A name of `workloads.WORKLOADS`.
        batch: Examples per worker and step.
        seconds: How long to measure.
        processes: Workers in all.
        directory: Shared by the workers of this measurement, empty at the start.
        options: The contender's settings.
        rank: This worker's number.
    """

    model: str
    batch: int
    seconds: float
    processes: int
    directory: str
    options: dict[str, Any]
    rank: int

    @property
    def accumulate(self) -> int:
        """Steps of one update. Rates are taken over whole updates: their last steps cost more."""
        return self.options.get("accumulate", 1)


def begin() -> Orders:
    """Reads the orders from the command line and pins this process to a core of its own."""
    given = json.loads(sys.argv[1])
    if "TF_CONFIG" in os.environ:
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    else:
        rank = int(os.environ.get("SYNC_RANK", "0"))
    orders = Orders(**given, rank=rank)
    loaded = {"tensorflow", "torch", "jax"} & set(sys.modules)
    assert not loaded, f"{loaded} imported before the process was pinned"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return orders


class Clock:
    """The times at which steps ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float, float]] = []

    def step(self, done: int) -> None:
        """Notes that `done` steps are done."""
        self.ends.append((done, time.perf_counter(), time.process_time()))


def compare(orders: Orders, train: Callable[[int, Clock], None], parameters: int) -> None:
    """Runs `train` to warm up, then for the seconds asked for, and prints the result.

    Args:
        orders: From `begin`.
        train: Runs a number of steps and tells a clock of them.
        parameters: Trainable parameters of the model.
    """
    started = time.perf_counter()
    clock = Clock()
    train(4 * orders.accumulate, clock)  # Compiles.
    steps = _steps(orders, clock)
    warm = time.perf_counter() - started
    clock = Clock()
    train(steps, clock)
    returned = time.perf_counter()
    result = {
        "rank": orders.rank,
        "parameters": parameters,
        "steps": steps,
        "warm_up_seconds": warm,
        "end_seconds": returned - clock.ends[-1][1],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **_rates(orders, clock),
    }
    print("RESULT " + json.dumps(result), flush=True)


def _steps(orders: Orders, clock: Clock) -> int:
    """Returns the steps to measure, the same on all workers: the first worker says."""
    file = pathlib.Path(orders.directory, "steps")
    if orders.rank == 0:
        # The second half: the first holds what is compiled late.
        first, last = clock.ends[len(clock.ends) // 2 - 1], clock.ends[-1]
        step = (last[1] - first[1]) / (last[0] - first[0])
        updates = max(PARTS + 2, round(orders.seconds / step / orders.accumulate))
        part = file.with_suffix(".part")
        part.write_text(str(updates * orders.accumulate))
        part.rename(file)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no number of steps from worker 0 in {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.01)
    return int(file.read_text())


def _rates(orders: Orders, clock: Clock) -> dict[str, Any]:
    """Returns examples per second over all workers, and the share of the core in use.

    The first tenth of the steps is left out. The rate is the median over the parts of the rest.
    """
    ends = [end for end in clock.ends if end[0] % orders.accumulate == 0]
    ends = ends[max(1, len(ends) // PARTS) :]
    size = max(1, (len(ends) - 1) // PARTS)
    marks = ends[::size]
    examples = orders.batch * orders.processes
    rates = [
        examples * (b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(marks, marks[1:], strict=False)
    ]
    wall, cpu = ends[-1][1] - ends[0][1], ends[-1][2] - ends[0][2]
    return {
        "examples_per_second": statistics.median(rates),
        "mean_examples_per_second": examples * (ends[-1][0] - ends[0][0]) / wall,
        "cpu_share": cpu / wall,
        "cpu_ms_per_step": 1e3 * cpu / (ends[-1][0] - ends[0][0]),
    }
