"""Preprocessing layers that are fitted once are the same on every worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import run_script

SCRIPT = Path(__file__).parent / "scripts" / "data" / "adapting.py"
LAYERS = ("numbers", "bins", "tokens", "ids", "texts")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    run = run_script(SCRIPT, workers=2, timeout=200, tmp_path=tmp_path_factory.mktemp("two"))
    assert run.code == 0, run.output
    return [run.result("worker 0"), run.result("worker 1")]


def _check(result):
    found, losses = result["found"], result["losses"]
    for name in LAYERS:
        made = found[name]
        array = made["array"]
        assert len(set(array)) > 1, "it has learned something"
        assert made["outside the scope"] == array
        for kind in ("dataset", "sharded", "sharded stream"):
            # Bins are estimated batch by batch; means are added up in another order.
            tolerance = 2 if name == "bins" else 1e-4
            assert np.allclose(made[kind], array, atol=tolerance), (name, kind)
        assert made["sharded"] == made["sharded stream"] == made["dataset"]
    for name in ("numbers", "texts"):
        assert losses[f"{name} in the data"] == pytest.approx(losses[f"{name} in the model"], 1e-6)


def test_layers_have_learned_the_same_bits_on_every_worker_from_all_examples(workers):
    assert workers[0]["found"] == workers[1]["found"]
    assert workers[0]["losses"] == workers[1]["losses"]
    _check(workers[0])


def test_a_part_of_the_data_on_each_worker_is_refused_on_all(workers):
    for result in workers:
        for name in LAYERS:
            assert "expected the same result of adapt" in result["refused"][name].lower()
            assert "worker 0" in result["refused"][name]
    assert "empty iterable" in workers[0]["refused"]["nothing to read"]
    assert "empty iterable" in workers[1]["refused"]["nothing to read"]


def test_a_vocabulary_that_differs_between_workers_is_refused_by_fit(workers):
    for result in workers:
        said = result["refused"]["a vocabulary of its own"]
        assert "adapted layers to be the same on every worker" in said
        assert "a StringLookup with 3 tokens" in said


@pytest.mark.slow
def test_layers_learn_and_are_used_under_parameter_servers_as_elsewhere(workers, tmp_path):
    run = run_script(SCRIPT, workers=2, launcher_args=["--ps", "1"], timeout=200, tmp_path=tmp_path)
    assert run.code == 0, run.output
    result = run.result("chief 0")
    for name in LAYERS:
        assert result["found"][name] == workers[0]["found"][name]
