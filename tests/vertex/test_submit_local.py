"""From `submit` to the end of real processes: the job service here runs what it is sent."""

from __future__ import annotations

import os

import pytest

import tfdist.vertex as vertex
from tests.support.jobs import FakeJobService
from tests.support.submission import CONFIG
from tests.support.submission import Kept
from tests.support.submission import run
from tests.support.submission import spec
from tfdist.vertex.local import LocalJob

PACE = vertex.Pace(first=0.1, most=0.2, settle=0.5)
#: Says where it is, then does what its argument says.
PROGRAM = """
import json, os, sys
task = json.loads(os.environ["CLUSTER_SPEC"])["task"]
print("here is", task["type"], task["index"], flush=True)
exec(sys.argv[1])
"""
MACHINE = vertex.Pool(machine_type="n1-standard-4")


def job(action, workers=0, **changes):
    worker = vertex.Pool(machine_type="n1-standard-4", replicas=workers) if workers else None
    return spec(
        pools=vertex.Pools(chief=MACHINE, worker=worker),
        command=("python", "-c", PROGRAM),
        args=(action,),
        **changes,
    )


@pytest.fixture
def service(tmp_path):
    def start(body, parent):
        return LocalJob(body, directory=tmp_path / "job", parent=parent, say=lambda text: None)

    with FakeJobService(run=start) as running:
        yield running


def submit_and_wait(service, sent, kept, **options):
    environ = {
        "TFDIST_VERTEX_ENDPOINT": service.endpoint,
        "TFDIST_LOGGING_ENDPOINT": service.endpoint,
    }
    made = vertex.submit(sent, environ=environ, say=kept.say)
    return vertex.wait(made, pace=PACE, reporter=kept, environ=environ, **options)


def test_a_job_of_two_roles_runs_and_its_log_arrives_with_their_names(service):
    kept = Kept()
    result = submit_and_wait(service, job("pass", workers=2), kept)
    assert (result.exit_code, result.reason) == (0, "the job succeeded")
    assert "[chief 0] here is workerpool0 0" in kept.lines
    assert kept.states[-1] == "SUCCEEDED"


def test_a_program_that_fails_fails_the_job_with_its_exit_code_and_last_words(service):
    kept = Kept()
    once = vertex.Scheduling(disable_retries=True)
    sent = job("sys.exit('no such table')", scheduling=once)
    result = submit_and_wait(service, sent, kept)
    assert (result.state, result.exit_code) == ("FAILED", 1)
    assert "workerpool0-0 exited with a non-zero status of 1" in result.reason
    assert "[chief 0] no such table" in kept.lines


def test_a_replica_that_fails_once_is_started_again_and_the_job_succeeds(service, tmp_path):
    kept = Kept()
    mark = str(tmp_path / "mark")
    action = f"open({mark!r}, 'a').write('x'); sys.exit(len(open({mark!r}).read()) < 2)"
    result = submit_and_wait(service, job(action), kept)
    assert result.exit_code == 0
    assert kept.lines.count("[chief 0] here is workerpool0 0") == 2


def test_a_job_is_cancelled_and_its_processes_end(service):
    class Interrupts(Kept):
        def log(self, entry):
            super().log(entry)
            raise KeyboardInterrupt

    kept = Interrupts()
    sent = job("import time; time.sleep(100)")
    result = submit_and_wait(service, sent, kept, interrupted=lambda: "cancel")
    assert (result.state, result.exit_code) == ("CANCELLED", 1)
    running = service.job.running
    running.wait(20)
    assert running.pids == {}


def test_a_job_that_takes_too_long_expires(service):
    kept = Kept()
    sent = job("import time; time.sleep(100)", scheduling=vertex.Scheduling(timeout=1))
    result = submit_and_wait(service, sent, kept)
    assert (result.state, result.exit_code) == ("EXPIRED", 1)
    assert "longer than its timeout of 1 s" in result.reason


@pytest.mark.slow
def test_the_config_of_the_repository_trains_from_the_command_line(service, tmp_path):
    done = run(
        service,
        "submit",
        CONFIG,
        *("--set", "training.epochs=2"),
        "--wait",
        TFDIST_LOGGING_ENDPOINT=service.endpoint,
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    assert done.returncode == 0, done.stderr
    assert "[chief 0] Epoch 2/2" in done.stdout
    assert "[chief 0] test accuracy" in done.stdout
    written = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert {"model.keras", "metrics.json"} <= set(written)
