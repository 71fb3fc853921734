"""When a job that failed is started again, and when it is not any more."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.harness import run_script
from tests.support.harness import start_script
from tfdist.cluster import notice
from tfdist.cluster.notice import Notices
from tfdist.cluster.notice import Preempted
from tfdist.launch.restarts import STALLED_STARTS
from tfdist.launch.restarts import Restarts
from tfdist.launch.restarts import starts_in_vain

COMMITS = """
import os, sys, time
from tfdist.cluster import notice
start = int(os.environ["TFDIST_INCARNATION"])
def commit(step):
    notice.report_progress(os.environ, "/backup", step)
"""

# A training without TensorFlow, in which nobody waits for anybody.
TRAINS = """
import random, time
from report import report
from tfdist.cluster import current
from tfdist.cluster.detect import detect
from tfdist.cluster.notice import Preempted
from tfdist.state.preemption import Preemption, end
cluster = detect()
group = current.join_once(cluster)
preemption = Preemption(group, "fit")
preemption.open()
group.all_gather("begin", 0)
print("begins", flush=True)
step = 0
while True:
    time.sleep(random.uniform(0.001, 0.01 * (1 + cluster.task.index)))
    step += 1
    if preemption.stops_here():
        break
report(step=step)
group.all_gather("end", 0)
end(preemption.sources, Preempted(step, step, "/backup"))
"""


def _run(source, *options, tmp_path, **kwargs):
    options = ["--backoff", "0.05", "--grace", "5", *options]
    return run_script(source, workers=1, launcher_args=options, tmp_path=tmp_path, **kwargs)


def test_waits_double_without_progress_and_are_short_again_after_it():
    restarts = Restarts(1.0, 6.0)
    waits = []
    for step in (0, 0, 0, 0, 40, 40):
        restarts.note_end({"/backup": step})
        waits.append(restarts.seconds)
    assert waits == [1, 2, 4, 6, 1, 2]


def test_of_a_program_that_commits_nothing_ever_nothing_is_concluded_but_waits_grow():
    restarts = Restarts(0.5, 60.0)
    waits = []
    for _ in range(2 * STALLED_STARTS):
        restarts.note_end({})
        waits.append(restarts.seconds)
        assert not restarts.is_stalled
    assert waits[:3] == [0.5, 1, 2] and waits[-1] == 60


def test_the_same_newest_commit_so_many_times_is_no_progress():
    restarts = Restarts(1.0, 60.0)
    restarts.note_end({"/a": 7})
    for number in range(STALLED_STARTS - 1):
        assert not restarts.is_stalled, number
        # Nothing at all, the same, or an older one after damage.
        restarts.note_end([{}, {"/a": 7}, {"/a": 3}][number % 3])
    assert restarts.is_stalled and restarts.newest == "step 7 in /a"
    restarts.note_end({"/a": 7, "/b": 0})  # Another training of the same program has begun.
    assert not restarts.is_stalled


def test_starts_that_were_killed_are_counted_as_a_third_and_followed_sooner():
    restarts = Restarts(1.0, 60.0)
    restarts.note_end({"/a": 7}, was_killed=True)
    waits = []
    while not restarts.is_stalled:
        restarts.note_end({"/a": 7}, was_killed=True)
        waits.append(restarts.seconds)
    assert restarts.stalled == 3 * STALLED_STARTS
    assert waits[:6] == [1, 1, 2, 2, 2, 4]
    restarts.note_end({"/a": 8}, was_killed=True)
    assert not restarts.is_stalled and restarts.seconds == 1


def test_starts_in_vain_are_counted_from_the_record_of_a_run():
    vain = {"ended": "without a word", "resumed_step": 40}
    good = {"ended": "preempted", "resumed_step": 20, "saved_step": 40}
    assert starts_in_vain(None) == 0
    assert starts_in_vain({"incarnations": [good]}) == 0
    assert starts_in_vain({"incarnations": [vain, good, vain, vain]}) == 2
    assert starts_in_vain({"incarnations": [{"resumed_step": 20}, vain]}) == 1
    # Heartbeats without a commit are lost with the process.
    assert starts_in_vain({"incarnations": [vain, {**vain, "last_step": 55}]}) == 2
    assert starts_in_vain({"incarnations": [vain, {"ended": "finished", "resumed_step": 40}]}) == 0


def test_notices_of_commits_survive_a_writer_that_was_killed():
    with Notices() as notices:
        environ = {notice.PROGRESS: notices.progress}
        assert notices.committed() == {} and notices.preempted() is None
        notice.report_progress(environ, "/a", 3)
        notice.report_progress(environ, "/a", 6)
        notice.report_preemption(environ, Preempted(8, 6, "/a"))
        with open(notices.progress, "a", encoding="utf-8") as file:
            file.write('{"directory": "/a", "sav')
        assert notices.committed() == {"/a": 6}
        told = str(notices.preempted())
    assert told == "preempted at step 8, the newest commit in /a is that of step 6"
    notice.report_progress({}, "/a", 3)  # Without a launcher it goes nowhere.


def test_a_job_that_makes_no_progress_is_given_up_before_its_restarts_are_used(tmp_path):
    source = f"{COMMITS}\ncommit(min(10 * start, 20)); sys.exit(3)"
    run = _run(source, "--max-restarts", "30", tmp_path=tmp_path)
    assert run.code == 3
    # Starts 0 and 1 made progress, 2 and those after it ended at the same step.
    assert run.output.count("tfdist run: restart") == 2 + STALLED_STARTS - 1
    last = f"stopped: no progress in {STALLED_STARTS} starts; newest commit: step 20 in /backup"
    assert run.output.rstrip().endswith(last)


def test_a_job_that_makes_progress_uses_all_its_restarts_and_says_so(tmp_path):
    source = f"{COMMITS}\ncommit(start + 1); sys.exit(3)"
    run = _run(source, "--max-restarts", "7", tmp_path=tmp_path)
    assert run.code == 3 and run.output.count("tfdist run: restart") == 7
    last = "stopped: all 7 restarts are used; newest commit: step 8 in /backup"
    assert run.output.rstrip().endswith(last)
    assert "starting in" not in run.output


def test_a_mistake_is_not_tried_again_and_the_last_line_says_why(tmp_path):
    run = _run("raise SystemExit(2)", "--max-restarts", "3", tmp_path=tmp_path)
    assert run.code == 2
    last = "stopped: exit code 2 says that the same would happen again"
    assert run.output.rstrip().endswith(last)


@pytest.mark.parametrize("preempted", [0, 1, 2])
def test_tasks_stop_after_the_same_step_although_none_waits_for_another(preempted, tmp_path):
    with start_script(TRAINS, workers=3, tmp_path=tmp_path) as job:
        for index in range(3):
            job.wait_for_line(f"[worker {index}] begins")
        job.kill(f"worker {preempted}", signal.SIGTERM)
        run = job.wait(30)
    assert run.code == 143, run.output
    steps = {run.result(f"worker {index}")["step"] for index in range(3)}
    assert len(steps) == 1
    assert run.output.count(f"(SIGTERM to worker {preempted})") == 3
    assert len(re.findall(r"worker \d was preempted|ended with exit code 143", run.output)) == 3


def test_all_tasks_preempted_at_once_stop_after_the_same_step(tmp_path):
    with start_script(TRAINS, workers=3, tmp_path=tmp_path) as job:
        for index in range(3):
            job.wait_for_line(f"[worker {index}] begins")
        job.signal(signal.SIGTERM)
        run = job.wait(30)
    assert run.code == 143 and "killing" not in run.output, run.output
    assert len({run.result(f"worker {index}")["step"] for index in range(3)}) == 1


HOLDS = """
import signal, time
from tfdist.state.preemption import Preemption
def mine(*unused): print("mine", flush=True)
signal.signal(signal.SIGTERM, mine)
preemption = Preemption(None, "fit")
preemption.open()
{during}
preemption.close()
signal.raise_signal(signal.SIGTERM)
"""


def test_a_single_process_notes_the_signal_and_gives_the_handler_back(tmp_path):
    during = """
assert not preemption.stops_here()
signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)  # As timeout(1) sends it: one request.
assert preemption.stops_here()
"""
    run = _run(HOLDS.format(during=during), tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.lines() == ["mine"]


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    during = """
signal.raise_signal(signal.SIGTERM)
time.sleep(0.5)
signal.raise_signal(signal.SIGTERM)
print("goes on")
"""
    run = _run(HOLDS.format(during=during), tmp_path=tmp_path)
    assert run.code == 143 and "goes on" not in run.output
    assert "killed by SIGTERM" in run.output


STUCK = """
import ctypes
from tfdist.cluster.notice import Preempted
from tfdist.state import preemption
preemption._EXIT_SECONDS = 1
class Native:
    def __del__(self, sleep=ctypes.CDLL(None).sleep):
        print("taken down", flush=True)
        sleep(30)
native = Native()
preemption.end(["this process"], Preempted(7, 7, "/backup"))
"""


def test_a_preempted_process_that_native_code_holds_up_at_its_end_ends_all_the_same():
    began = time.monotonic()
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
    assert done.returncode == -signal.SIGTERM  # 143, as a shell counts.
    assert done.stdout == "taken down\n", done.stderr
    assert 1 <= time.monotonic() - began < 15
