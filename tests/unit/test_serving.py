"""SIGTERM to servers: they stay as long as their chief needs them, and no longer."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.harness import run_script
from tests.support.harness import start_script

# A cluster with parameter servers, without TensorFlow. The chief saves for a while.
CLUSTER = """
import sys, time
from tfdist.cluster import current, serving
from tfdist.cluster.detect import detect
from tfdist.cluster.notice import Preempted
from tfdist.cluster.serving import Server
from tfdist.state.preemption import Preemption, end
cluster = detect()
group = current.join_once(cluster)
serving.ANSWER_SECONDS = 1.5
group.all_gather("begin", 0)
if cluster.task.type != "chief":
    print("serves", flush=True)
    code = Server(group).run()
    group.leave()
    sys.exit(code)
{chief}
"""

SAVES = """
preemption = Preemption(None, "fit")
preemption.open()
print("trains", flush=True)
while not preemption.stops_here():
    time.sleep(0.05)
print("saves", flush=True)
time.sleep(3)
away = [task for task in cluster.tasks if group.state_of(task) != "alive"]
print("saved, without", *away, flush=True)
end(preemption.sources, Preempted(7, 7, "/backup"))
"""


def _start(chief, tmp_path, *options, ps=2):
    options = ["--ps", str(ps), "--backoff", "0.05", "--grace", "10", *options]
    source = CLUSTER.format(chief=chief)
    return start_script(source, workers=2, launcher_args=options, tmp_path=tmp_path)


def _wait(job, word="trains"):
    for task in ("ps 0", "ps 1", "worker 0", "worker 1"):
        job.wait_for_line(f"[{task}] serves")
    job.wait_for_line(f"[chief 0] {word}")
    time.sleep(0.3)


def test_a_server_that_is_preempted_has_the_chief_save_and_stays_until_then(tmp_path):
    with _start(SAVES, tmp_path) as job:
        _wait(job)
        job.kill("ps 1", signal.SIGTERM)
        run = job.wait(30)
    assert run.code == 143, run.output
    assert run.lines("chief 0")[1:3] == ["saves", "saved, without"]
    assert "preempted at step 7, which is saved in /backup (SIGTERM to ps 1)" in run.output
    # Neither a worker is started again, nor is a server taken for the one that failed.
    assert "starting it again" not in run.output and "killed by" not in run.output
    assert "chief 0 was preempted (exit code 143)" in run.output
    assert "stopped: preempted at step 7" in run.output


def test_where_all_machines_are_taken_away_the_servers_stay_until_the_chief_has_saved(tmp_path):
    with _start(SAVES, tmp_path) as job:
        _wait(job)
        for task in ("worker 1", "ps 0", "worker 0", "ps 1", "chief 0"):
            job.kill(task, signal.SIGTERM)
        run = job.wait(30)
    assert run.code == 143, run.output
    assert run.lines("chief 0")[1:3] == ["saves", "saved, without"]
    assert "starting it again" not in run.output and "killed by" not in run.output


def test_the_codes_of_servers_say_start_again_if_the_chief_was_preempted(tmp_path):
    chief = SAVES.replace("time.sleep(3)", "")
    again = 'if int(__import__("os").environ["TFDIST_INCARNATION"]): sys.exit(0)\n'
    with _start(again + chief, tmp_path, "--max-restarts", "1") as job:
        _wait(job)
        job.kill("chief 0", signal.SIGTERM)
        run = job.wait(30)
    assert run.code == 0, run.output
    assert "restart 1 of 1: preempted at step 7" in run.output
    assert "starting it again" not in run.output


def test_a_server_whose_chief_saves_nothing_ends_with_the_signal(tmp_path):
    with _start('print("trains", flush=True); time.sleep(60)', tmp_path, "--grace", "1") as job:
        _wait(job)
        began = time.monotonic()
        job.kill("ps 0", signal.SIGTERM)
        job.wait_for_line("ps 0 failed with exit code 143 (killed by SIGTERM)", 10)
        assert 1.0 < time.monotonic() - began < 4.0
        run = job.wait(30)
    assert run.code == 143


@pytest.mark.parametrize("task", ["ps 0", "worker 0"])
def test_a_second_signal_ends_a_server_at_once(task, tmp_path):
    with _start('print("trains", flush=True); time.sleep(60)', tmp_path) as job:
        _wait(job)
        job.kill(task, signal.SIGTERM)
        time.sleep(0.6)
        began = time.monotonic()
        job.kill(task, signal.SIGTERM)
        job.wait_for_line("(killed by SIGTERM)", 10)
        assert time.monotonic() - began < 0.8


def test_a_server_ends_with_0_when_the_chief_is_done_and_with_1_when_it_has_failed(tmp_path):
    done = run_script(
        CLUSTER.format(chief=""), workers=1, launcher_args=["--ps", "1"], tmp_path=tmp_path
    )
    assert done.code == 0 and "ended with" not in done.output
    failed = run_script(
        CLUSTER.format(chief="raise SystemExit(5)"),
        workers=1,
        launcher_args=["--ps", "1"],
        tmp_path=tmp_path,
    )
    assert failed.code == 5
    assert "ps 0 ended with exit code 1" in failed.output


POOL = """
import multiprocessing, os, signal, sys, time
from tfdist.state.preemption import Preemption
preemption = Preemption(None, "fit")
preemption.open()
pool = multiprocessing.get_context("fork").Pool(2)
pool.map(abs, [1, 2])
began = time.monotonic()
pool.terminate()
pool.join()
assert time.monotonic() - began < 5 and not preemption.is_signalled
print("joined", flush=True)
"""


def test_processes_that_a_training_forks_end_with_the_signal(tmp_path):
    run = run_script(POOL, workers=1, tmp_path=tmp_path, timeout=20)
    assert run.code == 0 and run.lines() == ["joined"], run.output
