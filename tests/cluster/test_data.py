"""Every example once in a pass, in the same batches, for any number of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import run_script

SCRIPTS = Path(__file__).parent / "scripts" / "data"
ROWS = 1003
LENGTHS = {"arrays": ROWS, "arrays without a seed": ROWS, "few": 66}
#: Read in an order that follows from numbers: the same batches for any number of workers.
SAME_BATCHES = ("arrays", "few", "sequence", "seven files", "one file", "generator")

pytestmark = pytest.mark.timeout(300)

#: One worker: two replicas in one process, whose parts tests/unit/test_data_order.py has, too.
WORKERS = (2, 3, pytest.param(1, marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of 101 numbers: seven uneven ones, two of them empty; four even ones; one."""
    import tensorflow as tf

    folder = tmp_path_factory.mktemp("records")
    counts = {"seven": [10, 20, 3, 0, 40, 28, 0], "compressed": [25, 25, 25, 26], "one": [101]}
    for name, each in counts.items():
        (folder / name).mkdir()
        number = 0
        for index, count in enumerate(each):
            options = "GZIP" if name == "compressed" else None
            with tf.io.TFRecordWriter(str(folder / name / f"{index}.tfrecord"), options) as file:
                for _ in range(count):
                    file.write(str(number).encode())
                    number += 1
    return folder


@pytest.fixture(scope="module")
def reports(folder, tmp_path_factory):
    """What each worker reports, for a number of workers; the first one saves a position."""
    made = {}

    def of(workers):
        """Returns the reports; of two replicas in one process for one worker."""
        if workers not in made:
            there = tmp_path_factory.mktemp(f"workers-{workers}")
            where = ["mirrored", "2"] if workers == 1 else []
            run = run_script(
                SCRIPTS / "shards.py",
                workers=workers,
                args=[str(folder), str(folder / "position.json"), *where],
                timeout=200,
                tmp_path=there,
            )
            assert run.code == 0, run.output
            made[workers] = [run.result(f"worker {index}") for index in range(workers)]
        return made[workers]

    of(2)
    return of


def global_batches(reports, name, epoch):
    """Returns the global batches of a pass: the parts of all workers, one after the other."""
    each = [report["read"][name][epoch] for report in reports]
    assert len({len(batches) for batches in each}) == 1, "as many steps on every worker"
    return [sum(parts, []) for parts in zip(*each, strict=True)]


@pytest.mark.parametrize("workers", WORKERS)
def test_every_example_is_read_once_in_every_pass_from_every_kind_of_source(reports, workers):
    names = reports(workers)[0]["read"]
    assert len(names) == 12
    for name in names:
        for epoch in range(len(names[name])):
            seen = sorted(sum(global_batches(reports(workers), name, epoch), []))
            assert seen == list(range(LENGTHS.get(name, 101))), name


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_batches_are_the_same_for_any_number_of_workers(reports, workers):
    for name in SAME_BATCHES:
        for epoch in range(len(reports(2)[0]["read"][name])):
            two, others = (global_batches(reports(n), name, epoch) for n in (2, workers))
            assert two == others, name


def test_an_order_without_a_seed_is_new_in_every_pass_and_shared(reports):
    first, second = (global_batches(reports(2), "arrays without a seed", e) for e in range(2))
    assert first != second
    assert first != global_batches(reports(3), "arrays without a seed", 0)


@pytest.mark.parametrize("workers", [2, 3])
def test_data_that_differs_between_workers_is_refused_on_all_of_them(reports, workers):
    for report in reports(workers):
        generator, arrays = report["disagreements"]
        assert "other examples in batch 1 of pass 1" in generator
        assert "other data on some" in arrays


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_another_number_of_workers_goes_on_where_two_were(reports, workers):
    two, others = (
        [sum(parts, []) for parts in zip(*(r["continued"] for r in reports(n)), strict=True)]
        for n in (2, workers)
    )
    assert len(two) == 16 - 5
    assert two == others


@pytest.mark.parametrize("workers", WORKERS)
def test_a_pipeline_goes_on_from_the_state_of_its_iterator(reports, workers):
    for report in reports(workers):
        rest, again, is_saved = report["pipelines"]
        assert is_saved
        assert rest == again
        assert len(rest) == 17 - 4


@pytest.mark.parametrize("workers", WORKERS)
def test_training_on_shards_gives_the_numbers_of_one_device(reports, workers):
    alone = reports(workers)[0]["alone"]
    for report in reports(workers):
        here = report["fit"]
        assert here["history"].keys() == alone["history"].keys()
        for name, values in alone["history"].items():
            np.testing.assert_allclose(here["history"][name], values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(here["evaluated"], alone["evaluated"], rtol=1e-5)
        np.testing.assert_allclose(here["predicted"], alone["predicted"], rtol=1e-4, atol=1e-6)
        for ours, theirs in zip(here["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_on_parameter_servers_every_example_is_read_once_an_epoch(folder, tmp_path):
    run = run_script(
        SCRIPTS / "servers.py",
        workers=2,
        launcher_args=["--ps", "1"],
        args=[str(folder)],
        timeout=200,
        tmp_path=tmp_path,
    )
    assert run.code == 0, run.output
    report = run.result("chief 0")
    assert list(report["counts"]) == ["files", "function"]
    for name, epochs in report["counts"].items():
        assert epochs == [[1.0] * 101] * 3, name
    np.testing.assert_allclose(report["predicted"], report["expected"], rtol=1e-6)
