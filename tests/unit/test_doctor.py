"""The checks of `tfdist doctor`, on real sockets and files. Only loopback addresses are used."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist.cluster import checks
from tfdist.cluster import doctor
from tfdist.cluster import machine_checks as machine
from tfdist.cluster import network_checks as network
from tfdist.cluster.checks import Check
from tfdist.cluster.checks import Job
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.launch import ports

FIRST, SECOND, THIRD = (Task("worker", index) for index in range(3))


def cluster(*addresses: str, index: int = 0, **fields) -> Cluster:
    return Cluster("tf_config", Task("worker", index), {"worker": addresses}, **fields)


def resolved(address: str) -> network.Resolved:
    return network.Resolved(((socket.AF_INET, (address, 0)),))


@pytest.fixture
def free() -> Iterator[list[str]]:
    """Addresses that nobody else gets and nobody listens on."""
    with ports.reserve(4) as held:
        yield list(held.addresses)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that does not answer: its queue of connections is full and nobody accepts."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        filling = [socket.socket() for _ in range(4)]
        for sock in filling:
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        time.sleep(0.2)
        yield address_of(server)
        for sock in filling:
            sock.close()


def address_of(sock: socket.socket) -> str:
    return "{}:{}".format(*sock.getsockname())


def look(found: Cluster, timeout: float = 5.0) -> Check:
    names = network.resolve(network.hosts_of(found), timeout)
    seen = network.probe(network.targets_of(found, names), timeout)
    return network.check_peers(found, seen, timeout)


# Deadlines.


def test_a_check_that_does_not_end_fails_and_holds_up_nobody():
    began = time.monotonic()
    stuck = Job("stuck", "/mnt/nfs", lambda: time.sleep(30) or Check("stuck", "ok", ""), "mount it")
    quick = Job("quick", "x", lambda: Check("quick", "ok", "fine"))
    found = checks.run([stuck, quick], 0.3)
    assert time.monotonic() - began < 2
    assert found == [
        Check("stuck", "failed", "/mnt/nfs: no answer within 0.3 s", "mount it"),
        Check("quick", "ok", "fine"),
    ]


def test_an_error_inside_a_check_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        checks.run([Job("broken", "x", lambda: Check("broken", "ok", str(1 // 0)))], 5.0)


def test_a_result_that_comes_too_late_is_taken_care_of():
    late: list[str] = []
    future = checks.in_thread(lambda: time.sleep(0.2) or "group", late.append)
    assert future.cancel()
    deadline = time.monotonic() + 5
    while not late and time.monotonic() < deadline:
        time.sleep(0.01)
    assert late == ["group"]


# Names.


def test_every_name_is_resolved_and_shown():
    found = cluster("localhost:1", "127.0.0.1:2")
    check = network.check_names(found, network.resolve(network.hosts_of(found), 5.0))
    assert check.status == "ok"
    assert "localhost is " in check.detail
    assert "127.0.0.1" in check.detail


def test_names_that_do_not_resolve_are_all_named():
    found = cluster("localhost:1", "no-such-host.invalid:2", "a..b:3")
    check = network.check_names(found, network.resolve(network.hosts_of(found), 20.0))
    assert check.status == "failed"
    assert "no-such-host.invalid (" in check.detail
    assert "a..b (it cannot be a host name)" in check.detail
    assert "localhost" not in check.detail
    assert "/etc/hosts" in check.fix


def test_a_resolver_that_does_not_answer_is_not_waited_for():
    def resolver(host: str, *unused: object, **options: object) -> list:
        time.sleep(30 if host == "slow" else 0)
        return socket.getaddrinfo("127.0.0.1", None, type=socket.SOCK_STREAM)

    began = time.monotonic()
    names = network.resolve(("quick", "slow"), 0.3, resolver)
    assert time.monotonic() - began < 2
    assert names["quick"].texts == ("127.0.0.1",)
    assert names["slow"].problem == "no answer within 0.3 s"


def test_the_name_of_another_host_that_leads_back_here_is_a_warning():
    names = {"alpha": resolved("127.0.1.1"), "beta": resolved("127.0.1.1")}
    check = network.check_names(cluster("alpha:1", "beta:1"), names)
    assert check.status == "warning"
    assert check.detail.startswith("beta is 127.0.1.1 here")  # Debian gives the own name that one
    assert "/etc/hosts" in check.fix


def test_a_loopback_address_among_others_is_a_warning():
    names = {"127.0.0.1": resolved("127.0.0.1"), "beta": resolved("192.0.2.7")}
    check = network.check_names(cluster("127.0.0.1:1", "beta:1", index=1), names)
    assert check.status == "warning"
    assert "127.0.0.1" in check.detail


def test_an_own_address_of_another_machine_is_a_warning():
    names = {"alpha": resolved("192.0.2.7"), "beta": resolved("192.0.2.8")}
    check = network.check_names(cluster("alpha:1", "beta:1"), names)
    assert check.status == "warning"
    assert "192.0.2.7" in check.detail
    assert "worker 0" in check.fix


@pytest.mark.parametrize(
    "alone",
    [
        cluster("a:1"),
        Cluster("local", FIRST),
        Cluster("tf_config", Task("evaluator", 0), {"worker": ("a:1", "b:1")}, ("c:1",)),
    ],
    ids=["one worker", "local", "evaluator"],
)
def test_a_task_that_talks_to_no_other_asks_for_no_name_and_no_peer(alone):
    assert network.hosts_of(alone) == ()
    assert network.check_names(alone, {}).status == "skipped"
    assert look(alone).status == "skipped"


def test_hosts_of_a_tpu_slice_are_resolved():
    assert network.hosts_of(Cluster("tpu", FIRST, tpu="t", hosts=("a", "b"))) == ("a", "b")


def test_addresses_of_ipv6_are_understood():
    found = cluster("[::1]:1", "[::1]:2")
    assert network.hosts_of(found) == ("::1",)
    assert network.check_names(found, network.resolve(("::1",), 5.0)).status == "ok"


# Ports.


def test_a_free_port_and_one_that_the_launcher_holds_are_free(free):
    assert network.check_port(cluster(free[0], free[1])) == Check(
        "port", "ok", f"{free[0]} is free"
    )


def test_a_port_in_use_fails_and_says_how_to_find_the_user(listener):
    check = network.check_port(cluster(address_of(listener), "127.0.0.1:1"))
    assert check.status == "failed"
    assert "in use" in check.detail
    assert f"sport = :{listener.getsockname()[1]}" in check.fix


def test_peers_that_listen_answer(free, listener):
    check = look(cluster(free[0], address_of(listener)))
    assert (check.status, check.fix) == ("ok", "")
    assert "worker 1" in check.detail


def test_peers_that_have_not_started_are_a_warning(free):
    check = look(cluster(*free[:3]))
    assert check.status == "warning"
    assert f"worker 1 ({free[1]}), worker 2 ({free[2]}): not started yet?" in check.detail
    assert "start that task" in check.fix


def test_peers_that_do_not_answer_fail_at_the_deadline(free, black_hole):
    began = time.monotonic()
    check = look(cluster(free[0], black_hole, free[1]), timeout=0.5)
    assert 0.5 <= time.monotonic() - began < 3
    assert check.status == "failed"
    assert f"worker 1 ({black_hole}): gave no answer within 0.5 s" in check.detail
    assert f"worker 2 ({free[1]}): not started yet?" in check.detail
    assert "firewall" in check.fix


def test_peers_that_cannot_be_reached_fail_with_the_systems_words(free):
    # The broadcast address of loopback: TCP has no way to it.
    check = look(cluster(free[0], "127.255.255.255:9"))
    assert check.status == "failed"
    assert "cannot be reached (" in check.detail


def test_peers_without_a_name_are_said_to_be_untried(free):
    check = look(cluster(free[0], "no-such-host.invalid:9"), timeout=20.0)
    assert check.status == "failed"
    assert "does not resolve" in check.detail


def test_one_good_address_of_several_is_enough(free, listener):
    good = listener.getsockname()
    bad = ("127.0.0.1", int(free[0].rpartition(":")[2]))
    targets = {SECOND: [(socket.AF_INET, bad), (socket.AF_INET, good)]}
    assert network.probe(targets, 5.0) == {SECOND: ("connected", "")}


def test_a_connection_that_meets_itself_is_no_listener():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert network._outcome(sock, 0)[0] == "refused"


def test_more_peers_than_connections_at_a_time_are_all_tried(monkeypatch, listener, free):
    monkeypatch.setattr(network, "_AT_A_TIME", 2)
    targets = {Task("worker", n): [(socket.AF_INET, listener.getsockname())] for n in range(5)}
    seen = network.probe(targets, 5.0)
    assert {reach for reach, _ in seen.values()} == {"connected"}
    assert len(seen) == 5


# All tasks together.


def test_reports_of_all_tasks_become_one_answer():
    found = cluster("a:1", "b:1")
    good = {
        FIRST: {"own": "", "seen": [["worker", 1, "connected", ""]]},
        SECOND: {"own": "", "seen": [["worker", 0, "connected", ""]]},
    }
    assert doctor.check_reports(found, good) == Check("peers", "ok", "all 2 tasks reach each other")
    bad = {**good, SECOND: {"own": "in use", "seen": [["worker", 0, "refused", "no way"]]}}
    check = doctor.check_reports(found, bad)
    assert check.status == "failed"
    assert "worker 1 cannot listen on b:1 (in use)" in check.detail
    assert "worker 1 cannot reach worker 0 at a:1 (refused: no way)" in check.detail
    assert "firewall" in check.fix


# Packages.


@pytest.mark.parametrize(
    ("tensorflow", "keras", "status"),
    [
        ("2.21.0", "3.15.1", "ok"),
        ("2.21", "3.15", "ok"),
        ("2.20.0", "3.15.1", "warning"),
        ("2.211.0", "3.15.1", "warning"),
        ("2.21.0", "3.16.0", "warning"),
        (None, "3.15.1", "failed"),
        ("2.21.0", None, "failed"),
    ],
)
def test_versions_are_compared_with_the_tested_pair(tensorflow, keras, status):
    versions = {"tensorflow": tensorflow, "keras": keras, "python": "3.11"}
    check = machine.check_versions({k: v for k, v in versions.items() if v})
    assert check.status == status
    assert ("pip install" in check.fix) == (status == "failed")


@pytest.mark.parametrize(
    ("value", "status"), [(None, "ok"), ("0", "ok"), ("1", "warning"), ("True", "warning")]
)
def test_legacy_keras_is_a_warning(value, status):
    environ = {} if value is None else {"TF_USE_LEGACY_KERAS": value}
    assert machine.check_keras(environ).status == status


# Directories.


def test_a_directory_is_written_to_and_left_as_it_was(tmp_path):
    assert machine.check_output(str(tmp_path)).status == "ok"
    assert machine.check_output(f"file://{tmp_path}").status == "ok"
    assert os.listdir(tmp_path) == []


def test_a_directory_that_does_not_exist_is_not_created(tmp_path):
    check = machine.check_output(str(tmp_path / "a" / "b"))
    assert check.status == "ok"
    assert f"{tmp_path} is writable" in check.detail
    assert os.listdir(tmp_path) == []


def test_a_relative_directory_is_looked_for_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert machine.check_output("runs/one").status == "ok"
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_fails(tmp_path):
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        check = machine.check_output(str(tmp_path / path))
        assert check.status == "failed"
        assert "is not a directory" in check.detail


def test_a_link_to_nowhere_fails(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert machine.check_output(str(tmp_path / "link")).status == "failed"


def test_a_directory_that_takes_no_file_fails_with_the_systems_words():
    check = machine.check_output("/proc/tfdist")
    assert check.status == "failed"
    assert "cannot write in /proc (" in check.detail
    assert check.fix


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else_fails(tmp_path):
    tmp_path.chmod(0o500)
    check = machine.check_output(str(tmp_path))
    tmp_path.chmod(0o700)
    assert check.status == "failed"
    assert str(os.getuid()) in check.fix


def test_an_object_store_is_not_checked():
    check = machine.check_output("gs://bucket/model")
    assert check.status == "skipped"
    assert "TensorFlow" in check.detail


def test_directories_of_vertex_are_known():
    environ = {"AIP_MODEL_DIR": "/m", "AIP_CHECKPOINT_DIR": "", "AIP_TENSORBOARD_LOG_DIR": "/t"}
    assert machine.outputs_from(environ) == ("/m", "/t")


# File systems.


def file_system(size: int, free: int):
    return lambda path: SimpleNamespace(f_frsize=1024, f_blocks=size // 1024, f_bavail=free // 1024)


def test_little_space_is_a_warning_with_what_is_left(tmp_path):
    check = machine.check_space(str(tmp_path), file_system(machine.GIB, 100 * 2**20))
    assert check.status == "warning"
    assert "100.0 MiB left" in check.detail
    assert machine.check_space(str(tmp_path), file_system(machine.GIB, machine.GIB)).status == "ok"
    assert machine.check_space(str(tmp_path), file_system(0, 0)).status == "skipped"


def test_space_of_a_directory_to_come_is_that_of_its_parent(tmp_path):
    asked: list[str] = []
    statvfs = lambda path: asked.append(path) or os.statvfs(path)  # noqa: E731
    machine.check_space(str(tmp_path / "a" / "b"), statvfs)
    assert asked == [str(tmp_path)]


def test_small_shared_memory_is_a_warning_with_the_flag_to_set():
    check = machine.check_shm(file_system(64 * 2**20, 0))
    assert check.status == "warning"
    assert "64.0 MiB" in check.detail
    assert "without GPUs it does not matter" in check.detail
    assert "--shm-size=1g" in check.fix
    assert machine.check_shm(file_system(machine.GIB, 0)).status == "ok"


def test_a_system_without_shared_memory_is_skipped():
    assert machine.check_shm(os.statvfs, "/no/such/shm").status == "skipped"


# Proxies.


@pytest.mark.parametrize(
    ("environ", "status", "fix"),
    [
        ({}, "ok", ""),
        ({"HTTPS_PROXY": "p"}, "ok", ""),  # gRPC does not read it
        ({"http_proxy": ""}, "ok", ""),
        ({"http_proxy": "p"}, "warning", "export no_proxy=w0.pool,10.0.0.2"),
        ({"https_proxy": "p", "no_proxy": "x"}, "warning", "export no_proxy=x,w0.pool,10.0.0.2"),
        ({"grpc_proxy": "p", "no_proxy": ".POOL"}, "warning", "export no_proxy=.POOL,10.0.0.2"),
        ({"http_proxy": "p", "no_proxy": ".pool, 10.0.0.0/8"}, "ok", ""),
        ({"http_proxy": "p", "no_proxy": "*"}, "warning", "export no_proxy='*,w0.pool,10.0.0.2'"),
        (
            {"http_proxy": "p", "NO_PROXY": ".pool,10.0.0.2"},  # nor this
            "warning",
            "export no_proxy=.pool,10.0.0.2,w0.pool",
        ),
        (
            {"http_proxy": "p", "no_proxy": ".pool,10.0.0.2", "no_grpc_proxy": ""},
            "warning",
            "export no_grpc_proxy=w0.pool,10.0.0.2",
        ),
    ],
    ids=str,
)
def test_proxies_between_the_tasks_are_a_warning_with_the_value_to_export(environ, status, fix):
    check = network.check_proxies(("w0.pool", "10.0.0.2"), environ)
    assert (check.status, check.fix) == (status, fix)


def test_proxies_do_not_matter_to_a_task_that_is_alone():
    check = network.check_proxies((), {"http_proxy": "http://user:secret@proxy"})
    assert check.status == "ok"
    assert "secret" not in check.detail


# All of it.


def test_examine_takes_what_it_needs_as_arguments(tmp_path: Path, free):
    found = doctor.examine(
        cluster(*free[:2], warnings=("A port was a string.",)),
        {"AIP_MODEL_DIR": str(tmp_path), "http_proxy": "p"},
        timeout=5.0,
        output_dirs=[str(tmp_path), "gs://bucket/x"],
        statvfs=file_system(2**20, 2**20),
    )
    status = {check.name: check.status for check in found}
    assert [check.name for check in found].count("output") == 2  # the same directory once
    assert status["cluster"] == status["peers"] == status["space"] == "warning"
    assert status["shm"] == status["proxy"] == "warning"
    assert status["names"] == status["port"] == status["keras"] == "ok"
    assert found[0].detail.endswith("A port was a string.")


def test_a_dynamic_cluster_is_not_met_and_its_known_tasks_are_tried(free):
    found = doctor.examine(cluster(free[0], "", free[1]), {}, timeout=5.0, meet=True)
    by_name = {check.name: check for check in found}
    assert by_name["rendezvous"].status == "skipped"
    assert "worker 2" in by_name["peers"].detail
    assert "worker 1" not in by_name["peers"].detail
