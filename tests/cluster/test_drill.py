"""`tfdist drill` on real clusters: exact recovery is called so, and any other is found out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.harness import CLI
from tests.support.harness import ROOT
from tests.support.harness import eventually
from tfdist.measure.runs import is_alive

SCRIPT = Path(__file__).parent / "scripts" / "drill" / "train.py"

pytestmark = pytest.mark.timeout(600)


def _drill(tmp_path, *args, faults="kill-worker", workers=2, options=()):
    command = [*CLI, "drill", "--workers", str(workers), "--grace", "3", "--timeout", "150"]
    command += ["--faults", faults, *options, str(SCRIPT), *args]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=550, check=False
    )
    path = tmp_path / "drill-report" / "report.json"
    told = json.loads(path.read_text()) if path.exists() else None
    return done, told


def _failed(told):
    return {c["name"] for c in told["checks"] if c["counts"] and not c["ok"]}


@pytest.mark.slow
def test_a_job_that_loses_a_worker_is_found_to_recover_exactly(tmp_path):
    done, told = _drill(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["exact"] and _failed(told) == set()
    assert [each["step"] for each in told["faults"]] == [18]
    (back,) = told["resumptions"]
    assert back["step"] % 4 == 0 and 0 < back["step"] <= 18
    assert told["rows"] == [
        {"where": f"fit 1, epoch {n}", "peace": 70, "faults": 70} for n in range(1, 5)
    ]
    assert sorted(s["incarnation"] for s in told["starts"]) == [0, 0, 1, 1]
    assert (tmp_path / "drill-report" / "report.html").exists()
    assert not (tmp_path / "backup").exists()  # Both runs' commits go elsewhere.


@pytest.mark.slow
def test_a_script_without_a_backup_is_refused_with_the_fix(tmp_path):
    done, told = _drill(tmp_path, "--no-backup", "--strategy", "default", workers=1)
    assert done.returncode == 2 and told is None
    assert "callbacks=[tfdist.callbacks.BackupAndRestore('backup'" in done.stderr


@pytest.mark.slow
def test_data_that_starts_anew_is_found_out(tmp_path):
    done, told = _drill(tmp_path, "--anew", "--strategy", "default", workers=1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {"weights", "contents of batches"} <= _failed(told)
    assert "the recovery is what made the difference" in told["reasons"][0]


@pytest.mark.slow
def test_a_script_without_a_seed_is_told_so(tmp_path):
    done, told = _drill(tmp_path, "--unseeded", "--strategy", "default", workers=1)
    assert done.returncode == 1
    assert "not seeded" in told["reasons"][0]


@pytest.mark.slow
def test_every_fault_is_recovered_from_exactly(tmp_path):
    faults = "kill-worker,kill-chief,damage,kill-all,sigstop"
    # Six starts, which take long where others use the machine.
    done, told = _drill(tmp_path, faults=faults, options=["--json", "--timeout", "400"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == told
    assert [each["kind"] for each in told["faults"]] == faults.split(",")
    assert len(told["resumptions"]) >= 4
    damaged = next(each for each in told["faults"] if each["kind"] == "damage")
    assert "turned over" in damaged["detail"]


@pytest.mark.slow
def test_a_full_disk_and_sigterm_are_recovered_from_exactly(tmp_path):
    done, told = _drill(tmp_path, "--fits", "2", faults="full-disk,sigterm")
    assert done.returncode in (0, 2), done.stdout + done.stderr
    assert told["exact"] and len(told["rows"]) == 8
    if not told["skipped"]:
        log = (tmp_path / "drill-report" / "faults" / "output.log").read_text()
        assert "could not be written" in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_drill_that_is_killed_leaves_no_process(number, tmp_path):
    command = [*CLI, "drill", "--workers", "2", str(SCRIPT)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "drill-report" / "peace" / "output.log"

    def pids():
        text = log.read_text() if log.exists() else ""
        words = [line.split() for line in text.splitlines() if "is process" in line]
        return [int(line[line.index("process") + 1]) for line in words]

    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as drill:
        try:
            assert eventually(lambda: len(pids()) == 2, 60)
            time.sleep(1.0)
            assert all(is_alive(pid) for pid in pids())
        finally:
            drill.send_signal(number)
    assert drill.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert eventually(lambda: not any(is_alive(pid) for pid in pids()), 10)


@pytest.mark.slow
def test_a_job_that_outlives_its_deadline_is_ended_and_said_so(tmp_path):
    done, told = _drill(tmp_path, options=["--timeout", "2"])
    assert done.returncode == 1 and told is None
    assert "raise --timeout" in done.stderr
