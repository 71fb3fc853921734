"""`fit`, `evaluate` and `predict` on parameter servers, in real clusters."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import run_script

SCRIPTS = Path(__file__).parent / "scripts"
ROWS = 509

#: Cells that differ from others by an optimizer or a clip alone run with `-m slow`.
OFTEN = (
    "adamw",
    "nadam",
    "adafactor",
    "global_clipnorm",
    "average",
    "schedule",
    "constraint",
    "normalized",
    "clipped rows",
    "penalty of a table",
    "ragged",
    "guide",
    "two optimizers",
    "added loss",
    "weighted",
    "classes",
    "two outputs",
    "own step",
    "unknown length",
    "generator",
    "steps per execution",
    "validated",
    "bfloat16",
)
#: What plain Keras on one device does another way, on purpose or not; tested one by one below.
_OTHERWISE = {"own step", "unknown length", "generator"}
_REFUSED = "clipped afterwards"


def _cells(folder, *names):
    """Returns what asynchronous.py reports of cells (of all without names), with one worker."""
    run = run_script(
        SCRIPTS / "asynchronous.py",
        workers=1,
        launcher_args=["--ps", "2"],
        args=names,
        timeout=400,
        tmp_path=folder,
    )
    assert run.code == 0, run.output
    return run.result("chief 0")


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    return _cells(tmp_path_factory.mktemp("one-worker"), *OFTEN)


@pytest.fixture(scope="module")
def four_workers(tmp_path_factory):
    """What together.py reports, with four workers and two servers."""
    run = run_script(
        SCRIPTS / "together.py",
        workers=4,
        launcher_args=["--ps", "2"],
        timeout=300,
        tmp_path=tmp_path_factory.mktemp("four-workers"),
    )
    assert run.code == 0, run.output
    return run.result("chief 0")


@pytest.mark.timeout(500)
def test_one_worker_computes_what_one_device_computes(one_worker):
    assert set(one_worker) == set(OFTEN)
    _assert_same(one_worker)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_one_worker_computes_what_one_device_computes_in_all_cells(tmp_path):
    cells = _cells(tmp_path)
    assert "Received: an assignment to 'clipped" in cells.pop(_REFUSED)["error"]
    assert len(cells) >= 36
    _assert_same(cells)


def _assert_same(cells):
    for name, cell in cells.items():
        assert "error" not in cell, f"{name}: {cell['error']}"
        alone, servers = cell["one device"], cell["servers"]
        if name in _OTHERWISE:
            continue
        assert servers["iterations"] == alone["iterations"], name
        for kind in ("weights", "slots", "predicted"):
            assert len(servers[kind]) == len(alone[kind]), f"{kind} of {name}"
            for ours, theirs in zip(servers[kind], alone[kind], strict=True):
                np.testing.assert_allclose(
                    ours, theirs, rtol=1e-4, atol=1e-5, err_msg=f"{kind} of {name}"
                )
        assert servers["history"].keys() == alone["history"].keys(), name
        for key, values in alone["history"].items():
            np.testing.assert_allclose(
                servers["history"][key], values, rtol=2e-5, err_msg=f"{key} of {name}"
            )


@pytest.mark.timeout(500)
def test_steps_are_counted_right_where_keras_counts_one_too_many(one_worker):
    assert one_worker["unknown length"]["servers"]["iterations"] == 2 * math.ceil(83 / 16)
    assert one_worker["generator"]["servers"]["iterations"] == 4
    for name in ("unknown length", "generator"):
        # Plain SGD: the counter plays no part in the weights.
        np.testing.assert_allclose(
            np.concatenate([np.ravel(w) for w in one_worker[name]["servers"]["weights"]]),
            np.concatenate([np.ravel(w) for w in one_worker[name]["one device"]["weights"]]),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.timeout(500)
def test_a_step_of_the_users_own_reports_the_mean_over_all_examples(one_worker):
    cell = one_worker["own step"]
    for ours, theirs in zip(cell["servers"]["weights"], cell["one device"]["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    rows = [16, 16, 16, 16, 16, 3]  # Keras on one device reports the last batch, of 3 examples.
    mean = np.average(cell["one device"]["losses"], weights=rows)
    assert cell["servers"]["history"]["loss"] == pytest.approx([mean], rel=1e-5)
    assert cell["servers"]["history"]["twice"] == pytest.approx([2 * mean], rel=1e-5)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cell", ["arrays", "unknown length", "dataset function"])
def test_every_example_is_seen_exactly_once_an_epoch(four_workers, cell):
    assert all(seen == [1.0, 1.0] for seen in four_workers[cell]["seen"])
    assert len(four_workers[cell]["seen"]) == 4


@pytest.mark.timeout(400)
def test_no_step_is_lost(four_workers):
    steps = {
        "arrays": 4 * math.ceil(ROWS / 16),
        "unknown length": 2 * math.ceil(ROWS / 7),
        "dataset function": 2 * sum(math.ceil(len(range(i, ROWS, 4)) / 16) for i in range(4)),
        "endless function": 2 * 21,
        "per worker dataset": 10,
        "after an error": math.ceil(ROWS / 16),
    }
    assert {name: four_workers[name]["iterations"] for name in steps} == steps


@pytest.mark.timeout(400)
def test_metrics_count_every_example_while_the_machine_is_busy(four_workers):
    cell = four_workers["measured"]
    assert cell["iterations"] == math.ceil(ROWS / 4)
    assert set(cell["alone"]) == {"loss", "accuracy", "auc", "mae"}
    for name, value in cell["alone"].items():
        assert cell["history"][name] == pytest.approx([value], rel=1e-5), name
        assert cell["history"][f"val_{name}"] == pytest.approx([value], rel=1e-5), name


@pytest.mark.timeout(400)
def test_four_workers_learn_as_much_from_the_same_examples_as_one_device(four_workers):
    servers, alone = four_workers["learned"]
    assert servers == pytest.approx(alone, rel=0.05)
    assert alone < 0.5  # The noise alone is 0.25, and the targets have a variance above 1.


@pytest.mark.timeout(400)
def test_callbacks_are_told_of_every_batch_in_order(four_workers):
    batches = list(range(math.ceil(ROWS / 16)))
    assert four_workers["told"] == {"begins": batches, "ends": batches}


@pytest.mark.timeout(400)
def test_training_that_is_stopped_counts_what_was_under_way(four_workers):
    stopped = four_workers["stopped"]
    assert stopped["epochs"] == 1
    assert stopped["ends"] == list(range(10))
    # How many were done ahead depends on how late the slowest worker is.
    assert 10 <= stopped["iterations"] < ROWS
    assert stopped["examples"] == stopped["iterations"]


@pytest.mark.timeout(400)
def test_predictions_are_in_the_order_of_the_examples(four_workers):
    assert four_workers["predicted"]["shape"] == [ROWS, 1]
    assert four_workers["predicted"]["off"] < 1e-3


@pytest.mark.timeout(400)
def test_an_error_of_the_model_ends_fit_and_not_the_job(four_workers):
    kind, message = four_workers["error"]
    assert kind == "InvalidArgumentError"
    assert "509" in message  # The id that is out of range, or the range.
