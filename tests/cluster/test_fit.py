"""The same program gives the same numbers on one device, two replicas, and two and three workers.

`scripts/scenarios.py` is run once on one device by Keras alone (no strategy: the engine leaves such
models to Keras), then under each strategy. Global batches divide by the number of replicas.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.worlds import ALONE
from tests.support.worlds import CLUSTERS
from tests.support.worlds import reports_of
from tests.support.worlds import side_by_side

SCRIPT = Path(__file__).parent / "scripts" / "scenarios.py"

pytestmark = pytest.mark.timeout(1000)

SCENARIOS = (
    "sequential",
    "functional_dicts",
    "unbuilt_subclass",
    "unbuilt_predict_first",
    "string_features",
    "two_optimizers_no_call",
    "optimizer_outside_scope",
    "run_eagerly",
    "repeated_with_steps",
    "arrays_in_order",
    "seeded_orders",
    "step_of_the_keras_guide",
    "few_rows",
    "uneven_batches",
    "batch_norm",
    "numbers_of_numpy_and_stops",
    "plain_numbers",
    "shuffled_arrays_see_all",
    "shuffled_dataset_sees_all",
    "py_dataset_sees_all",
    "generator_sees_all",
    "on_batches",
    "schedules_and_stops",
    "fit_twice_and_trainable",
    "lone_numbers_from_step",
)
#: What cells of test_equivalence.py and other scenarios have, too.
MORE_SCENARIOS = (
    "custom_train_step",
    "steps_per_execution",
    "clipping",
    "classification_metrics",
    "more_uneven_batches",
)
ALL_SCENARIOS = (*SCENARIOS, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE_SCENARIOS))
#: Keras alone counts a step too many for every epoch of data of unknown length.
WRONG_IN_KERAS = ("unknown_length",)


@pytest.fixture(scope="module")
def worlds(request, tmp_path_factory):
    """Runs the scenarios of the tests that were selected."""
    here = (item for item in request.session.items if item.module is request.module)
    selected = {item.callspec.params.get("scenario") for item in here if hasattr(item, "callspec")}
    names = [name for name in (*SCENARIOS, *MORE_SCENARIOS) if name in selected]

    def run(name, folder):
        where = ("mirrored", "2") if name == "two replicas" else ()
        args = [*where, "--", *names, *WRONG_IN_KERAS]
        return [report["results"] for report in reports_of(SCRIPT, name, args, folder, 900)]

    with side_by_side(run, tmp_path_factory) as reports:
        yield reports


@pytest.fixture(scope="module")
def one_device(worlds):
    [results] = worlds(ALONE)
    return results


#: Three workers take their time on two cores; test_equivalence.py has them, too.
OFTEN = ("two replicas", "two workers")


@pytest.fixture(
    scope="module",
    params=[
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CLUSTERS
    ],
)
def world(request, worlds):
    return worlds(request.param)


@pytest.mark.parametrize("scenario", ALL_SCENARIOS)
def test_replicas_compute_what_one_device_computes(scenario, world, one_device):
    for results in world:
        _assert_same(one_device[scenario], results[scenario], scenario)


@pytest.mark.parametrize("scenario", (*ALL_SCENARIOS, *WRONG_IN_KERAS))
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
