"""Clusters with parameter servers lose and get back workers, servers and the coordinator."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.cluster.test_launcher import WHO
from tests.support.harness import ROOT
from tests.support.harness import eventually
from tests.support.harness import run_script
from tests.support.harness import start_script
from tfdist.launch import ports

pytestmark = pytest.mark.timeout(150)

#: Only the coordinator gets past the second line.
COORDINATE = """
import time
import tfdist
strategy = tfdist.strategy()
import tensorflow as tf
from report import report
from tfdist.cluster import current
from tfdist.cluster.topology import Task

group = current.group()
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def step():
    total.assign_add(1.0)
    return tf.io.read_file("/proc/self/stat")

pids = set()

def work(steps):
    stats = [coordinator.schedule(step) for _ in range(steps)]
    coordinator.join()
    found = {int(stat.fetch().split()[0]) for stat in stats}
    pids.update(found)
    return found

def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)

work(20)
print("in the middle of training", flush=True)
"""


def _starts(run, task):
    return len(re.findall(rf"tfdist run: {task} is process", run.output))


def test_a_worker_may_stop_and_be_killed_and_come_again_and_die_for_good(tmp_path):
    source = COORDINATE + textwrap.dedent(
        """
        worker = Task("worker", 1)
        seen = []
        for state, starts in (("silent", 1), ("lost", 1), ("alive", 2), ("lost", 2)):
            wait_until(
                lambda: (group.state_of(worker), group.starts_of(worker)) == (state, starts)
            )
            seen.append([state, starts, round(group.silent_for(worker))])
            print("worker 1 is", state, starts, flush=True)
            if seen[-1][:2] == ["alive", 2]:
                wait_until(lambda: len(work(10)) == 2)
                print("worker 1 works", flush=True)
            elif state == "lost":
                assert len(work(10)) == 1
        report(seen=seen, pids=list(pids), total=total.numpy())
        """
    )
    with start_script(
        source,
        workers=2,
        launcher_args=["--ps", "1", "--max-restarts", "1"],
        env={"TFDIST_SILENCE_TIMEOUT": "4"},
        tmp_path=tmp_path,
    ) as job:
        job.wait_for_line("in the middle of training", 90)
        first = {job.task_pid("worker 0"), job.task_pid("worker 1")}
        job.kill("worker 1", signal.SIGSTOP)
        # The launcher kills who says nothing, and starts it again.
        job.wait_for_line("worker 1 is silent 1", 20)
        job.wait_for_line("worker 1 is lost 1", 20)
        job.wait_for_line("worker 1 works", 60)
        again = job.task_pid("worker 1")
        job.kill("worker 1")
        killed = time.monotonic()
        run = job.wait(40)
    assert run.code == 0, run.output
    assert time.monotonic() - killed < 20
    result = run.result("chief 0")
    assert result["seen"][0][2] >= 4 > result["seen"][2][2]
    assert again in result["pids"] and set(result["pids"]) <= {*first, again}
    assert result["total"] >= 50
    starts = {task: _starts(run, task) for task in ("chief 0", "ps 0", "worker 0", "worker 1")}
    assert starts == {"chief 0": 1, "ps 0": 1, "worker 0": 1, "worker 1": 2}
    ended = "worker 1 ended with exit code 137 (killed by SIGKILL); "
    assert ended + "starting it again, 1 of 1" in run.output
    assert ended + "the others go on without it" in run.output
    assert "SIGTERM" not in run.output
    assert sum("going on without it" in line for line in run.lines("chief 0")) == 2


@pytest.mark.slow  # test_losing_machines.py does the same through `fit`
def test_a_lost_server_starts_the_cluster_again_and_a_lost_coordinator_ends_it(tmp_path):
    source = COORDINATE + textwrap.dedent(
        """
        from tfdist.cluster import group as groups
        groups.NOTICE_SECONDS = 3.0  # so that the test need not sit through it
        report(total=total.numpy())
        print("goes on", flush=True)
        while True:
            work(10)
        """
    )
    with start_script(
        source,
        workers=1,
        launcher_args=["--ps", "2", "--max-restarts", "1", "--grace", "60"],
        tmp_path=tmp_path,
    ) as job:
        job.wait_for_line("goes on", 90)
        killed = time.monotonic()
        job.kill("ps 1")
        job.wait_for_line("restart 1 of 1 after ps 1 failed with exit code 137", 60)
        seconds_after_server = time.monotonic() - killed
        assert eventually(lambda: job.output.count("goes on") == 2, 90)
        killed = time.monotonic()
        job.kill("chief 0")
        run = job.wait(60)
        seconds_after_chief = time.monotonic() - killed
    assert run.code == 137, run.output
    assert run.result("chief 0") == {"total": 20}
    assert seconds_after_server < 20 and seconds_after_chief < 15
    [error] = [line for line in run.lines("chief 0") if "tfdist: error:" in line]
    assert "ps 1 (127.0.0.1:" in error and "is gone" in error
    assert "chief 0 ended with exit code 1\n" in run.output
    for task in ("worker 0", "ps 0"):
        assert any("chief 0 (127.0.0.1:" in line for line in run.lines(task)), run.output
        assert run.output.count(f"{task} ended with exit code 1\n") == 2
    assert "SIGTERM" not in run.output


TUTORIAL = """
import os
import tensorflow as tf
from report import report

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        start=True,
    )
    server.join()
