"""Slurm: host lists, counts, ranks and ports."""

from __future__ import annotations

import pytest

from tfdist.cluster import Task
from tfdist.cluster import detect
from tfdist.cluster.environments.hostlist import expand
from tfdist.cluster.environments.hostlist import expand_counts
from tfdist.errors import ClusterError

STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def step(**changes: str | None) -> dict[str, str]:
    """Returns the environment of a step; a change of None takes a variable away."""
    return {name: value for name, value in {**STEP, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("value", "hosts"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("node-1.example.com", "node-1.example.com"),
        ("a[1-3,7],b2", "a1 a2 a3 a7 b2"),
        ("node[2,10]", "node2 node10"),
        ("n[10,9,1]", "n10 n9 n1"),
        ("n[001-003]", "n001 n002 n003"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[099-101]", "n099 n100 n101"),
        ("n[9-10,012]", "n9 n10 n012"),
        ("n[0]", "n0"),
        ("n[00]", "n00"),
        ("[1-2]", "1 2"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("r[1-2]n[1,3]-ib", "r1n1-ib r1n3-ib r2n1-ib r2n3-ib"),
        ("n[1-2].cluster", "n1.cluster n2.cluster"),
        ("a[1-2]b,c[3-4],d", "a1b a2b c3 c4 d"),
        (" a1 , a2 ", "a1 a2"),
        ("z1,a1", "z1 a1"),
        ("a,a", "a a"),
        ("ip-10-0-0-[1-2]", "ip-10-0-0-1 ip-10-0-0-2"),
    ],
)
def test_host_lists(value: str, hosts: str) -> None:
    assert expand(value) == tuple(hosts.split())


@pytest.mark.parametrize(
    "value",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "a[",
        "a]",
        "a[]",
        "a[1",
        "a1]",
        "a[[1]]",
        "a[1-]",
        "a[-2]",
        "a[3-1]",
        "a[1-2-3]",
        "a[x]",
        "a[1-x]",
        "a[1,]",
        "a b",
        "a[1-999999999]",
        "a[1-1000]b[1-1000]",
        "a[1-99999999999999999999999]",
        "(null)",
        "a/b",
    ],
)
def test_malformed_host_lists(value: str) -> None:
    with pytest.raises(ValueError):
        expand(value)


@pytest.mark.parametrize(
    ("value", "counts"),
    [("1", (1,)), ("2(x3),1", (2, 2, 2, 1)), ("4,2(x2)", (4, 2, 2)), ("1(x1)", (1,))],
)
def test_counts(value: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(value) == counts


@pytest.mark.parametrize("value", ["", "x", "2(x)", "2(3)", "2(x3", "-1", "2,,1", "1(x999999999)"])
def test_malformed_counts(value: str) -> None:
    with pytest.raises(ValueError):
        expand_counts(value)


@pytest.mark.parametrize("rank", range(7))
def test_uneven_tasks_fill_one_node_after_the_other(rank: int) -> None:
    found = detect(
        step(
            SLURM_PROCID=str(rank),
            SLURM_STEP_NUM_TASKS="7",
            SLURM_STEP_NODELIST="n[9-12]",
            SLURM_STEP_TASKS_PER_NODE="2(x3),1",
        )
    )
    assert found.hosts == ("n9", "n9", "n10", "n10", "n11", "n11", "n12")
    assert found.task == Task("worker", rank)
    assert found.is_chief == (rank == 0)
    assert found.num_workers == 7


def test_all_tasks_derive_the_same_addresses_and_none_twice() -> None:
    seen = {detect(step(SLURM_PROCID=str(rank))).addresses["worker"] for rank in range(4)}
    (addresses,) = seen
    assert len(set(addresses)) == 4
    assert [address.rpartition(":")[0] for address in addresses] == ["n1", "n1", "n2", "n2"]
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    # Of all tasks, not only of those of a host: two nodes may be one machine.
    assert ports == [ports[0] + rank for rank in range(4)]
    assert all(12_000 <= port < 30_064 for port in ports)


def test_neighbouring_jobs_and_steps_have_ports_apart() -> None:
    def first(job: int, number: int) -> str:
        found = detect(step(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number)))
        return found.addresses["worker"][0]

    assert len({first(job, 0) for job in range(1000, 1200)}) == 200
    assert len({first(1000, number) for number in range(200)}) == 200


def test_port_base_may_be_told() -> None:
    found = detect(step(TFDIST_PORT_BASE="5000"))
    assert found.addresses["worker"] == ("n1:5000", "n1:5001", "n2:5002", "n2:5003")


def test_ports_of_large_steps_begin_anew_on_every_host() -> None:
    found = detect(
        step(
            SLURM_STEP_NUM_TASKS="66",
            SLURM_STEP_NODELIST="n[1-33]",
            SLURM_STEP_TASKS_PER_NODE="2(x33)",
            TFDIST_PORT_BASE="5000",
        )
    )
    addresses = found.addresses["worker"]
    assert addresses[:3] == ("n1:5000", "n1:5001", "n2:5000")
    assert addresses[-1] == "n33:5001"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},
        {"SLURM_STEP_ID": ""},
        {"SLURM_PROCID": None},
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_ID": "4294967292"},
        {"SLURM_STEP_ID": "4294967290"},
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_STEP_ID": "extern"},
        {"SLURM_STEP_ID": "interactive"},
    ],
)
def test_a_shell_or_a_batch_script_is_no_run(changes: dict[str, str | None]) -> None:
    assert detect(step(**changes)).environment == "local"


