"""SIGTERM while a model trains: all tasks save after the same step, and end with 143."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.harness import eventually
from tests.support.harness import run_script
from tests.support.harness import start_script

SCRIPT = Path(__file__).parent / "scripts" / "recovery" / "train.py"
SAME = ("weights", "history", "iterations", "seen", "epochs")
STEPS, EPOCHS = 9, 4

pytestmark = pytest.mark.timeout(600)


def _run(tmp_path, *args, workers, restarts=0, timeout=250):
    return run_script(
        SCRIPT,
        workers=workers,
        launcher_args=["--max-restarts", str(restarts), "--grace", "60", "--backoff", "0.1"],
        args=[str(tmp_path / "run"), "--signal", "15", *args],
        tmp_path=tmp_path,
        timeout=timeout,
    )


def _assert_exact(run, workers):
    assert run.code == 0, run.output
    for worker in range(workers):
        result = run.result(f"worker {worker}")
        for key in SAME:
            assert result[key] == result["undisturbed"][key], key


def _record(tmp_path):
    return json.loads((tmp_path / "run" / "run.json").read_text())


def test_two_workers_of_which_any_is_preempted_end_as_if_they_had_not_been(tmp_path):
    # Nothing else is committed in the middle of an epoch.
    kills = ["--kill", "0:1:14", "--kill", "1:0:20"]
    run = _run(tmp_path, *kills, "--every", "epoch", "--reference", workers=2, restarts=2)
    _assert_exact(run, 2)
    # The chief, as soon as it is told, names the next step.
    told = re.findall(r"restart (\d) of 2: preempted at step (\d+), which is saved in", run.output)
    assert [number for number, _ in told] == ["1", "2"]
    first, second = (int(step) for _, step in told)
    assert 15 <= first <= 18 and 21 <= second <= 24
    assert run.output.count("(SIGTERM to worker 1). Ending with exit code 143") == 2
    assert run.output.count("(SIGTERM to worker 0). Ending with exit code 143") == 2
    assert "failed" not in run.output and "Traceback" not in run.output
    assert run.result("worker 1")["here"] == EPOCHS * STEPS - second
    record = _record(tmp_path)
    told = [(each["ended"], each.get("resumed_step")) for each in record["incarnations"]]
    assert told == [("preempted", 0), ("preempted", first), ("finished", second)]
    assert record["restarts"]["count"] == 2 and record["restarts"]["steps_lost"] == 0


def test_a_single_process_is_preempted_through_its_launcher_and_goes_on(tmp_path):
    args = ["--strategy", "default", "--every", "epoch", "--launcher"]
    first = _run(tmp_path, *args, "--kill", "0:0:14", workers=1, restarts=3)
    assert first.code == 143, first.output
    # Whoever asks the launcher to stop does not want another start.
    assert "restart" not in first.output
    assert "stopped: preempted at step 1" in first.output
    run = _run(tmp_path, *args, "--reference", workers=1)
    _assert_exact(run, 1)
    assert run.result()["here"] <= EPOCHS * STEPS - 14


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--accumulate", "4"],
        ["--execution", "4"],
        ["--data", "arrays", "--every", "4"],
        ["--data", "sharded", "--every", "0.05s"],
    ],
)
@pytest.mark.parametrize("step", [8, 9, 17, 36])
def test_any_step_is_one_to_be_preempted_at(args, step, tmp_path):
    # The last but one and the last of an epoch, and the last of all, among them.
    if "--every" not in args:
        args = [*args, "--every", "epoch"]
    # An epoch of 9 steps has executions of 4, 4 and 1.
    when = {8: 2, 9: 3, 17: 5, 36: 12}[step] if "--execution" in args else step
    run = _run(tmp_path, *args, "--kill", f"0:all:{when}", "--reference", workers=2, restarts=1)
    _assert_exact(run, 2)
    assert "restart 1 of 1: preempted at step" in run.output


@pytest.mark.parametrize(
    ("workers", "args"),
    [
        (1, ["--strategy", "default"]),
        pytest.param(1, ["--strategy", "mirrored"], marks=pytest.mark.slow),
        pytest.param(2, ["--accumulate", "4"], marks=pytest.mark.slow),
        pytest.param(2, ["--execution", "4"], marks=pytest.mark.slow),
        pytest.param(2, ["--data", "sharded"], marks=pytest.mark.slow),
    ],
)
def test_who_is_preempted_in_a_validation_does_not_wait_for_its_end(workers, args, tmp_path):
    # At the second of four batches of the second validation.
    args = [*args, "--validation", "5", "--every", "epoch", "--reference"]
    # All four are one execution where it has four steps.
    when = "v2" if "--execution" in args else "v6"
    args += ["--kill", f"0:{workers - 1}:{when}"]
    run = _run(tmp_path, *args, workers=workers, restarts=1)
    _assert_exact(run, workers)
    told = re.search(r"restart 1 of 1: preempted at step (\d+), which is saved in", run.output)
    step = int(told[1])
    # After its only execution, two workers may agree on the first one of the next epoch.
    assert step == 2 * STEPS or ("--execution" in args and step == 2 * STEPS + 4)
    result = run.result()
    assert result["here"] == EPOCHS * STEPS - step
    if workers == 1:  # Several agree on a later one, which may be beyond it.
        assert result["validations"] == 6 + (EPOCHS - 1) * 4


@pytest.mark.slow
def test_two_workers_are_preempted_through_their_launcher(tmp_path):
    first = _run(tmp_path, "--every", "epoch", "--launcher", "--kill", "0:1:14", workers=2)
    assert first.code == 143, first.output
    assert "killing" not in first.output
    assert "stopped: preempted at step 1" in first.output
    run = _run(tmp_path, "--every", "epoch", "--reference", workers=2)
    _assert_exact(run, 2)


@pytest.mark.slow
def test_steps_lost_to_a_kill_are_told(tmp_path):
    args = ["--signal", "9", "--every", "10", "--kill", "0:0:14", "--wait-for", "10"]
    run = _run(tmp_path, *args, workers=2, restarts=1)
    assert run.code == 0, run.output
    record = _record(tmp_path)
    first, second = record["incarnations"]
    # It was killed before the boundary after its 14th step.
    assert first["ended"] == "without a word" and first["last_step"] == 13
    assert second["resumed_step"] == 10 and record["restarts"]["steps_lost"] == 3
    assert record["restarts"]["seconds_lost"] > 1


def _servers(tmp_path, *args, restarts):
    return run_script(
        SCRIPT.with_name("servers.py"),
        workers=2,
        launcher_args=["--ps", "1", "--max-restarts", str(restarts), "--grace", "60"],
        args=[str(tmp_path / "run"), "95", "15", *args],
        tmp_path=tmp_path,
        timeout=250,
    )


@pytest.mark.slow
def test_a_preempted_coordinator_saves_where_it_is_and_goes_on_there(tmp_path):
    run = _servers(tmp_path, restarts=1)
    assert run.code == 0, run.output
    step = int(re.search(r"restart 1 of 1: preempted at step (\d+), which is saved", run.output)[1])
    result = run.result("chief 0")
    assert result["seen"] == [[1.0, 1.0]] * 3
    assert result["iterations"] == 3 * 64 == result["here"] + step


@pytest.mark.slow
def test_servers_are_there_until_the_coordinator_has_saved(tmp_path):
    first = _servers(tmp_path, "--launcher", restarts=0)
    assert first.code == 143, first.output
    assert "killing" not in first.output
    step = int(re.search(r"stopped: preempted at step (\d+), which is saved", first.output)[1])
    assert step < 3 * 64
    (tmp_path / "again").mkdir()
    run = run_script(
        SCRIPT.with_name("servers.py"),
        workers=1,
        launcher_args=["--ps", "2"],
        args=[str(tmp_path / "run"), "1000"],
        tmp_path=tmp_path / "again",
    )
    assert run.code == 0, run.output
    assert run.result("chief 0")["here"] == 3 * 64 - step
    assert run.result("chief 0")["seen"] == [[1.0, 1.0]] * 3


@pytest.mark.slow
def test_a_worker_of_servers_that_is_preempted_ends_and_is_replaced(tmp_path):
    source = """
    import time
    import tfdist
    strategy = tfdist.strategy()
    print("coordinates", flush=True)
    time.sleep(15)
    """
    options = ["--ps", "1", "--max-restarts", "1"]
    with start_script(source, workers=2, launcher_args=options, tmp_path=tmp_path) as job:
        job.wait_for_line("coordinates", 120)
        job.kill("worker 1", signal.SIGTERM)
        job.wait_for_line("worker 1 ended with exit code 143", 10)
        run = job.wait(90)
    assert run.code == 0, run.output
    assert "starting it again, 1 of 1" in run.output


@pytest.mark.slow
def test_before_fit_a_worker_ends_with_the_signal_although_tensorflow_catches_it(tmp_path):
    source = """
    import time
    import tfdist
    strategy = tfdist.strategy()
    print("built", flush=True)
    time.sleep(60)
    """
    with start_script(source, tmp_path=tmp_path, launcher_args=["--grace", "1"]) as job:
        for task in ("worker 0", "worker 1"):
            job.wait_for_line(f"[{task}] built", 120)
        job.kill("worker 1", signal.SIGTERM)
        job.wait_for_line("worker 1 failed with exit code 143 (killed by SIGTERM)", 10)
        assert job.wait(60).code == 143


@pytest.mark.slow
def test_a_preempted_server_has_the_coordinator_save_where_it_is(tmp_path):
    options = ["--ps", "2", "--max-restarts", "1", "--grace", "60"]
    args = [str(tmp_path / "run"), "1000"]
    script = SCRIPT.with_name("servers.py")
    with start_script(
        script, workers=1, launcher_args=options, args=args, tmp_path=tmp_path
    ) as job:
        assert eventually(lambda: any((tmp_path / "run").glob("step-*")), 120)
        job.kill("ps 1", signal.SIGTERM)
        run = job.wait(200)
    assert run.code == 0, run.output
    told = re.search(r"restart 1 of 1: preempted at step (\d+), which is saved", run.output)
    result = run.result("chief 0")
    assert result["seen"] == [[1.0, 1.0]] * 3
    assert result["here"] == 3 * 64 - int(told[1])
    assert "(SIGTERM to ps 1)" in run.output and "killed by" not in run.output
