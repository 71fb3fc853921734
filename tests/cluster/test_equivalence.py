"""Every optimizer, loss, metric, input and way to run trains in a cluster as on one device.

`scripts/equivalence.py` holds the cells: each is a small training that reports every variable of
model and optimizer and the History. One device is Keras alone, without the engine. The cells here
take about three minutes; all of them, 256, run with `-m slow`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import run_script
from tfdist.testing.differences import Tolerance
from tfdist.testing.differences import excessive

SCRIPT = Path(__file__).parent / "scripts" / "equivalence.py"

WORLDS = {
    "two replicas": (1, "replicas"),
    "two workers": (2, "workers"),
    "three workers": (3, "workers"),
}

#: What depends on processes, or on how many replicas there are.
EVERYWHERE = (
    "sgd/noclip/acc3/last1",
    "sgd/global/acc1/starved",
    "adam/clipnorm/acc1/last1",
    "adam/global/acc3/starved",
    "adamw/global/acc1/last1",
    "lamb/clipnorm/acc3/starved",
    "adafactor/noclip/acc1/starved",
    "numbers/last batch of 1",
    "numbers/EMA overwrite every 2 steps",
    "numbers/loss function that returns a scalar mean",
    "numbers/steps_per_execution 3",
    "numbers/jit_compile",
    "more/batch_norm_synchronized",
    "more/batch_logs_count_37",
    "more/masked_loss_several_batches",
    "more/dropout_masks",
    "more/loss_scale_overflow_on_one_replica",
    "optimizer/ema_accumulation",
    "optimizer/accumulation_over_fits",
    "types/mixed_float16_overflow_on_one_replica",
    "loss/mean_with_sample_weight/weighted",
    "loss/two_outputs",
    "loss/masked_sequences",
    "step/compute_loss/uneven",
    "sparse/embedding/adam",
    "inputs/ragged",
    "run/steps_per_execution_accumulation",
    "run/train_on_batch",
    "metric/maximum",
    "batch_norm/synchronized_uneven",
)
#: What is the same code under every strategy of replicas.
ON_REPLICAS = (
    "sgd/noclip/acc1/even",
    "sgd/noclip/acc3/even",
    "adam/clipnorm/acc1/even",
    "adamw/clipvalue/acc3/last1",
    "adafactor/clipvalue/acc3/last1",
    "numbers/even",
    "numbers/last batch of 5",
    "numbers/last batch of 3",
    "numbers/clipnorm",
    "numbers/global_clipnorm",
    "numbers/clipvalue",
    "numbers/gradient accumulation",
    "numbers/mean_with_sample_weight",
    "more/masked_loss",
    "optimizer/multi_global_clip",
    "optimizer/constraints",
    "types/mixed_bfloat16",
    "loss/sum",
    "loss/None",
    "loss/scalar_sum",
    "loss/class_weight",
    "loss/add_loss",
    "loss/regularizers",
    "step/reduce_mean/uneven",
    "step/average_loss/uneven",
    "sparse/embedding/sgd_clipnorm",
    "inputs/sparse_dense",
    "run/eagerly",
    "metric/classes",
    "metric/f1",
)
#: Three workers on two cores take their time; they run the others with `-m slow`.
ON_WORKERS = EVERYWHERE[::2]
CASES = [
    *(("two replicas", cell) for cell in (*EVERYWHERE, *ON_REPLICAS)),
    *(("three workers", cell) for cell in ON_WORKERS),
]
#: Rounding of the type that a layer computes in.
TYPES = {"types/mixed_bfloat16": 3e-2, "types/mixed_float16": 2e-2}


def _all_cells():
    listing = subprocess.run(
        [sys.executable, SCRIPT, "--list"], capture_output=True, text=True, check=True, timeout=120
    )
    return listing.stdout.splitlines()


def _run(folder, workers, where, cells, timeout):
    folder.mkdir()
    run = run_script(
        SCRIPT,
        workers=workers,
        args=[where, *cells],
        env={"TFDIST_ENGINE": "0" if where == "one" else None},
        timeout=timeout,
        tmp_path=folder,
    )
    assert run.code == 0, run.output
    reports = []
    for index in range(workers):
        text = (run.out_dir / f"worker-{index}.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        reports.append({line["end"]: line for line in lines if "end" in line})
    return reports


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Starts what one process each runs, side by side: one device and two replicas."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        cells = (*EVERYWHERE, *ON_REPLICAS)
        folder = tmp_path_factory.mktemp("one") / "run"
        one = pool.submit(_run, folder, 1, "one", cells, 280)
        replicas = pool.submit(_world, "two replicas", tmp_path_factory.mktemp("world") / "run")
        yield {"one device": one, "two replicas": replicas}


@pytest.fixture(scope="module")
def one_device(started):
    [report] = started["one device"].result()
    return report


@pytest.fixture(scope="module")
def worlds(started, tmp_path_factory):
    """Runs each world once, when its first cell is asked for."""

    @functools.cache
    def run(name):
        if name in started:
            return started[name].result()
        concurrent.futures.wait(started.values())  # A cluster needs the machine for itself.
        return _world(name, tmp_path_factory.mktemp("world") / "run")

    return run


def _world(name, folder):
    workers, where = WORLDS[name]
    cells = [cell for each, cell in CASES if each == name]
    reports = _run(folder, workers, where, cells, 290)
    assert {line["replicas"] for line in reports[0].values()} == {max(2, workers)}
    return reports


@pytest.mark.parametrize(("name", "cell"), CASES)
def test_a_cluster_trains_as_one_device(name, cell, worlds, one_device):
    for report in worlds(name):
        _assert_same(cell, one_device[cell], report[cell])


@pytest.mark.parametrize("cell", ON_WORKERS)
def test_every_worker_has_the_same_numbers(cell, worlds):
    reports = worlds("three workers")
    for report in reports:
        assert "error" not in report[cell], report[cell]["trace"]
        assert report[cell]["values"] == reports[0][cell]["values"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", WORLDS)
def test_all_cells_train_as_on_one_device(name, tmp_path):
    workers, where = WORLDS[name]
    cells = _all_cells()
    [expected] = _run(tmp_path / "one", 1, "one", cells, 1800)
    reports = _run(tmp_path / "world", workers, where, cells, 3600)
    failures = []
    for cell in cells:
        for report in reports:
            try:
                _assert_same(cell, expected[cell], report[cell])
            except AssertionError as error:
                failures.append(f"{cell}: {error}")
    assert not failures, "\n\n".join(failures)


def _assert_same(cell, expected, received):
    assert "error" not in expected, f"one device: {expected['trace']}"
    assert "error" not in received, received["trace"]
    for key, value in received["expected"].items():
        # Absolute numbers, with six decimals.
        np.testing.assert_allclose(received["values"][key], value, rtol=1e-5, atol=2e-6)
    loose = next((rtol for kind, rtol in TYPES.items() if cell.startswith(kind)), None)
    for part in ("history", ""):
        rtol = loose or (1e-6 if part else 1e-5)
        found = excessive(
            _of(part, expected["values"]), _of(part, received["values"]), Tolerance(rtol, 1e-9)
        )
        assert not found, "\n".join(map(str, found))


def _of(part, values):
    return {key: value for key, value in values.items() if key.startswith("history/") == bool(part)}
