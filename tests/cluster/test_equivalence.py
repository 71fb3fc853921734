"""Every optimizer, loss, metric, input and way to run trains in a cluster as on one device.

`scripts/equivalence.py` holds the cells: each is a small training that reports every variable of
model and optimizer and the History. One device is Keras alone, without the engine. The cells here
take about three minutes; all of them, 256, run with `-m slow`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.worlds import ALONE
from tests.support.worlds import CLUSTERS
from tests.support.worlds import reports_of
from tests.support.worlds import side_by_side
from tfdist.testing.differences import Tolerance
from tfdist.testing.differences import excessive

SCRIPT = Path(__file__).parent / "scripts" / "equivalence.py"

#: What the script calls each world.
WHERE = {
    ALONE: "one",
    "two replicas": "replicas",
    "two workers": "workers",
    "three workers": "workers",
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
    "inputs/ragged_without_ids",
    "sparse/embedding/sgd_accumulation",
    "run/steps_per_execution_accumulation",
    "run/train_on_batch",
    "metric/maximum",
    "batch_norm/synchronized_uneven",
)
#: What is the same code under every strategy of replicas.
ON_REPLICAS = (
    "adamw/clipvalue/acc3/last1",
    "numbers/even",
    "numbers/last batch of 5",
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
)
#: Three workers on two cores take their time; they run the others with `-m slow`.
ON_WORKERS = tuple(
    cell
    for cell in EVERYWHERE[::2]
    if cell not in ("sgd/noclip/acc3/last1", "loss/masked_sequences")  # As two others of these.
)
assert "inputs/ragged_without_ids" in ON_WORKERS  # TensorFlow crashed there, too.
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


def _run(name, cells, folder, timeout):
    reports = reports_of(
        SCRIPT,
        name,
        [WHERE[name], *cells],
        folder,
        timeout,
        env={"TFDIST_ENGINE": "0" if name == ALONE else None},
    )
    return [report["cells"] for report in reports]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    def run(name, folder):
        cells = [cell for each, cell in CASES if name in (ALONE, each)]
        return _run(name, dict.fromkeys(cells), folder, 900)

    with side_by_side(run, tmp_path_factory) as reports:
        yield reports


@pytest.fixture(scope="module")
def one_device(worlds):
    [report] = worlds(ALONE)
    return report


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("name", "cell"), CASES)
def test_a_cluster_trains_as_one_device(name, cell, worlds, one_device):
    for report in worlds(name):
        _assert_same(cell, one_device[cell], report[cell])


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("cell", ON_WORKERS)
def test_every_worker_has_the_same_numbers(cell, worlds):
    reports = worlds("three workers")
    for report in reports:
        assert "error" not in report[cell], report[cell]["error"]
        assert report[cell]["values"] == reports[0][cell]["values"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", CLUSTERS)
def test_all_cells_train_as_on_one_device(name, tmp_path_factory):
    cells = _all_cells()
    [expected] = _run(ALONE, cells, tmp_path_factory.mktemp("one"), 1800)
    reports = _run(name, cells, tmp_path_factory.mktemp("world"), 3600)
    failures = []
    for cell in cells:
        for report in reports:
            try:
                _assert_same(cell, expected[cell], report[cell])
            except AssertionError as error:
                failures.append(f"{cell}: {error}")
    assert not failures, "\n\n".join(failures)


def _assert_same(cell, expected, received):
    assert "error" not in expected, f"one device: {expected['error']}"
    assert "error" not in received, received["error"]
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