import keras
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def step(value):
    total.assign_add(value)
    return value * 2.0

values = [coordinator.schedule(step, args=(tf.constant(float(n)),)) for n in range(10)]
coordinator.join()
report(total=total.numpy(), fetched=[value.fetch() for value in values])
"""


def test_a_script_of_the_tutorial_starts_and_ends(tmp_path, clocks):
    clocks("supervisor.SERVER_SECONDS", 1)
    run = run_script(
        TUTORIAL, workers=2, launcher_args=["--ps", "1"], timeout=90, tmp_path=tmp_path
    )
    assert run.code == 0, run.output
    assert run.result("chief 0") == {"total": 45, "fetched": [2 * n for n in range(10)]}


# The launcher alone; the scripts need no TensorFlow.


def test_every_worker_has_restarts_of_its_own_and_the_others_are_not_touched(tmp_path):
    source = f"""{WHO}
start = int(os.environ["TFDIST_INCARNATION"])
print("start", start, os.environ["TFDIST_JOB_ID"], os.environ["TF_CONFIG"], flush=True)
if role == "worker" and start < (3 if index else 2):
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
time.sleep(6.5)
"""
    options = ["--ps", "1", "--max-restarts", "2", "--grace", "1"]
    run = run_script(source, workers=2, launcher_args=options, tmp_path=tmp_path, timeout=60)
    assert run.code == 0, run.output
    starts = {task: _starts(run, task) for task in ("chief 0", "ps 0", "worker 0", "worker 1")}
    assert starts == {"chief 0": 1, "ps 0": 1, "worker 0": 3, "worker 1": 3}
    first, second, third = [line.split(" ", 2) for line in run.lines("worker 1")]
    assert [line[1] for line in (first, second, third)] == ["0", "1", "2"]
    assert first[2] == second[2] == third[2]
    gone = "worker 1 ended with exit code 137 (killed by SIGKILL); the others go on without it"
    assert run.output.count(gone) == 1
    assert "worker 0 ended with exit code 137 (killed by SIGKILL); the others" not in run.output


def test_the_last_worker_decides(tmp_path):
    source = f"""{WHO}
if role == "worker":
    time.sleep(0.2 + index)
    sys.exit(5 + index)
time.sleep(300)
"""
    options = ["--ps", "1", "--grace", "0.5"]
    run = run_script(source, workers=2, launcher_args=options, tmp_path=tmp_path, timeout=60)
    assert run.code == 6, run.output
    assert "worker 0 ended with exit code 5; the others go on without it" in run.output
    assert "worker 1 failed first with exit code 6" in run.output


def test_a_server_that_fails_after_the_chief_is_done_is_not_gone_on_without(tmp_path):
    source = f"""{WHO}
