"""Detection of the cluster from environment variables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tfdist.cli.env import describe
from tfdist.cluster import Cluster
from tfdist.cluster import Task
from tfdist.cluster import detect
from tfdist.errors import ClusterError
from tfdist.errors import ConfigError

TABLE = Path(__file__).parents[1] / "data" / "topology.json"
CASES = json.loads(TABLE.read_text())["cases"]

REDUCTION_IMAGE = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"


def tf_config(cluster: Any = None, type: Any = None, index: Any = 0, **extra: Any) -> str:
    """Returns a TF_CONFIG; a part that is None is left out."""
    made: dict[str, Any] = dict(extra)
    if cluster is not None:
        made["cluster"] = cluster
    if type is not None:
        made["task"] = {"type": type} if index is None else {"type": type, "index": index}
    return json.dumps(made)


def read(value: str) -> Cluster:
    return detect({"TF_CONFIG": value})


def refusal(value: str | dict[str, str]) -> str:
    with pytest.raises(ClusterError) as caught:
        detect({"TF_CONFIG": value} if isinstance(value, str) else value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900
    return str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case_of_the_shared_table(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ConfigError) as caught:
            describe(case["environ"])
        assert case["error"] in str(caught.value)
        assert caught.value.exit_code == 2
        return
    report = describe(case["environ"])
    report["cluster_roles"] = sorted(report["cluster"])
    report["hosts"] = list(detect(case["environ"]).hosts)
    for key, value in case["expect"].items():
        assert report[key] == value, key


# TF_CONFIG: what is accepted


@pytest.mark.parametrize("blank", ["", " ", "\n\t", "{}", ' {"environment": "cloud"} ', "\ufeff"])
@pytest.mark.parametrize("name", ["TF_CONFIG", "CLUSTER_SPEC", "TFDIST_CLUSTER"])
def test_a_variable_without_cluster_and_task_counts_as_not_set(name: str, blank: str) -> None:
    assert detect({name: blank}).environment == "local"


@pytest.mark.parametrize("nothing", ['{"cluster": null, "task": null}', '{"cluster": {}}'])
def test_null_and_empty_parts_count_as_absent(nothing: str) -> None:
    assert read(nothing).environment == "local"


@pytest.mark.parametrize("index", [1, "1", " 1 ", "01"])
def test_index_may_be_written_as_a_string(index: object) -> None:
    cluster = read(tf_config({"worker": ["a:1", "b:1"]}, "worker", index))
    assert cluster.task == Task("worker", 1)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("chief", "chief"),
        ("Chief", "chief"),
        ("MASTER", "chief"),
        ("master", "chief"),
        (" chief ", "chief"),
        ("workerpool0", "chief"),
        ("Worker", "worker"),
        ("WORKER", "worker"),
        ("workerpool1", "worker"),
    ],
)
def test_role_names_in_every_spelling(name: str, role: str) -> None:
    cluster = read(tf_config({name: ["a:1"]}, name))
    assert cluster.task == Task(role, 0)
    assert dict(cluster.addresses) == {role: ("a:1",)}
    assert cluster.is_chief


def test_task_and_cluster_may_differ_in_spelling() -> None:
    cluster = read(tf_config({"Worker": ["a:1"], "MASTER": ["b:1"]}, "chief"))
    assert cluster.task == Task("chief", 0)
    assert cluster.num_workers == 2


def test_master_is_chief_with_one_warning() -> None:
    cluster = read(tf_config({"master": ["a:1"], "worker": ["b:1"]}, "master"))
    assert len(cluster.warnings) == 1
    assert "master" in cluster.warnings[0]


@pytest.mark.parametrize(
    "cluster",
    [
        {"worker": ["a:1", "b:1"]},
        {"worker": ["a:1", "b:1"], "evaluator": ["e:1"]},
        {"worker": ["a:1", "b:1"], "Evaluator": ["e:1", "f:1"]},
        {"worker": ["a:1", "b:1"], "evaluator": []},
    ],
)
@pytest.mark.parametrize("index", [0, None])
def test_evaluator_is_accepted_inside_and_outside_and_never_counts(
    cluster: dict[str, Any], index: int | None
) -> None:
    found = read(tf_config(cluster, "evaluator", index))
    assert found.num_workers == 2
    assert found.is_evaluator
    assert not found.is_chief
    assert set(found.addresses) == {"worker"}


@pytest.mark.parametrize("role", ["chief", "worker", "master"])
def test_a_task_without_cluster_is_one_process(role: str) -> None:
    for cluster in (None, {}, {"worker": []}):
        found = read(tf_config(cluster, role))
        assert (found.num_workers, found.is_chief) == (1, True)


def test_an_evaluator_without_cluster_keeps_its_role() -> None:
    found = read('{"task": {"type": "evaluator"}}')
    assert found.task == Task("evaluator", 0)
    assert not found.is_chief


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ({"0": "a:1", "1": "b:1"}, ("a:1", "b:1")),
        ({"1": "b:1", "0": "a:1"}, ("a:1", "b:1")),
        ({str(i): f"h{i}:1" for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}, None),
    ],
)
def test_a_dict_of_tasks_is_ordered_by_number(
    worker: dict[str, str], expected: tuple[str, ...] | None
) -> None:
    found = read(tf_config({"worker": worker}, "worker"))
    assert found.addresses["worker"] == (expected or tuple(f"h{i}:1" for i in range(11)))


def test_dynamic_worker_knows_itself_and_the_parameter_servers() -> None:
    value = {
        "sparseCluster": {"worker": {"3": "w3:2222"}, "ps": ["p0:2222", "p1:2222"]},
        "task": {"type": "worker", "index": 3},
        "environment": "cloud",
    }
    found = read(json.dumps(value))
    assert found.address(Task("worker", 3)) == "w3:2222"
    assert found.addresses["ps"] == ("p0:2222", "p1:2222")
    assert json.loads(found.to_tf_config())["cluster"]["worker"] == {"3": "w3:2222"}
    assert describe({"TF_CONFIG": json.dumps(value)})["cluster"]["worker"] == ["w3:2222"]


@pytest.mark.parametrize("index", [0, 1, 5])
def test_dynamic_parameter_server_knows_itself_alone(index: int) -> None:
    value = {
        "sparseCluster": {"worker": {}, "ps": [f"p{index}:2222"]},
        "task": {"type": "ps", "index": index},
    }
    found = read(json.dumps(value))
    assert found.task == Task("ps", index)
    assert found.address(found.task) == f"p{index}:2222"


@pytest.mark.parametrize("role", ["tensorboard", "notebook", "driver", "head", "sidecar"])
def test_roles_of_helpers_are_left_out_with_a_warning(role: str) -> None:
    cluster = {"worker": ["a:1", "b:1"], role: ["not an address"]}
    found = read(tf_config(cluster, "worker", 1))
    assert set(found.addresses) == {"worker"}
    assert role in found.warnings[0]


def test_extra_keys_are_ignored() -> None:
    value = {
        "cluster": {"chief": ["a:1"]},
        "task": {"type": "chief", "index": 0, "cloud": "x", "trial": "1"},
        "environment": "cloud",
        "job": '{"scale_tier": "CUSTOM"}',
        "model_dir": "gs://x",
        "rpc_layer": "grpc",
        "version": 3.5,
    }
    assert read(json.dumps(value)).warnings == ()


@pytest.mark.parametrize(
    "address",
    [
        "a:1",
        "a:65535",
        "[::1]:2222",
        "[fe80::1]:2222",
        "10.0.0.1:2222",
        "my_host.ns.svc.cluster.local:2222",
        "job-worker-0.ns.svc:2222",
    ],
)
def test_good_addresses(address: str) -> None:
    found = read(tf_config({"worker": [f" {address} ", "other:1"]}, "worker"))
    assert found.addresses["worker"][0] == address


def test_one_host_with_several_ports_is_no_duplicate() -> None:
    cluster = {"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4"]}
    assert read(tf_config(cluster, "chief")).num_workers == 2


def test_64_workers_keep_their_order() -> None:
    workers = [f"host{index}:2222" for index in range(64)]
    found = read(tf_config({"worker": workers}, "worker", 63))
    assert found.addresses["worker"] == tuple(workers)
    assert found.num_workers == 64
    assert found.chief == Task("worker", 0)


def test_bom_and_blanks_around_the_document() -> None:
    assert read("\ufeff" + tf_config({"worker": ["a:1", "b:1"]}, "worker") + "\n").num_workers == 2


def test_sagemaker_parameter_servers_on_every_host() -> None:
    value = {
        "cluster": {
            "master": ["algo-1:2222"],
            "worker": ["algo-2:2222"],
            "ps": ["algo-1:2223", "algo-2:2223"],
        },
        "environment": "cloud",
        "task": {"type": "master", "index": 0},
    }
    hosts = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
    report = describe({"TF_CONFIG": json.dumps(value), **hosts})
    assert report["task"] == {"type": "chief", "index": 0}
    assert report["strategy"] == "parameter_server"
    assert report["num_workers"] == 1


# TF_CONFIG: what is refused

TWO = {"worker": ["a:1", "b:1"]}

REFUSED = {
    "bad JSON": ('{"cluster": ', ["JSON", "TF_CONFIG", "line 1 column 12"]),
    "python dict": ("{'cluster': {}}", ["JSON", "double quotes"]),
    "a word": ("worker", ["JSON", "TF_CONFIG"]),
    "trailing": ('{"a": 1} x', ["JSON"]),
    "deep": ("[" * 100_000, ["JSON"]),
    "long number": ("9" * 5_000, ["JSON"]),
    "long text": ('{"cluster": "' + "x" * 5_000 + '"}', ["cluster", "characters"]),
    "list": ('["a:1"]', ["JSON object"]),
    "number": ("5", ["JSON object"]),
    "null": ("null", ["JSON object"]),
    "quoted twice": (json.dumps(tf_config(TWO, "worker")), ["JSON object", "twice"]),
    "cluster string": (tf_config("a:1", "worker"), ["cluster"]),
    "cluster empty list": (tf_config([], "worker"), ["cluster"]),
    "cluster number": (tf_config(3, "worker"), ["cluster"]),
    "tasks string": (tf_config({"worker": "a:1"}, "worker"), ["cluster", "list", "worker"]),
    "tasks number": (tf_config({"worker": 1}, "worker"), ["cluster", "list"]),
    "no task": (tf_config(TWO), ["task"]),
    "task null": ('{"cluster": {"worker": ["a:1"]}, "task": null}', ["task"]),
    "task list": ('{"cluster": {"worker": ["a:1"]}, "task": ["worker", 0]}', ["task"]),
    "task string": ('{"cluster": {"worker": ["a:1"]}, "task": "worker"}', ["task"]),
    "no type": ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', ["task", "type"]),
    "type number": (tf_config(TWO, 3), ["task", "type"]),
    "type unknown": (tf_config(TWO, "trainer"), ["task", "trainer", "a:1"]),
    "type of a helper": (tf_config({**TWO, "tensorboard": ["t:1"]}, "tensorboard"), ["task"]),
    "no index": (tf_config(TWO, "worker", None), ["index"]),
    "index float": (tf_config(TWO, "worker", 0.0), ["index"]),
    "index bool": (tf_config(TWO, "worker", True), ["index"]),
    "index negative": (tf_config(TWO, "worker", -1), ["index", "-1"]),
    "index word": (tf_config(TWO, "worker", "one"), ["index", "one"]),
    "index empty": (tf_config(TWO, "worker", ""), ["index"]),
    "index float string": (tf_config(TWO, "worker", "1.0"), ["index"]),
    "index list": (tf_config(TWO, "worker", [0]), ["index"]),
    "index null": (
        '{"cluster":{"worker":["a:1"]},"task":{"type":"worker","index":null}}',
        ["index"],
    ),
    "index range": (tf_config(TWO, "worker", 2), ["index", "worker 2", "a:1"]),
    "index string range": (tf_config(TWO, "worker", "2"), ["index"]),
    "index huge": (tf_config(TWO, "worker", 10**30), ["index"]),
    "index alone": (tf_config(None, "worker", 3), ["index"]),
    "index evaluator": (tf_config({**TWO, "evaluator": ["e:1"]}, "evaluator", 1), ["index"]),
    "type not in cluster": (tf_config(TWO, "chief"), ["task", "cluster", "chief 0", "a:1"]),
    "ps not in cluster": (tf_config(TWO, "ps"), ["task", "cluster"]),
    "ps without cluster": (tf_config(None, "ps"), ["cluster"]),
    "only helpers": (tf_config({"tensorboard": ["t:1"]}, "worker"), ["task", "cluster"]),
    "only evaluators": (tf_config({"evaluator": ["t:1"]}, "worker"), ["task", "cluster"]),
    "misspelt role": (
        tf_config({"workers": ["a:1"]}, "worker"),
        ["workers", "did you mean worker"],
    ),
    "misspelt beside": (tf_config({"chief": ["a:1"], "wroker": ["b:1"]}, "chief"), ["wroker"]),
    "two chiefs": (tf_config({"chief": ["a:1", "b:1"]}, "chief"), ["one address", "chief"]),
    "two masters": (tf_config({"master": ["a:1", "b:1"]}, "master"), ["one address", "chief"]),
    "chief and master": (tf_config({"chief": ["a:1"], "master": ["b:1"]}, "chief"), ["duplicate"]),
    "role in two cases": (
        tf_config({"worker": ["a:1"], "Worker": ["b:1"]}, "worker"),
        ["duplicate"],
    ),
    "key twice": (
        '{"cluster":{"worker":["a:1"],"worker":["b:1"]},"task":{"type":"worker","index":0}}',
        ["duplicate", "worker"],
    ),
    "dict with a gap": (tf_config({"worker": {"0": "a:1", "2": "b:1"}}, "worker"), ["index 1"]),
    "dict with a word": (tf_config({"worker": {"zero": "a:1"}}, "worker"), ["index", "zero"]),
    "dict with one index twice": (
        tf_config({"worker": {"0": "a:1", "00": "b:1"}}, "worker"),
        ["key"],
    ),
    "dict with a huge index": (tf_config({"worker": {"999999999": "a:1"}}, "worker"), ["index"]),
    "dynamic without ps": (
        '{"sparseCluster":{"worker":{"0":"a:1"}},"task":{"type":"worker","index":0}}',
        ["ps", "sparseCluster"],
    ),
    "dynamic chief": (
        '{"sparseCluster":{"worker":{},"ps":[]},"task":{"type":"chief","index":0}}',
        ["cluster"],
    ),
    "dynamic other index": (
        '{"sparseCluster":{"worker":{"1":"a:1"},"ps":["p:1"]},"task":{"type":"worker","index":0}}',
        ["index"],
    ),
    "ps without worker": (tf_config({"chief": ["a:1"], "ps": ["b:1"]}, "chief"), ["worker"]),
    "duplicate": (tf_config({"worker": ["a:1", "a:1"]}, "worker"), ["duplicate", "worker 1"]),
    "duplicate case": (tf_config({"worker": ["Host:1", "host:1"]}, "worker"), ["duplicate"]),
    "duplicate port": (tf_config({"worker": ["a:1", "a:01"]}, "worker"), ["duplicate"]),
    "duplicate blank": (tf_config({"worker": ["a:1", " a:1 "]}, "worker"), ["duplicate"]),
    "duplicate IPv6": (tf_config({"worker": ["[::1]:1", "[0:0::1]:1"]}, "worker"), ["duplicate"]),
    "duplicate role": (
        tf_config({"chief": ["a:1"], "worker": ["b:1", "a:1"]}, "chief"),
        ["duplicate", "chief 0", "worker 1"],
    ),
    "duplicate evaluator": (tf_config({**TWO, "evaluator": ["b:1"]}, "worker"), ["duplicate"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_tf_config_is_one_clear_error(name: str) -> None:
    value, words = REFUSED[name]
    message = refusal(value)
    for word in words:
        assert word in message
    assert "Fix: " in message


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("h", "port"),
        ("h:", "port"),
        ("h:0", "port"),
        ("h:0000", "port"),
        ("h:abc", "port"),
        ("h:99999", "port"),
        ("h:65536", "port"),
        ("h:-1", "port"),
        ("h:+1", "port"),
        ("h:1.5", "port"),
        ("h:22 22", "port"),
        ("h:2222/", "port"),
        ("h:٣", "port"),
        ("h:" + "1" * 50, "port"),
        ("[::1]", "port"),
        ("grpc://h:1", "grpc://"),
        ("http://h:1", "scheme"),
        ("::1:2222", "IPv6"),
        ("h:1:2", "IPv6"),
        ("[::zz]:1", "IPv6"),
        ("[]:1", "IPv6"),
        (":2222", "host"),
        ("a b:2222", "host"),
        ("a,b:2222", "host"),
        ("user@h:2222", "host"),
        ("", "empty"),
        ("  ", "empty"),
        (None, "string"),
        (2222, "string"),
        (["h:1"], "string"),
        ({"host": "h"}, "string"),
    ],
)
@pytest.mark.parametrize("role", ["worker", "ps", "evaluator"])
def test_a_wrong_address_names_the_task_and_what_is_wrong(
    role: str, address: object, word: str
) -> None:
    cluster: dict[str, Any] = {"chief": ["c:1"], "worker": ["w:1"]}
    cluster[role] = [f"ok-{role}:1", address]
    message = refusal(tf_config(cluster, "chief"))
    assert word in message
    assert "address" in message
    assert f"TF_CONFIG, {role} 1" in message


# Vertex AI


def cluster_spec(type: str, index: Any = 0, job: Any = None, **pools: list[str]) -> str:
    made: dict[str, Any] = {
        "cluster": pools,
        "environment": "cloud",
        "task": {"type": type, "index": index},
    }
    if job is not None:
        made["job"] = job
    return json.dumps(made)


POOLS = {
    "workerpool0": ["p0-0:2222"],
    "workerpool1": ["p1-0:2222", "p1-1:2222"],
    "workerpool2": ["p2-0:2222", "p2-1:2222"],
}

NAMED_THE_SAME = {
    "snake": {"worker_pool_specs": [{}, {}, {"container_spec": {"image_uri": REDUCTION_IMAGE}}]},
    "camel": {"workerPoolSpecs": [{}, {}, {"containerSpec": {"imageUri": REDUCTION_IMAGE}}]},
    "string": json.dumps(
        {"worker_pool_specs": [{}, {}, {"container_spec": {"image_uri": REDUCTION_IMAGE}}]}
    ),
    "nested": {
        "job_spec": {
            "worker_pool_specs": [{}, {}, {"container_spec": {"image_uri": REDUCTION_IMAGE}}]
        }
    },
    "mirror": {
        "worker_pool_specs": [{}, None, {"container_spec": {"image_uri": "r/Reduction_Server:1"}}]
    },
}


@pytest.mark.parametrize("job", NAMED_THE_SAME.values(), ids=NAMED_THE_SAME)
@pytest.mark.parametrize("with_tf_config", [False, True])
@pytest.mark.parametrize("listed_as_ps", [False, True])
def test_reduction_server_addresses_never_reach_tensorflow(
    job: Any, with_tf_config: bool, listed_as_ps: bool
) -> None:
    environ = {"CLUSTER_SPEC": cluster_spec("workerpool1", 1, job, **POOLS)}
    if with_tf_config:
        cluster = {"chief": POOLS["workerpool0"], "worker": POOLS["workerpool1"]}
        if listed_as_ps:
            cluster["ps"] = POOLS["workerpool2"]
        environ["TF_CONFIG"] = tf_config(cluster, "worker", 1)
    found = detect(environ)
    assert found.environment == "vertex"
    assert set(found.addresses) == {"chief", "worker"}
    assert found.reduction_servers == ("p2-0:2222", "p2-1:2222")
    assert found.num_workers == 3
    assert "p2-" not in found.to_tf_config()
    assert describe(environ)["strategy"] == "multi_worker"


def test_reduction_server_in_tf_config_alone() -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["r:1"]}
    found = read(tf_config(cluster, "chief", job=NAMED_THE_SAME["camel"]))
    assert set(found.addresses) == {"chief", "worker"}


def test_reduction_server_without_workers() -> None:
    pools = {**POOLS, "workerpool1": []}
    for job in (NAMED_THE_SAME["snake"], None, ""):
        report = describe({"CLUSTER_SPEC": cluster_spec("workerpool0", 0, job, **pools)})
        assert list(report["cluster"]) == ["chief"]
        assert report["strategy"] == "default"


def test_third_pool_of_unknown_image_is_parameter_servers_with_a_warning() -> None:
    found = detect({"CLUSTER_SPEC": cluster_spec("workerpool1", 0, **POOLS)})
    assert found.has_parameter_servers
    assert "TFDIST_POOL2=reduction_server" in found.warnings[0]


def test_third_pool_of_the_users_image_is_parameter_servers_without_a_warning() -> None:
    job = {"worker_pool_specs": [{}, {}, {"container_spec": {"image_uri": "gcr.io/me/train"}}]}
    found = detect({"CLUSTER_SPEC": cluster_spec("workerpool1", 0, job, **POOLS)})
    assert found.has_parameter_servers
    assert found.warnings == ()


@pytest.mark.parametrize("value", ["reduction_server", "Reduction-Server"])
def test_the_user_may_say_what_the_third_pool_is(value: str) -> None:
    spec = cluster_spec("workerpool1", 0, **POOLS)
    assert not detect({"CLUSTER_SPEC": spec, "TFDIST_POOL2": value}).has_parameter_servers
    job = NAMED_THE_SAME["snake"]
    spec = cluster_spec("workerpool1", 0, job, **POOLS)
    assert detect({"CLUSTER_SPEC": spec, "TFDIST_POOL2": "ps"}).has_parameter_servers


def test_a_wrong_word_for_the_third_pool_is_an_error() -> None:
    spec = cluster_spec("workerpool1", 0, **POOLS)
    assert "TFDIST_POOL2" in refusal({"CLUSTER_SPEC": spec, "TFDIST_POOL2": "reducer"})


def test_this_program_in_the_reduction_server_pool_is_an_error() -> None:
    spec = cluster_spec("workerpool2", 0, NAMED_THE_SAME["snake"], **POOLS)
    assert "Reduction Server" in refusal({"CLUSTER_SPEC": spec})


def test_empty_middle_pools() -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": [], "workerpool2": [], "workerpool3": ["e:1"]}
    found = detect({"CLUSTER_SPEC": cluster_spec("workerpool3", 0, **pools)})
    assert found.task == Task("evaluator", 0)
    assert dict(found.addresses) == {"chief": ("a:1",)}
    assert found.evaluators == ("e:1",)


@pytest.mark.parametrize("job", ["", "{not json", "[]", [], None, 3, {"python_module": ""}])
def test_any_job_is_tolerated(job: Any) -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}
    found = detect({"CLUSTER_SPEC": cluster_spec("workerpool0", 0, job, **pools)})
    assert found.num_workers == 2
    assert found.is_chief


@pytest.mark.parametrize("count", [8, "8"])
def test_accelerators_of_the_own_pool_are_promised(count: object) -> None:
    machine = {"accelerator_type": "NVIDIA_TESLA_A100", "accelerator_count": count}
    job = {"worker_pool_specs": [{}, {"machine_spec": machine}]}
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}
    assert detect({"CLUSTER_SPEC": cluster_spec("workerpool1", 0, job, **pools)}).accelerators == 8
    assert (
        detect({"CLUSTER_SPEC": cluster_spec("workerpool0", 0, job, **pools)}).accelerators is None
    )


@pytest.mark.parametrize(
    "machine", [{"machine_type": "ct5lp-hightpu-4t"}, {"acceleratorType": "TPU_V3"}]
)
def test_a_tpu_machine_is_a_tpu(machine: dict[str, str]) -> None:
    job = {"worker_pool_specs": [{"machineSpec": machine}]}
    report = describe({"CLUSTER_SPEC": cluster_spec("workerpool0", 0, job, workerpool0=["a:1"])})
    assert report["strategy"] == "tpu"


AGREEING = {
    "the same": tf_config({"chief": ["a:1"], "worker": ["b:1"]}, "worker"),
    "master": tf_config({"master": ["a:1"], "worker": ["b:1"]}, "worker"),
    "another case": tf_config({"chief": ["A:1"], "worker": ["b:01"]}, "worker", "0"),
    "no cluster": tf_config(None, "worker"),
    "empty": "{}",
    "blank": " ",
}


@pytest.mark.parametrize("name", AGREEING)
def test_cluster_spec_and_tf_config_that_agree(name: str) -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1"], "workerpool3": ["e:1"]}
    spec = cluster_spec("workerpool1", 0, **pools)
    found = detect({"CLUSTER_SPEC": spec, "TF_CONFIG": AGREEING[name]})
    assert found.environment == "vertex"
    assert found.task == Task("worker", 0)


@pytest.mark.parametrize("cluster", [None, {"chief": ["a:1"], "worker": ["b:1"]}])
def test_vertex_tells_an_evaluator_its_type_alone(cluster: Any) -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1"], "workerpool3": ["e:1", "f:1"]}
    spec = cluster_spec("workerpool3", 1, **pools)
    found = detect({"CLUSTER_SPEC": spec, "TF_CONFIG": tf_config(cluster, "evaluator", None)})
    assert found.task == Task("evaluator", 1)
    assert found.num_workers == 2


DISAGREEING = {
    "address": tf_config({"chief": ["a:1"], "worker": ["x:1", "c:1"]}, "worker"),
    "port": tf_config({"chief": ["a:1"], "worker": ["b:2", "c:1"]}, "worker"),
    "order": tf_config({"chief": ["a:1"], "worker": ["c:1", "b:1"]}, "worker"),
    "fewer": tf_config({"chief": ["a:1"], "worker": ["b:1"]}, "worker"),
    "no chief": tf_config({"worker": ["b:1", "c:1"]}, "worker"),
    "ps": tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["p:1"]}, "worker"),
    "type": tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "chief"),
    "index": tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1),
    "evaluator": tf_config(
        {"chief": ["a:1"], "worker": ["b:1", "c:1"], "evaluator": ["x:1"]}, "worker"
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_cluster_spec_and_tf_config_that_disagree(name: str) -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"], "workerpool3": ["e:1"]}
    spec = cluster_spec("workerpool1", 0, **pools)
    message = refusal({"CLUSTER_SPEC": spec, "TF_CONFIG": DISAGREEING[name]})
    assert "disagree" in message
    assert "CLUSTER_SPEC with task worker 0" in message
    assert "TF_CONFIG with task" in message
    assert '"b:1"' in message


def test_a_wrong_tf_config_beside_a_right_cluster_spec_is_an_error() -> None:
    spec = cluster_spec("workerpool0", 0, workerpool0=["a:1"])
    assert "TF_CONFIG" in refusal({"CLUSTER_SPEC": spec, "TF_CONFIG": "{"})


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("{", "JSON"),
        (cluster_spec("workerpool0", 0, workerpool0=["a:1", "b:1"]), "one address"),
        (cluster_spec("workerpool1", 0, workerpool0=["a:1"]), "task"),
        (cluster_spec("workerpool4", 0, workerpool0=["a:1"]), "task"),
        (cluster_spec("workerpool0", 1, workerpool0=["a:1"]), "index"),
        (cluster_spec("workerpool0", None, workerpool0=["a:1"]), "index"),
        (cluster_spec("workerpool0", 0, workerpool0=["a"]), "port"),
    ],
)
def test_a_wrong_cluster_spec_names_itself(spec: str, word: str) -> None:
    message = refusal({"CLUSTER_SPEC": spec})
    assert word in message
    assert "CLUSTER_SPEC" in message


# Precedence


def test_tfdist_cluster_goes_before_all_and_says_what_it_hides() -> None:
    environ = {
        "TFDIST_CLUSTER": tf_config({"worker": ["x:1", "y:1"]}, "worker", 1),
        "TF_CONFIG": "{not even JSON",
        "CLUSTER_SPEC": cluster_spec("workerpool0", 0, workerpool0=["a:1"]),
        "TPU_NAME": "t",
    }
    found = detect(environ)
    assert found.environment == "tfdist"
    assert found.addresses["worker"] == ("x:1", "y:1")
    assert "CLUSTER_SPEC and TF_CONFIG" in found.warnings[0]


SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
LEVELS = [
    ("tfdist", {"TFDIST_CLUSTER": tf_config(TWO, "worker")}),
    ("vertex", {"CLUSTER_SPEC": cluster_spec("workerpool1", 0, workerpool1=["a:1", "b:1"])}),
    ("tf_config", {"TF_CONFIG": tf_config(TWO, "worker")}),
    ("sagemaker", {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"}),
    ("tpu", {"TPU_NAME": "pod"}),
    ("slurm", SLURM),
    ("kubernetes", {"JOB_COMPLETION_INDEX": "0"}),
    ("local", {}),
]


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_precedence(level: int) -> None:
    environ: dict[str, str] = {}
    for _, variables in LEVELS[level:]:
        environ.update(variables)
    assert detect(environ).environment == LEVELS[level][0]
    assert detect(environ).source


def test_os_environ_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_CLUSTER", tf_config(TWO, "worker", 1))
    assert detect().task == Task("worker", 1)


# SageMaker


def test_sagemaker_hosts() -> None:
    hosts = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "4"}
    found = detect(hosts)
    assert found.task == Task("worker", 1)
    assert found.addresses["worker"] == ("algo-1:8890", "algo-2:8890")
    assert found.hosts == ("algo-1", "algo-2")
    assert found.accelerators == 4
    moved = detect({**hosts, "TFDIST_PORT_BASE": "5000"})
    assert moved.addresses["worker"][0] == "algo-1:5000"


def test_sagemaker_single_host() -> None:
    found = detect({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "0"})
    assert found.num_workers == 1
    assert found.is_chief


@pytest.mark.parametrize(
    ("hosts", "current", "word"),
    [
        ("algo-1", "algo-1", "SM_HOSTS"),
        ("[]", "algo-1", "SM_HOSTS"),
        ('"algo-1"', "algo-1", "SM_HOSTS"),
        ("[1]", "1", "SM_HOSTS"),
        ('["a","a"]', "a", "duplicate"),
        ('["a b"]', "a b", "host"),
        ('["a","b"]', "c", "SM_CURRENT_HOST"),
        ('["a","b"]', "", "SM_CURRENT_HOST"),
    ],
)
def test_wrong_sagemaker_variables(hosts: str, current: str, word: str) -> None:
    assert word in refusal({"SM_HOSTS": hosts, "SM_CURRENT_HOST": current})


# TPU


@pytest.mark.parametrize(
    ("environ", "tpu"),
    [
        ({"TPU_NAME": "my-tpu"}, "my-tpu"),
        ({"TPU_NAME": "local"}, "local"),
        ({"TPU_NAME": "LOCAL"}, "local"),
        ({"TPU_NAME": "grpc://10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
        ({"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
        ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, "local"),
        ({"TPU_WORKER_ID": "0"}, "local"),
        ({"TPU_NAME": "t", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://x:1"}, "t"),
    ],
)
def test_tpu_variables(environ: dict[str, str], tpu: str) -> None:
    found = detect(environ)
    assert (found.environment, found.tpu, found.num_workers) == ("tpu", tpu, 1)
    assert found.is_chief
    assert describe(environ)["strategy"] == "tpu"


@pytest.mark.parametrize("index", [0, 1, 3])
def test_hosts_of_a_named_tpu(index: int) -> None:
    environ = {
        "TPU_NAME": "pod",
        "TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3",
        "TPU_WORKER_ID": str(index),
    }
    found = detect(environ)
    assert found.task == Task("worker", index)
    assert found.num_workers == 4
    assert found.is_chief == (index == 0)
    report = describe(environ)
    assert (report["strategy"], report["cluster"]) == ("tpu", {})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, ["local", "a,b"]),
        (
            {"TPU_NAME": "local", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"},
            ["local", "a,b", "TPU_NAME"],
        ),
        (
            {"TPU_NAME": "t", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "2"},
            ["TPU_WORKER_ID", "index"],
        ),
        ({"TPU_NAME": "t", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "x"}, ["TPU_WORKER_ID"]),
        ({"TPU_NAME": "t", "TPU_WORKER_HOSTNAMES": "a,b"}, ["TPU_WORKER_ID"]),
        ({"TPU_WORKER_ID": "2"}, ["TPU_WORKER_HOSTNAMES"]),
    ],
)
def test_wrong_tpu_variables(environ: dict[str, str], words: list[str]) -> None:
    message = refusal(environ)
    for word in words:
        assert word in message


def test_a_tpu_beside_a_cluster_of_one_is_used() -> None:
    environ = {"TF_CONFIG": tf_config({"worker": ["a:1"]}, "worker"), "TPU_NAME": "t"}
    assert detect(environ).environment == "tf_config"
    assert describe(environ)["strategy"] == "tpu"


def test_a_tpu_beside_a_cluster_of_several_is_left_with_a_warning() -> None:
    report = describe({"TF_CONFIG": tf_config(TWO, "worker"), "TPU_NAME": "t"})
    assert report["strategy"] == "multi_worker"
    assert "TPU_NAME" in report["warnings"][0]


# Kubernetes

JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "TFDIST_NUM_WORKERS": "3",
    "TFDIST_SERVICE": "svc",
    "HOSTNAME": "train-1",
}


def test_indexed_job() -> None:
    found = detect(JOB)
    assert found.environment == "kubernetes"
    assert found.task == Task("worker", 1)
    assert found.addresses["worker"] == tuple(f"train-{i}.svc:2222" for i in range(3))
    assert found.hosts == ("train-0.svc", "train-1.svc", "train-2.svc")
    assert found.job_name == "train"


def test_job_name_and_port_may_be_told() -> None:
    found = detect({**JOB, "TFDIST_JOB_NAME": "other", "TFDIST_PORT_BASE": "3333"})
    assert found.addresses["worker"][2] == "other-2.svc:3333"


def test_jobset_names_the_service() -> None:
    environ = {
        "JOB_COMPLETION_INDEX": "0",
        "TFDIST_NUM_WORKERS": "2",
        "JOBSET_NAME": "mnist",
        "HOSTNAME": "mnist-workers-0-0",
    }
    assert detect(environ).addresses["worker"][1] == "mnist-workers-0-1.mnist:2222"


def test_hosts_may_be_listed() -> None:
    environ = {"JOB_COMPLETION_INDEX": "1", "TFDIST_WORKER_HOSTS": "a, b:3333, [::1], [::2]:1"}
    found = detect(environ)
    assert found.addresses["worker"] == ("a:2222", "b:3333", "[::1]:2222", "[::2]:1")


def test_the_first_pod_alone_trains_with_a_warning() -> None:
    found = detect({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "train-0"})
    assert (found.environment, found.num_workers, found.is_chief) == ("kubernetes", 1, True)
    assert "TFDIST_NUM_WORKERS" in found.warnings[0]


def test_independent_pods_may_be_asked_for() -> None:
    found = detect({"JOB_COMPLETION_INDEX": "5", "TFDIST_NUM_WORKERS": "1"})
    assert (found.num_workers, found.is_chief, found.warnings) == (1, True, ())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"TFDIST_NUM_WORKERS": ""}, "TFDIST_NUM_WORKERS"),
        ({"TFDIST_NUM_WORKERS": "0"}, "TFDIST_NUM_WORKERS"),
        ({"TFDIST_NUM_WORKERS": "two"}, "TFDIST_NUM_WORKERS"),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "index"),
        ({"JOB_COMPLETION_INDEX": "x"}, "index"),
        ({"TFDIST_SERVICE": ""}, "TFDIST_SERVICE"),
        ({"HOSTNAME": "laptop"}, "TFDIST_JOB_NAME"),
        ({"TFDIST_SERVICE": "a b"}, "TFDIST_SERVICE"),
        ({"TFDIST_PORT_BASE": "0"}, "TFDIST_PORT_BASE"),
        ({"TFDIST_PORT_BASE": "70000"}, "TFDIST_PORT_BASE"),
        ({"TFDIST_WORKER_HOSTS": "a,b"}, "TFDIST_WORKER_HOSTS"),
        ({"TFDIST_WORKER_HOSTS": "a,b,a"}, "duplicate"),
        ({"TFDIST_WORKER_HOSTS": "a,b,c:0"}, "port"),
    ],
)
def test_wrong_kubernetes_variables(changes: dict[str, str], word: str) -> None:
    assert word in refusal({**JOB, **changes})


# The room as a whole


def test_detection_imports_neither_tensorflow_nor_numpy() -> None:
    code = (
        "import sys; from tfdist.cluster import detect; detect({}); "
        "heavy = {'tensorflow', 'keras', 'numpy', 'absl', 'typer', 'pydantic'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr


def test_to_tf_config_reads_back_as_the_same_cluster() -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    found = read(tf_config(cluster, "worker", 1))
    again = read(found.to_tf_config())
    assert (again.addresses, again.task) == (found.addresses, found.task)
