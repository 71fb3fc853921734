"""The same program gives the same numbers on one device, two replicas, and two and three workers.

`scripts/scenarios.py` is run once on one device by Keras alone (no strategy: the engine leaves such
models to Keras), then under each strategy. Global batches divide by the number of replicas.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import run_script

SCRIPT = Path(__file__).parent / "scripts" / "scenarios.py"

SCENARIOS = (
    "sequential",
    "functional_dicts",
    "unbuilt_subclass",
    "unbuilt_predict_first",
    "string_features",
    "custom_train_step",
    "two_optimizers_no_call",
    "optimizer_outside_scope",
    "run_eagerly",
    "steps_per_execution",
    "repeated_with_steps",
    "arrays_in_order",
    "seeded_orders",
    "step_of_the_keras_guide",
    "few_rows",
    "uneven_batches",
    "clipping",
    "batch_norm",
    "numbers_of_numpy_and_stops",
    "plain_numbers",
    "shuffled_arrays_see_all",
    "shuffled_dataset_sees_all",
    "py_dataset_sees_all",
    "generator_sees_all",
    "on_batches",
    "classification_metrics",
    "schedules_and_stops",
    "fit_twice_and_trainable",
    "lone_numbers_from_step",
)
#: Keras alone counts a step too many for every epoch of data of unknown length.
WRONG_IN_KERAS = ("unknown_length",)

WORLDS = {"two replicas": (1, ("mirrored", "2")), "two workers": (2, ()), "three workers": (3, ())}


def _run(folder, workers, where):
    folder.mkdir()
    run = run_script(
        SCRIPT,
        workers=workers,
        args=[*where, "--", *SCENARIOS, *WRONG_IN_KERAS],
        timeout=280,
        tmp_path=folder,
    )
    assert run.code == 0, run.output
    return [run.result(f"worker {index}") for index in range(workers)]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Starts what one process each runs, side by side: one device and two replicas."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(_run, tmp_path_factory.mktemp("one") / "run", workers, where)
            for name, (workers, where) in {"one device": (1, ()), **WORLDS}.items()
            if workers == 1
        }


@pytest.fixture(scope="module")
def one_device(started):
    [report] = started["one device"].result()
    assert report["replicas"] == 1
    return report["results"]


@pytest.fixture(scope="module", params=WORLDS)
def world(request, started, tmp_path_factory):
    workers, where = WORLDS[request.param]
    if request.param in started:
        reports = started[request.param].result()
    else:
        concurrent.futures.wait(started.values())  # A cluster needs the machine for itself.
        reports = _run(tmp_path_factory.mktemp("world") / "run", workers, where)
    replicas = int(where[1]) if where else workers
    assert {report["replicas"] for report in reports} == {replicas}
    return [report["results"] for report in reports]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_replicas_compute_what_one_device_computes(scenario, world, one_device):
    for results in world:
        _assert_same(one_device[scenario], results[scenario], scenario)


@pytest.mark.parametrize("scenario", (*SCENARIOS, *WRONG_IN_KERAS))
def test_every_worker_reports_the_same_to_the_last_bit(scenario, world):
    for results in world:
        assert results[scenario] == world[0][scenario]


def test_iterations_count_the_steps_that_were_run(world):
    for results in world:
        assert results["unknown_length"]["iterations"] == 12


@pytest.mark.parametrize(
    "scenario",
    [s for s in SCENARIOS if s.endswith(("sees_all", "see_all"))],
)
def test_every_example_is_seen_once_in_every_epoch(scenario, world):
    for results in world:
        history = results[scenario]["history"]
        assert set(history["least"]) == set(history["most"]) == {1.0}


def _assert_same(expected, received, path):
    if isinstance(expected, dict):
        assert set(expected) == set(received), path
        for key in expected:
            _assert_same(expected[key], received[key], f"{path}/{key}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], (list, dict)):
        assert len(expected) == len(received), path
        for index, (one, other) in enumerate(zip(expected, received, strict=True)):
            _assert_same(one, other, f"{path}/{index}")
    elif expected is None or isinstance(expected, str):
        assert expected == received, path
    else:
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5, err_msg=path)
