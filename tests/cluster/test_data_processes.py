"""Jobs whose batches other processes make: the same numbers, whatever happens to those."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.harness import CLI
from tests.support.harness import ROOT
from tests.support.harness import eventually
from tests.support.harness import is_alive
from tests.support.harness import run_script
from tests.support.harness import start_script

SCRIPT = Path(__file__).parent / "scripts" / "data" / "service.py"
ROWS = 1003

pytestmark = pytest.mark.timeout(280)


def assert_same(run, workers=1):
    """Asserts that training and reading gave the same with and without the processes."""
    assert run.code == 0, run.output
    results = [run.result(f"worker {worker}") for worker in range(workers)]
    for result in results:
        assert result["there"]["weights"] == result["here"]["weights"]
        assert result["there"]["loss"] == result["here"]["loss"]
        assert result["read"] == result["expected"]
    for epoch in range(2):
        seen = [x for result in results for batch in result["read"][epoch] for x in batch]
        assert sorted(seen) == list(range(ROWS))


def test_a_process_of_the_launcher_is_killed_and_two_workers_train_on(tmp_path):
    with start_script(
        SCRIPT,
        tmp_path=tmp_path,
        workers=2,
        launcher_args=["--data-workers", "2"],
        args=[str(tmp_path), "--pause", "20"],
    ) as job:
        for _ in range(2):
            job.wait_for_line("paused", 120)
        below = job.children()
        job.kill("data 0", signal.SIGKILL)
        job.wait_for_line("data 0 ended with exit code 137 (killed by SIGKILL); starting it again")
        (tmp_path / "go").touch()
        run = job.wait(200)
    assert_same(run, 2)
    assert "[data 1] makes batches at port" in run.output
    assert re.search(r"\[worker 0\] .*process \d+ at 127.0.0.1:\d+ .*is lost; going on", run.output)
    assert run.result("worker 0")["children"] == []
    assert not any(is_alive(process.pid) for process in below)
    assert not any(is_alive(job.task_pid(f"data {index}")) for index in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("launched", [0, 1])
def test_a_job_that_is_killed_goes_on_exactly(launched, tmp_path):
    run = run_script(
        SCRIPT,
        tmp_path=tmp_path,
        workers=1,
        launcher_args=["--max-restarts", "1", "--data-workers", str(launched)],
        args=[str(tmp_path / "backup"), "--die", "23"],
        timeout=250,
    )
    assert_same(run)
    there = run.result()["there"]
    # The commit of step 20 may not have been complete.
    assert there["steps"] == 16 * 3
    assert there["steps here"] <= 16 * 3 - 15
    children = run.result()["children"]
    assert len(children) == 1 - launched
    assert not any(map(is_alive, children))


@pytest.mark.slow
def test_processes_on_other_hosts_serve_a_script_of_its_own(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*CLI, "data-service", "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        run = run_script(
            SCRIPT,
            tmp_path=tmp_path,
            workers=1,
            args=[str(tmp_path), "--service", f"localhost:{port}"],
            timeout=200,
        )
        assert_same(run)
        assert run.result()["children"] == []
        # Nothing is left of the reader.
        connections = psutil.Process(server.pid).net_connections()
        assert [c for c in connections if c.status == psutil.CONN_ESTABLISHED] == []
    finally:
        server.terminate()
        assert server.wait(10) == -signal.SIGTERM


def test_a_script_that_is_killed_leaves_no_child_behind(tmp_path):
    source = (
        "import time, numpy as np; from tfdist import data; from tfdist.data import service\n"
        "data.shard(np.arange(9), global_batch_size=3, service=2)\n"
        "print(*[c.process.pid for c in service._children.values()], flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    children = [int(word) for word in process.stdout.readline().split()]
    try:
        assert len(children) == 2
        assert all(map(is_alive, children))
        process.kill()
        process.wait()
        assert eventually(lambda: not any(map(is_alive, children)), 30)
    finally:
        process.kill()


def test_the_launcher_stops_data_processes_that_nobody_needs_any_more(tmp_path):
    source = "import os; print(os.environ['TFDIST_DATA_SERVICE'], os.environ['TF_CONFIG'])"
    run = run_script(
        source, tmp_path=tmp_path, workers=2, launcher_args=["--data-workers", "2"], timeout=60
    )
    assert run.code == 0
    assert run.tasks == ["worker 0", "worker 1", "data 0", "data 1"]
    [line] = run.lines("worker 1")
    assert re.match(r"127.0.0.1:\d+,127.0.0.1:\d+ ", line)
    assert '"data"' not in line
    failing = "import sys; sys.exit(7)"
    run = run_script(
        failing, tmp_path=tmp_path, workers=1, launcher_args=["--data-workers", "1"], timeout=60
    )
    assert run.code == 7
    waiting = "import time; print('up', flush=True); time.sleep(60)"
    with start_script(
        waiting, tmp_path=tmp_path, workers=1, launcher_args=["--data-workers", "1"]
    ) as job:
        job.wait_for_line("up")
        job.signal(signal.SIGTERM)
        assert job.wait(30).code == 143
        assert not is_alive(job.task_pid("data 0"))