if role != "chief":
    time.sleep(1.0)
    sys.exit(1)
"""
    run = run_script(source, workers=1, launcher_args=["--ps", "1"], tmp_path=tmp_path, timeout=60)
    assert run.code == 0, run.output
    for task in ("worker 0", "ps 0"):
        assert f"{task} ended with exit code 1; the chief had ended, and the job with it" in (
            run.output
        )
    assert "go on without it" not in run.output


@pytest.mark.parametrize(
    ("who", "code", "restarts"), [("worker", 2, 0), ("ps", 3, 1), ("chief", 4, 1)]
)
def test_whose_failure_ends_the_cluster(tmp_path, who, code, restarts):
    source = f"""{WHO}
if role == "{who}" and index == 0:
    sys.exit({code})
time.sleep(300)
"""
    options = ["--ps", "1", "--grace", "0.2", "--max-restarts", "1"]
    run = run_script(source, workers=2, launcher_args=options, tmp_path=tmp_path, timeout=60)
    assert run.code == code, run.output
    assert run.output.count("tfdist run: restart") == restarts
    assert _starts(run, "worker 1") == 1 + restarts


def test_a_worker_that_fails_when_the_coordinator_has_ended_is_no_failure(tmp_path):
    source = f"{WHO}\nif role != 'chief':\n    time.sleep(1.5)\n    sys.exit(9)"
    options = ["--ps", "1", "--max-restarts", "1"]
    run = run_script(source, workers=1, launcher_args=options, tmp_path=tmp_path, timeout=30)
    assert run.code == 0, run.output
    assert _starts(run, "worker 0") == 1


# The group alone, as where something else than our launcher starts the tasks again.

HEAD = """
import json, logging, os, socket, sys, time
logging.basicConfig(level=logging.INFO, format="%(message)s")
from tfdist.cluster import group as groups, rendezvous
from tfdist.cluster.topology import Cluster, Task
from tfdist.errors import TfdistError

role, index, ports = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
a, b, c, d = (f"localhost:{port}" for port in ports)
cluster = Cluster("tf_config", Task(role, index), {"chief": (a,), "worker": (b, c), "ps": (d,)})

def listen_as_tensorflow():
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    server = socket.create_server(("", int(cluster.address(cluster.task).split(":")[1])),
        family=family, dualstack_ipv6=family == socket.AF_INET6)
    import threading
    def talk():
        while True:
            sock, _ = server.accept()
            sock.sendall(b"\\0\\0\\6\\4 HTTP/2 settings, say")
    threading.Thread(target=talk, daemon=True).start()

def states():
    return [group.state_of(Task("worker", i)) for i in (0, 1)]

try:
    group = rendezvous.join(cluster, 20.0)
except TfdistError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(error.exit_code)
listen_as_tensorflow()
print("in", flush=True)
if role != "chief":
    problem = group.wait_until_left(cluster.chief)
    print("the chief has left:", problem, flush=True)
    group.leave()
    sys.exit(1 if problem else 0)
