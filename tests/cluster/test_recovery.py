"""A run that is killed and started again ends with the weights of one that was not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.cloud_storage import CloudStorage
from tests.support.harness import eventually
from tests.support.harness import run_script
from tests.support.harness import start_script

SCRIPT = Path(__file__).parent / "scripts" / "recovery" / "train.py"
EPOCHS, STEPS = 4, 9

pytestmark = pytest.mark.timeout(1000)


def _run(tmp_path, *args, workers=1, restarts=0, directory="run", timeout=250):
    options = ["--max-restarts", str(restarts), "--grace", "3"]
    return run_script(
        SCRIPT,
        workers=workers,
        launcher_args=options,
        args=[str(tmp_path / directory), *args],
        tmp_path=tmp_path,
        timeout=timeout,
    )


def _kills(*whens):
    return [text for when in whens for text in ("--kill", when)]


def _assert_exact(run, workers, incarnation):
    assert run.code == 0, run.output
    for worker in range(workers):
        result = run.result(f"worker {worker}")
        expected = result["undisturbed"]
        assert result["incarnation"] == str(incarnation)
        assert result["weights"] == expected["weights"]
        assert result["history"] == expected["history"]
        assert result["iterations"] == expected["iterations"]
        assert result["seen"] == [[1.0, 1.0]] * len(expected["epochs"])
        # Callbacks remember what they did before, and are not told again.
        trained = STEPS * len(expected["epochs"])
        assert result["batches"] == result["count"] == trained
        losses = expected["history"]["loss"]
        assert result["told"] == [[epoch, loss] for epoch, loss in enumerate(losses)]
        if worker == 0:
            assert [int(row.split(",")[0]) for row in result["table"][1:]] == expected["epochs"]
            assert [name for name in result["files"] if name.startswith((".", "step"))] == []
            assert "finished.json" in result["files"]


def test_two_workers_that_are_killed_end_as_if_they_had_not_been(tmp_path):
    # One in an epoch, then the chief in the middle of a commit.
    kills = _kills("0:1:14", "1:0:commit")
    run = _run(tmp_path, *kills, "--reference", workers=2, restarts=2)
    _assert_exact(run, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["dataset", "arrays", "sharded"])
@pytest.mark.parametrize(("strategy", "workers"), [("default", 1), ("mirrored", 1), ("", 3)])
def test_every_strategy_goes_on_exactly(strategy, workers, data, tmp_path):
    kills = _kills("0:0:5", "1:0:commit", "2:all:27", "3:all:31")
    args = ["--data", data, *kills]
    run = _run(tmp_path, "--strategy", strategy, *args, workers=workers, restarts=4)
    assert run.code == 0, run.output
    (tmp_path / "undisturbed").mkdir()
    args = ["--strategy", strategy, "--data", data]
    expected = _run(tmp_path / "undisturbed", *args, workers=workers)
    assert expected.code == 0, expected.output
    for worker in range(workers):
        found, wanted = (each.result(f"worker {worker}") for each in (run, expected))
        for key in ("weights", "history", "iterations", "seen", "batches", "told", "count"):
            assert found[key] == wanted[key], key


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers", "times"), [("mirrored", 1, 20), ("", 2, 10)])
def test_any_moment_is_one_to_be_killed_at(strategy, workers, times, tmp_path):
    args = ["--strategy", strategy, "--random", str(times), "--every", "1", "--reference"]
    run = _run(tmp_path, *args, workers=workers, restarts=times, timeout=900)
    assert run.code == 0, run.output
    for worker in range(workers):
        result = run.result(f"worker {worker}")
        for key in ("weights", "history", "iterations", "seen", "epochs"):
            assert result[key] == result["undisturbed"][key], key
    assert int(result["incarnation"]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--accumulate", "4", "--every", "2"],
        ["--execution", "4", "--every", "3"],
        ["--every", "epoch"],
        ["--every", "0.02s"],
    ],
)
def test_accumulation_executions_epochs_and_seconds_go_on_exactly(args, tmp_path):
    kills = _kills("0:1:14", "1:all:23")
    run = _run(tmp_path, *args, *kills, "--reference", workers=2, restarts=2)
    assert run.code == 0, run.output
    result = run.result("worker 1")
    for key in ("weights", "history", "iterations", "seen", "epochs"):
        assert result[key] == result["undisturbed"][key], key


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_another_number_of_workers_goes_on_at_the_same_example(before, after, tmp_path):
    args = ["--data", "sharded", "--dropout", "0", "--every", "4"]
    killed = _run(tmp_path, *args, *_kills("0:all:15"), workers=before)
    assert killed.code == 137, killed.output
    run = _run(tmp_path, *args, "--reference", workers=after)
    assert run.code == 0, run.output
    for worker in range(after):
        result = run.result(f"worker {worker}")
        expected = result["undisturbed"]
        # Each example once in every epoch, the one that was interrupted, too.
        assert result["seen"] == [[1.0, 1.0]] * len(expected["epochs"])
        assert result["here"] < STEPS * len(expected["epochs"])
        assert result["iterations"] == expected["iterations"]
        np.testing.assert_allclose(result["values"], expected["values"], rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(
            result["history"]["loss"], expected["history"]["loss"], rtol=1e-3
        )


@pytest.mark.slow
def test_another_number_of_workers_ends_a_pass_over_files_that_others_have_begun(tmp_path):
    import tensorflow as tf

    for number, rows in enumerate(np.array_split(np.arange(70), 4)):
        path = str(tmp_path / f"{number}.tfrecord")
        with tf.io.TFRecordWriter(path, "GZIP") as file:  # Compressed: read in order.
            for row in rows:
                file.write(str(row).encode())
    args = ["--data", "files", "--every", "4"]
    killed = _run(tmp_path, *args, *_kills("0:all:15"), workers=2)
    assert killed.code == 137, killed.output
    run = _run(tmp_path, *args, workers=3)
    assert run.code == 0, run.output
    assert "was begun by another number of workers" in run.output
    for worker in range(3):
        result = run.result(f"worker {worker}")
        assert result["seen"] == [[1.0, 1.0]] * len(result["epochs"])
        # The newest commit is that of step 12, or the one before if that was being written.
        assert result["here"] in (result["iterations"] - 12, result["iterations"] - 8)


@pytest.mark.slow
def test_servers_go_on_from_the_last_commit_with_no_example_twice(tmp_path):
    run = run_script(
        SCRIPT.with_name("servers.py"),
        workers=2,
        launcher_args=["--ps", "2", "--max-restarts", "1", "--grace", "5"],
        args=[str(tmp_path / "run"), "95"],
        tmp_path=tmp_path,
    )
    assert run.code == 0, run.output
    result = run.result("chief 0")
    steps = 64  # Of an epoch; the first commit that is sure to be there is one of its 90.
    assert result["incarnation"] == 1
    assert result["seen"] == [[1.0, 1.0]] * 3
    assert result["iterations"] == 3 * steps
    assert 3 * steps - 95 <= result["here"] < 3 * steps
    assert result["loss"][2] < result["loss"][1] < result["loss"][0]


@pytest.mark.slow
def test_a_run_that_has_ended_is_not_trained_again(tmp_path):
    first = _run(tmp_path, workers=2)
    again = _run(tmp_path, workers=2)
    assert first.code == again.code == 0, again.output
    for worker in ("worker 0", "worker 1"):
        assert again.result(worker)["weights"] == first.result(worker)["weights"]
        assert again.result(worker)["history"] == first.result(worker)["history"]
        assert again.result(worker)["here"] == 0
    assert "nothing is trained" in again.output


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [("default", 1), ("", 2)])
def test_commits_on_cloud_storage_bring_a_run_back(strategy, workers, tmp_path):
    args = ["--url", "gs://bucket/run", "--strategy", strategy, "--every", "2", "--reference"]
    with CloudStorage() as storage:

        def uploads(commit):
            return [path for _, path in storage.requests if commit in path and "main.bin" in path]

        with start_script(
            SCRIPT,
            workers=workers,
            launcher_args=["--max-restarts", "2", "--grace", "3"],
            args=[str(tmp_path / "run"), *args, *_kills("0:0:14")],
            tmp_path=tmp_path,
            env=storage.environ,
        ) as job:
            # The first has killed itself after 14 steps; the next is killed while it commits.
            assert eventually(lambda: uploads("-i2-c1"), 120.0), job.output
            job.kill("worker 0")
            run = job.wait(250)
        assert uploads("-i1-c")
    _assert_exact(run, workers, 2)
