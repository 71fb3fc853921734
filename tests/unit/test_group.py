"""The start barrier and the group, between real processes over real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.harness import ROOT

HEAD = textwrap.dedent(
    """
    import json, logging, os, sys, time
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from tfdist.cluster import rendezvous, group as groups, hub
    from tfdist.cluster.topology import Cluster, Task
    from tfdist.errors import TfdistError

    me, ports, timeout = int(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
    addresses = tuple(f"localhost:{port}" for port in ports)
    cluster = Cluster("tf_config", Task("worker", me), {"worker": addresses})

    def join(job=""):
        try:
            return rendezvous.join(cluster, timeout, job)
        except TfdistError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            sys.exit(error.exit_code)

    def join_and_lose_worker_1():
        groups.NOTICE_SECONDS = 1.0
        group = join()
        if me == 1:
            os.kill(os.getpid(), 9)
        return group

    def wait_in_an_operation(seconds):
        # As in TensorFlow: a frame of its Python, and below it native code that can wait long.
        call = compile("time.sleep(seconds)", "/lib/tensorflow/python/eager/execute.py", "exec")
        exec(call, {"time": time, "seconds": seconds})
    """
)


@pytest.fixture
def ports():
    """Ports that stay reserved for the test: bound without listening, as the launcher does."""
    sockets = []
    for _ in range(3):
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("::", 0))
        sockets.append(sock)
    yield [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()


class Tasks:
    def __init__(self, source, ports, which=(0, 1, 2), timeout=20.0, env=None):
        self.started = time.monotonic()
        self.processes = {
            index: subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    HEAD + textwrap.dedent(source),
                    str(index),
                    json.dumps(ports),
                    str(timeout),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **((env or {}).get(index) or {})},
            )
            for index in which
        }

    def wait(self, timeout=60):
        try:
            return {i: p.communicate(timeout=timeout)[0] for i, p in self.processes.items()}
        finally:
            for process in self.processes.values():
                process.kill()

    def codes(self):
        return {i: p.returncode for i, p in self.processes.items()}


def test_values_are_gathered_in_the_order_of_the_tasks(ports):
    tasks = Tasks(
        """
        group = join()
        for turn in range(50):
            values = group.all_gather(f"turn {turn}", {"from": me, "turn": turn})
            assert values == [{"from": i, "turn": turn} for i in range(3)], values
        assert (group.rank, group.chief_rank) == (me, 0)
        print([facts["versions"]["tfdist"] for facts in group.facts])
        """,
        ports,
    )
    outputs = tasks.wait()
    assert set(tasks.codes().values()) == {0}, outputs
    assert len(set(outputs.values())) == 1


def test_tensorflows_port_is_free_again_when_the_barrier_opens(ports):
    tasks = Tasks(
        """
        import socket
        group = join()
        server = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("::", ports[me]))
        server.listen()
        group.all_gather("all listen", me)
        """,
        ports,
    )
    outputs = tasks.wait()
    assert set(tasks.codes().values()) == {0}, outputs


def test_tasks_at_different_points_are_told_where_all_are(ports):
    tasks = Tasks(
        """
        group = join()
        try:
            group.all_gather("fit" if me else "evaluate", 0)
        except TfdistError as error:
            print(type(error).__name__, error)
            time.sleep(1)
        """,
        ports[:2],
        which=(0, 1),
    )
    for output in tasks.wait().values():
        assert "DisagreementError" in output
        assert "worker 0 at 'evaluate'" in output and "worker 1 at 'fit'" in output


def test_a_late_task_is_waited_for_and_then_named(ports):
    tasks = Tasks(
        """
        group = join()
        if me == 1:
            time.sleep(4)
            os._exit(0)
        started = time.monotonic()
        try:
            group.all_gather("here", 0, timeout=1.5)
        except TfdistError as error:
            print(type(error).__name__, round(time.monotonic() - started), error)
            os._exit(0)
        """,
        ports[:2],
        which=(0, 1),
    )
    output = tasks.wait()[0]
    assert "PeerLostError 2 " in output and "'here' within 2 s" in output


@pytest.mark.parametrize("missing", [0, 2])
def test_the_missing_are_named_at_the_deadline(missing, ports):
    here = [index for index in (0, 1, 2) if index != missing]
    tasks = Tasks("join()", ports, which=here, timeout=3.0)
    outputs = tasks.wait()
    assert time.monotonic() - tasks.started < 15
    assert set(tasks.codes().values()) == {1}
    for output in outputs.values():
        assert "RendezvousError" in output and "within 3 s" in output
        assert f"still missing worker {missing} (localhost:{ports[missing]})" in output


def test_those_who_wait_are_reminded_of_the_missing(ports):
    tasks = Tasks("rendezvous.REMIND_SECONDS = 1.0\njoin()", ports, which=(0, 1), timeout=4.0)
    for output in tasks.wait().values():
        assert output.count(f"still waiting for worker 2 (localhost:{ports[2]})") >= 2


def test_a_task_that_starts_again_before_the_barrier_opens_is_welcome(ports):
    first = Tasks("join()", ports, which=(0, 1))
    time.sleep(1.5)
    first.processes[1].kill()
    first.processes[1].wait()
    rest = Tasks("join()", ports, which=(1, 2))
    outputs = {**first.wait(), **rest.wait()}
    assert first.processes[0].returncode == 0, outputs
    assert set(rest.codes().values()) == {0}, outputs


def test_strangers_on_the_port_do_no_harm(ports):
    tasks = Tasks("join()", ports, which=(0,))
    time.sleep(1.0)
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"tfd1\xff\xff\xff\xff",
        b"",
    ):
        with socket.create_connection(("localhost", ports[0]), timeout=5) as stranger:
            stranger.sendall(words)
    rest = Tasks("join()", ports, which=(1, 2))
    outputs = {**tasks.wait(), **rest.wait()}
    assert {*tasks.codes().values(), *rest.codes().values()} == {0}, outputs


def test_a_task_of_another_job_is_turned_away(ports):
    tasks = Tasks("join('other' if me == 1 else 'this')", ports[:2], which=(0, 1), timeout=4.0)
    outputs = tasks.wait()
    assert tasks.codes() == {0: 1, 1: 2}
    assert "another job" in outputs[1]


def test_two_processes_with_one_task_are_told(ports):
    tasks = Tasks("join()", ports, which=(0, 1), timeout=12.0)
    time.sleep(1.5)
    on_another_host = "rendezvous.listen = lambda c: __import__('socket').socket()\n"
    fewer = "rendezvous._REFUSALS = 1\n"
    twin = Tasks(on_another_host + fewer + "join()", ports, which=(1,))
    output = twin.wait()[1]
    tasks.wait()
    assert twin.codes() == {1: 2}
    assert "worker 1 is already here" in output


def test_a_task_that_starts_again_unnoticed_gets_its_place(ports):
    # Its connection stays open on the chief's side, as when its machine lost power.
    first = Tasks("hub._QUIET_SECONDS = 3.0\njoin()", ports, which=(0, 1), timeout=40.0)
    time.sleep(1.5)
    first.processes[1].send_signal(signal.SIGSTOP)
    on_another_host = "rendezvous.listen = lambda c: __import__('socket').socket()\n"
    again = Tasks(on_another_host + "join()", ports, which=(1,), timeout=40.0)
    time.sleep(7.0)
    last = Tasks("join()", ports, which=(2,), timeout=40.0)
    try:
        again.processes[1].wait(35)
        assert again.processes[1].returncode == 0
    finally:
        for group in (first, again, last):
            for process in group.processes.values():
                process.kill()


def test_other_versions_are_refused_by_all(ports):
    tasks = Tasks(
        """
        if me == 1:
            rendezvous.versions = lambda: {"tfdist": "0.0.1"}
        join()
        """,
        ports[:2],
        which=(0, 1),
    )
    outputs = tasks.wait()
    assert tasks.codes() == {0: 2, 1: 2}
    for output in outputs.values():
        assert "worker 1: tfdist 0.0.1" in output


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stuck", [False, True])
def test_survivors_end_with_the_name_of_the_dead(victim, stuck, ports):
    # "Stuck": in native code that no exception can leave, as in TensorFlow's collectives.
    tasks = Tasks(
        f"""
        groups.NOTICE_SECONDS = 2.0
        group = join()
        print("in", flush=True)
        with group.together("the work"):
            if {stuck}:
                import threading
                threading.Lock().acquire() or None
                lock = threading.Lock(); lock.acquire(); lock.acquire()
            while True:
                group.all_gather("step", me)
                time.sleep(0.05)
        """,
        ports,
    )
    for process in tasks.processes.values():
        while process.stdout.readline() != "in\n":
            pass
    tasks.processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    outputs = tasks.wait()
    assert time.monotonic() - killed < 15
    for index, output in outputs.items():
        if index != victim:
            assert tasks.codes()[index] == 1, output
            assert f"worker {victim} (localhost:{ports[victim]}) is gone" in output
            assert "the end of" in output


def test_an_error_that_no_loss_explains_is_raised_as_it_is_and_waited_for_once(ports):
    tasks = Tasks(
        """
        groups.NEWS_SECONDS = 1.5
        group = join()
        class UnavailableError(Exception):
            "As TensorFlow raises it where a peer was stopped for a while, and lives."
        began = time.monotonic()
        try:
            with group.together("outer"), group.together("middle"), group.together("inner"):
                raise UnavailableError
        except UnavailableError:
            print("waited", 1.0 < time.monotonic() - began < 2.5, flush=True)
        group.all_gather("end", me)
        """,
        ports[:2],
        which=(0, 1),
    )
    outputs = tasks.wait()
    assert all("waited True" in output for output in outputs.values()), outputs


def test_silence_is_noticed(ports):
    tasks = Tasks(
        """
        rendezvous.SILENCE_SECONDS = 2.0
        groups.NOTICE_SECONDS = 1.0
        group = join()
        print("in", flush=True)
        with group.together("the work"):
            while True:
                group.all_gather("step", me)
                time.sleep(0.05)
        """,
        ports,
    )
    for process in tasks.processes.values():
        while process.stdout.readline() != "in\n":
            pass
    tasks.processes[2].send_signal(signal.SIGSTOP)
    time.sleep(8)
    codes = {i: p.poll() for i, p in tasks.processes.items()}
    tasks.processes[2].kill()
    outputs = tasks.wait()
    assert codes[0] == codes[1] == 1, outputs
    for index in (0, 1):
        assert "worker 2" in outputs[index] and "said nothing for" in outputs[index]


def test_a_loss_does_not_interrupt_work_that_needs_nobody(ports):
    tasks = Tasks(
        """
        join_and_lose_worker_1()
        time.sleep(6)
        print("saved", flush=True)
        os._exit(0)
        """,
        ports[:2],
        which=(0, 1),
    )
    assert "saved" in tasks.wait()[0]


def test_writing_inside_of_common_work_is_not_cut_short(ports):
    tasks = Tasks(
        """
        group = join_and_lose_worker_1()
        with group.together("the work"):
            with group.alone():
                time.sleep(4)
                print("saved", flush=True)
            time.sleep(30)
            print("never", flush=True)
        """,
        ports[:2],
        which=(0, 1),
    )
    output = tasks.wait()[0]
    assert "saved" in output and "never" not in output
    assert tasks.codes()[0] == 1


@pytest.mark.parametrize("alone", [True, False])
def test_only_work_that_needs_nobody_may_stay_long_in_one_operation(alone, ports):
    tasks = Tasks(
        f"""
        import contextlib
        group = join_and_lose_worker_1()
        with group.alone() if {alone} else contextlib.nullcontext():
            wait_in_an_operation(5)
            print("saved", flush=True)
        os._exit(0)
        """,
        ports[:2],
        which=(0, 1),
    )
    output = tasks.wait()[0]
    assert ("saved" in output) == alone
    assert ("until the end of the operation that it waits in" in output) != alone
    assert tasks.codes()[0] == (0 if alone else 1), output


def test_a_forked_child_does_not_keep_the_dead_alive(ports):
    tasks = Tasks(
        """
        groups.NOTICE_SECONDS = 1.0
        group = join()
        if me == 1:
            if os.fork() == 0:
                time.sleep(10)
                os._exit(0)
            os.kill(os.getpid(), 9)
        try:
            group.all_gather("here", 0)
        except TfdistError as error:
            print("noticed", error)
            os._exit(0)
        """,
        ports[:2],
        which=(0, 1),
    )
    started = time.monotonic()
    output = tasks.processes[0].communicate(timeout=30)[0]
    assert "noticed" in output and time.monotonic() - started < 8
    for process in tasks.processes.values():
        process.kill()


def test_the_chief_ends_last_and_an_error_ends_it_at_once(ports):
    tasks = Tasks(
        """
        group = join()
        if me == 1:
            time.sleep(2)
        print(time.time(), flush=True)
        import atexit
        atexit.unregister(group.leave)
        group.leave()
        print(time.time(), flush=True)
        """,
        ports[:2],
        which=(0, 1),
    )
    outputs = {i: [float(line) for line in out.split()] for i, out in tasks.wait().items()}
    assert outputs[0][1] >= outputs[1][0] > outputs[0][0] + 1.5
    failing = Tasks(
        """
        group = join()
        if me == 1:
            time.sleep(6)
            os._exit(0)
        raise ValueError("no more")
        """,
        ports[:2],
        which=(0, 1),
    )
    started = time.monotonic()
    failing.processes[0].communicate(timeout=30)
    assert time.monotonic() - started < 5
    failing.wait()