sys.stdin.readline()
"""


class Group:
    """A chief, two workers and a parameter server, without TensorFlow."""

    def __init__(self, chief, silence="35"):
        self.chief_source = HEAD + textwrap.dedent(chief)
        self.silence = silence
        self.stack = contextlib.ExitStack()
        self.ports = self.stack.enter_context(ports.reserve(4)).ports
        self.processes = {}

    def __enter__(self):
        for role, index in (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)):
            self.start(role, index)
        for task in list(self.processes):
            self.wait_for("in", task)
        return self

    def __exit__(self, *unused):
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.stack.close()

    def start(self, role, index):
        source = self.chief_source if role == "chief" else HEAD
        self.processes[role, index] = subprocess.Popen(
            [sys.executable, "-c", source, role, str(index), json.dumps(self.ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TFDIST_SILENCE_TIMEOUT": self.silence},
        )

    def wait_for(self, word, task):
        lines = []
        for line in self.processes[task].stdout:
            lines.append(line)
            if word in line:
                return line
        raise AssertionError(f"{task} never said {word!r}: {lines}")

    def go_on(self):
        """Lets the chief go past the end of HEAD."""
        self.processes["chief", 0].stdin.write("\n")
        self.processes["chief", 0].stdin.flush()

    def codes(self, seconds=15):
        return {task: process.wait(seconds) for task, process in self.processes.items()}


def test_a_worker_that_comes_again_finds_the_group_although_the_barrier_is_gone():
    chief = """
    print(states(), group.starts_of(Task("worker", 1)), flush=True)
    time.sleep(1)
    """
    with Group(chief) as group:
        for _ in range(2):
            group.processes["worker", 1].kill()
            group.processes["worker", 1].wait()
            group.wait_for("worker 1 (localhost:", ("chief", 0))
            started = time.monotonic()
            group.start("worker", 1)
            group.wait_for("in", ("worker", 1))
            assert time.monotonic() - started < 8
            assert "is back" in group.wait_for("worker 1 (localhost:", ("chief", 0))
        group.go_on()
        assert group.wait_for("alive", ("chief", 0)) == "['alive', 'alive'] 3\n"
        assert set(group.codes().values()) == {0}


def test_a_coordinator_that_dies_ends_also_a_worker_that_came_again():
    with Group("raise ValueError('out of luck')") as group:
        group.processes["worker", 0].kill()
        group.processes["worker", 0].wait()
        group.start("worker", 0)
        group.wait_for("in", ("worker", 0))
        group.go_on()
        lines = [group.wait_for("has left", task) for task in list(group.processes)[1:]]
        assert all("ValueError: out of luck" in line for line in lines), lines
        assert set(group.codes().values()) == {1}


def test_the_coordinator_does_not_wait_for_workers_that_are_gone_or_stopped():
    chief = """
    while states() != ["silent", "lost"]:
        time.sleep(0.05)
    started = time.monotonic()
    group.leave()
    print("waited", round(time.monotonic() - started), flush=True)
    """
    with Group(chief, silence="3") as group:
        group.processes["worker", 0].send_signal(signal.SIGSTOP)
        group.processes["worker", 1].kill()
        group.go_on()
        assert group.wait_for("waited", ("chief", 0)) == "waited 0\n"
        group.processes["worker", 0].send_signal(signal.SIGCONT)
        codes = group.codes()
    # The one that slept learns the end when it wakes up.
    assert codes == {("chief", 0): 0, ("worker", 0): 0, ("worker", 1): -9, ("ps", 0): 0}


def test_a_worker_whose_machine_vanished_is_replaced_by_its_new_start():
    with Group("print(states(), flush=True)", silence="3") as group:
        # Its connections stay open, as nobody tells of their end.
        vanished = group.processes["worker", 1]
        vanished.send_signal(signal.SIGSTOP)
        group.wait_for("says nothing", ("chief", 0))
        vanished.kill()
        group.start("worker", 1)
        group.wait_for("in", ("worker", 1))
        group.go_on()
        assert group.wait_for("alive", ("chief", 0)) == "['alive', 'alive']\n"
        assert set(group.codes().values()) == {0}


def test_the_loss_of_a_server_is_final():
    chief = """
    groups.NOTICE_SECONDS = 1.0
    with group.together("fit"):
        import threading
        threading.Event().wait()
    """
    with Group(chief) as group:
        group.go_on()
        group.processes["ps", 0].kill()
        line = group.wait_for("tfdist: error:", ("chief", 0))
        assert "ps 0 (localhost:" in line and "the end of fit" in line
        codes = group.codes()
    assert codes == {("chief", 0): 1, ("worker", 0): 1, ("worker", 1): 1, ("ps", 0): -9}