def test_old_names_of_variables() -> None:
    environ = {
        "SLURM_JOBID": "7",
        "SLURM_STEPID": "1",
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }
    found = detect(environ)
    assert (found.environment, found.task, found.hosts) == (
        "slurm",
        Task("worker", 1),
        ("n1", "n2"),
    )


def test_the_step_goes_before_the_job() -> None:
    found = detect(
        step(SLURM_JOB_NODELIST="n[1-8]", SLURM_NTASKS="16", SLURM_TASKS_PER_NODE="2(x8)")
    )
    assert found.hosts == ("n1", "n1", "n2", "n2")


@pytest.mark.parametrize("per_node", [None, "16"])
def test_without_counts_of_the_step_tasks_are_spread_evenly(per_node: str | None) -> None:
    found = detect(step(SLURM_STEP_TASKS_PER_NODE=None, SLURM_TASKS_PER_NODE=per_node))
    assert found.hosts == ("n1", "n1", "n2", "n2")


def test_the_number_of_tasks_may_follow_from_the_counts() -> None:
    assert detect(step(SLURM_STEP_NUM_TASKS=None)).num_workers == 4


def test_one_task_is_one_process() -> None:
    found = detect(
        step(SLURM_STEP_NUM_TASKS="1", SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE="1")
    )
    assert (found.environment, found.num_workers, found.is_chief) == ("slurm", 1, True)


@pytest.mark.parametrize(
    ("way", "hosts"),
    [
        ("block", "n1 n1 n1 n2"),
        ("block:cyclic", "n1 n1 n1 n2"),
        ("cyclic", "n1 n2 n1 n1"),
        ("cyclic:block,NoPack", "n1 n2 n1 n1"),
        ("plane=2", "n1 n1 n2 n1"),
        ("*", "n1 n1 n1 n2"),
    ],
)
def test_distribution_of_ranks(way: str, hosts: str) -> None:
    found = detect(step(SLURM_STEP_TASKS_PER_NODE="3,1", SLURM_DISTRIBUTION=way))
    assert found.hosts == tuple(hosts.split())


@pytest.mark.parametrize(
    ("changes", "promised"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, None),
        ({"SLURM_GPUS_PER_TASK": "2"}, 2),
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, 2),
        (
            {
                "SLURM_GPUS_ON_NODE": "4",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            },
            4,
        ),
    ],
)
def test_promised_gpus(changes: dict[str, str], promised: int | None) -> None:
    assert detect(step(**changes)).accelerators == promised


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_PROCID": "4"}, ["SLURM_PROCID", "index"]),
        ({"SLURM_PROCID": "-1"}, ["SLURM_PROCID", "index"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID", "index"]),
        ({"SLURM_STEP_ID": "x"}, ["SLURM_STEP_ID"]),
        ({"SLURM_STEP_NODELIST": "n[1-2"}, ["SLURM_STEP_NODELIST", "n[1-2"]),
        ({"SLURM_STEP_NODELIST": None}, ["SLURM_STEP_NODELIST"]),
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, ["SLURM_STEP_TASKS_PER_NODE", "3 nodes"]),
        ({"SLURM_STEP_NUM_TASKS": "5"}, ["SLURM_STEP_NUM_TASKS=5", "4 tasks"]),
        ({"SLURM_STEP_NUM_TASKS": "0"}, ["SLURM_STEP_NUM_TASKS"]),
        ({"SLURM_STEP_NUM_TASKS": "x"}, ["SLURM_STEP_NUM_TASKS"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, ["SLURM_STEP_TASKS_PER_NODE"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "0(x2)"}, ["SLURM_STEP_TASKS_PER_NODE"]),
        ({"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_STEP_NUM_TASKS": "3"}, ["spread"]),
        ({"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_STEP_NUM_TASKS": None}, ["spread"]),
        ({"SLURM_JOB_ID": "x"}, ["SLURM_JOB_ID"]),
        ({"TFDIST_PORT_BASE": "65535"}, ["ports"]),
        ({"TFDIST_PORT_BASE": "x"}, ["TFDIST_PORT_BASE"]),
        ({"SLURM_DISTRIBUTION": "plane=x"}, ["SLURM_DIST_PLANESIZE"]),
        ({"SLURMD_NODENAME": "n2"}, ["SLURMD_NODENAME", "n1", "n2"]),
        ({"SLURM_NODEID": "1"}, ["SLURM_NODEID", "n2"]),
    ],
)
def test_wrong_slurm_variables(changes: dict[str, str | None], words: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        detect(step(**changes))
    for word in words:
        assert word in str(caught.value)
