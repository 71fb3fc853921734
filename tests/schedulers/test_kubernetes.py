"""JobSets, Jobs and TFJobs: valid by their schemas, and what each pod finds itself in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.schedulers.schemas import check_document
from tfdist.cluster import detect
from tfdist.errors import ConfigError
from tfdist.schedulers import kubernetes
from tfdist.schedulers import manifest
from tfdist.schedulers import plan as plans

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
DIGITS = str(ROOT / "configs" / "digits-multiworker.yaml")
FLIGHTS = str(ROOT / "configs" / "flights-ps.yaml")

SYNC = {"chief": {"count": 1}, "worker": {"count": 3}}
SERVERS = {"chief": {}, "worker": {"count": 2}, "ps": {"count": 2}, "evaluator": {}}
FULL = {
    "name": "full",
    "namespace": "team-a",
    "image": "registry.example.com:5000/team/tfdist@sha256:0123",
    "image_pull_policy": "Always",
    "image_pull_secrets": ["registry"],
    "service_account": "trainer",
    "roles": {
        "chief": {"cpus": 2},
        "worker": {"count": 2, "memory": "64Gi"},
        "evaluator": {"gpus": 1},
    },
    "cpus": 7.5,
    "memory": "16Gi",
    "gpus": 4,
    "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
    "tolerations": [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "a"},
    ],
    "volumes": [
        {"claim": "runs", "mount_path": "/workspace/runs", "sub_path": "full"},
        {"claim": "data", "mount_path": "/data", "read_only": True},
    ],
    "shared_memory": "2Gi",
    "fs_group": 10001,
    "env": {"NUMBER": "1e3", "WORD": "yes", "ODD": "a b'c\"d $(HOME) $$ é: #x\n-"},
    "labels": {"team": "a"},
    "annotations": {"example.com/why": "a long story, with blanks"},
    "priority_class": "high",
    "queue": "gpus",
    "max_restarts": 5,
    "grace_seconds": 300,
    "timeout_seconds": 86400,
    "keep_seconds": 3600,
}
TFJOB = "kubernetes.kind=tfjob"
CASES = {
    "sync": (DIGITS, {"image": "tfdist:1", "roles": SYNC}),
    "servers": (FLIGHTS, {"image": "tfdist:1", "roles": SERVERS}),
    "alone": (DIGITS, {"image": "tfdist:1"}),
    "full": (DIGITS, FULL),
}


def render(config: str, section: dict[str, Any], kind: str = "jobset") -> list[dict[str, Any]]:
    settings = {**section, "kind": kind}
    overrides = [f"kubernetes.{key}={json.dumps(value)}" for key, value in settings.items()]
    return kubernetes.render(*plans.load(config, "kubernetes", overrides))


def case(name: str, kind: str) -> list[dict[str, Any]]:
    config, section = CASES[name]
    if kind == "job":
        section = {key: value for key, value in section.items() if key != "queue"}
    return render(config, section, kind)


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the pods by their host names, with the service where there is one."""
    found = {}
    for document in documents:
        name = document["metadata"]["name"]
        if document["kind"] == "JobSet":
            subdomain = document["spec"]["network"]["subdomain"]
            for job in document["spec"]["replicatedJobs"]:
                spec = job["template"]["spec"]
                for index in range(spec["completions"]):
                    pod = f"{name}-{job['name']}-0-{index}.{subdomain}"
                    found[pod] = (spec["template"]["spec"], index)
        if document["kind"] == "Job":
            spec = document["spec"]
            pod_spec = spec["template"]["spec"]
            suffix = f".{pod_spec['subdomain']}" if "subdomain" in pod_spec else ""
            for index in range(spec["completions"]):
                found[f"{name}-{index}{suffix}"] = (pod_spec, index)
    return {
        host: {"container": spec["containers"][0], "environ": environment(spec, index)}
        for host, (spec, index) in found.items()
    }


def environment(spec: dict[str, Any], index: int) -> dict[str, str]:
    """Returns the variables of a pod, as the kubelet makes them: in order, $(NAME) replaced."""
    environ: dict[str, str] = {}
    for variable in spec["containers"][0]["env"]:
        if "value" in variable:
            environ[variable["name"]] = expand(variable["value"], environ)
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            environ[variable["name"]] = str(index)
    # The controller adds it last.
    return {**environ, "JOB_COMPLETION_INDEX": str(index)}


def expand(text: str, environ: dict[str, str]) -> str:
    """Replaces $(NAME) where it is known, and $$ by $, as Kubernetes does."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


@pytest.mark.parametrize("kind", ["jobset", "job", "tfjob"])
@pytest.mark.parametrize("name", CASES)
def test_every_document_is_valid_by_its_schema(name, kind):
    documents = case(name, kind)
    for document in documents:
        check_document(document)
    read = list(yaml.safe_load_all(manifest.text(documents, "yaml")))
    assert read == documents
    told = json.loads(manifest.text(documents, "json"))
    assert (told["items"] if told["kind"] == "List" else [told]) == documents


@pytest.mark.parametrize("kind", ["jobset", "job", "tfjob"])
@pytest.mark.parametrize("name", ["sync", "servers"])
def test_documents_are_those_that_were_looked_at(name, kind):
    path = GOLDEN / f"{name}-{kind}.yaml"
    assert manifest.text(case(name, kind)) == path.read_text(), f"look at {path} again"


@pytest.mark.parametrize("kind", ["jobset", "job"])
@pytest.mark.parametrize("name", ["sync", "servers", "full"])
def test_every_pod_is_found_where_the_others_look_for_it(name, kind):
    documents = case(name, kind)
    found = pods(documents)
    for host, pod in found.items():
        cluster = detect(pod["environ"])
        assert not cluster.warnings
        if cluster.is_evaluator:
            continue
        assert cluster.address(cluster.task) == f"{host}:2222"
        assert cluster.job_name == ""
        assert {
            address.rpartition(":")[0] for r in cluster.addresses.values() for address in r
        } == {other for other in found if "-evaluator-" not in other}
    if kind == "job":
        (service,) = (d for d in documents if d["kind"] == "Service")
        assert service["spec"]["clusterIP"] == "None"
        selector = service["spec"]["selector"].items()
        for document in documents:
            if document["kind"] == "Job":
                template = document["spec"]["template"]
                assert selector <= template["metadata"]["labels"].items()
                assert template["spec"]["subdomain"] == service["metadata"]["name"]


def test_roles_of_pods_and_their_strategies():
    found = pods(case("servers", "jobset"))
    clusters = {host: detect(pod["environ"]) for host, pod in found.items()}
    assert {str(cluster.task) for cluster in clusters.values()} == {
        "chief 0", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator 0",
    }  # fmt: skip
    assert [host for host, cluster in clusters.items() if cluster.is_chief] == [
        "flights-ps-chief-0-0.flights-ps"
    ]


@pytest.mark.parametrize("kind", ["jobset", "job", "tfjob"])
def test_words_and_variables_arrive_as_they_were_written(kind):
    odd = ["a b", "it's", '"q"', "$(HOME)", "$$", "$", "é\n", "", "yes", "1e3", "- x: {y}"]
    section = {**FULL, "args": odd, "name": "odd"}
    if kind == "job":
        del section["queue"]
    text = manifest.text(render(DIGITS, section, kind))
    documents = list(yaml.safe_load_all(text))
    containers = list(_containers(documents))
    assert len(containers) == 3
    for container in containers:
        environ = {v["name"]: expand(v["value"], {}) for v in container["env"] if "value" in v}
        assert [expand(word, environ) for word in container["args"]] == odd
        assert container["command"] == ["python", "-m", "trainer.task"]
        assert {name: environ[name] for name in FULL["env"]} == FULL["env"]


def _containers(value: Any) -> Any:
    if isinstance(value, dict):
        yield from value.get("containers", ())
        for below in value.values():
            yield from _containers(below)
    elif isinstance(value, list):
        for below in value:
            yield from _containers(below)


def test_the_config_travels_by_value():
    (document,) = render(DIGITS, {"image": "i"})
    (container,) = _containers(document)
    flag, value = container["args"]
    config = json.loads(expand(value, {}))
    assert flag == "--config"
    assert config["training"]["epochs"] == 12
    assert "kubernetes" not in config


def test_gpus_are_for_those_who_train():
    found = pods(render(FLIGHTS, {"image": "i", "roles": SERVERS, "gpus": 2, "cpus": 0.25}))
    gpus = {
        host.split("-")[2]: pod["container"]["resources"].get("limits", {}).get("nvidia.com/gpu")
        for host, pod in found.items()
    }
    assert gpus == {"chief": None, "worker": "2", "ps": None, "evaluator": None}
    assert pod_requests(found, "flights-ps-ps-0-0.flights-ps") == {"cpu": "250m"}
    synchronous = pods(render(DIGITS, {"image": "i", "roles": SYNC, "gpus": 2}))
    assert all(
        pod["container"]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        for pod in synchronous.values()
    )


def pod_requests(found: dict[str, dict[str, Any]], host: str) -> Any:
    return found[host]["container"]["resources"]["requests"]


def test_what_ends_and_what_restarts_a_set():
    (sync,) = case("sync", "jobset")
    jobs = {job["name"]: job["template"]["spec"] for job in sync["spec"]["replicatedJobs"]}
    assert sync["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief"]
    assert [job["backoffLimit"] for job in jobs.values()] == [0, 0]
    assert actions(jobs["worker"]) == {2: "FailJob", 143: "Ignore", "DisruptionTarget": "Ignore"}

    (servers,) = case("servers", "jobset")
    jobs = {job["name"]: job["template"]["spec"] for job in servers["spec"]["replicatedJobs"]}
    assert servers["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief", "evaluator"]
    limits = {name: job["backoffLimit"] for name, job in jobs.items()}
    assert limits == {"chief": 0, "worker": 6, "ps": 0, "evaluator": 3}
    assert actions(jobs["worker"])[143] == "Ignore"
    # The servers end with their coordinator: all start again, which is no failure.
    assert actions(jobs["chief"])[143] == actions(jobs["ps"])["DisruptionTarget"] == "FailJob"
    first = servers["spec"]["failurePolicy"]["rules"][0]
    assert first["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (pattern,) = first["onJobFailureMessagePatterns"]
    told = (
        "Container trainer for pod a/b failed with exit code {} matching FailJob rule at index {}"
    )
    assert re.search(pattern, told.format(143, 1))
    assert not re.search(pattern, told.format(2, 0))


def actions(job: dict[str, Any]) -> dict[Any, str]:
    found: dict[Any, str] = {}
    for rule in job["podFailurePolicy"]["rules"]:
        for code in rule.get("onExitCodes", {}).get("values", ()):
            found[code] = rule["action"]
        for condition in rule.get("onPodConditions", ()):
            found[condition["type"]] = rule["action"]
    return found


def test_a_tfjob_has_the_operators_names():
    (job,) = case("servers", "tfjob")
    specs = job["spec"]["tfReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in specs.items()} == {
        "Chief": 1, "Worker": 2, "PS": 2, "Evaluator": 1,
    }  # fmt: skip
    assert {role: spec["restartPolicy"] for role, spec in specs.items()} == {
        "Chief": "ExitCode", "Worker": "Always", "PS": "Always", "Evaluator": "ExitCode",
    }  # fmt: skip
    # Servers and workers that always start again must be stopped when the chief has ended.
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    overrides = [f"kubernetes.{key}={json.dumps(value)}" for key, value in FULL.items()]
    (synchronous,) = kubernetes.render(*plans.load(DIGITS, "kubernetes", [*overrides, TFJOB]))
    assert synchronous["spec"]["runPolicy"]["cleanPodPolicy"] == "None"
    for container in _containers(job):
        assert container["name"] == "tensorflow"
        assert container["ports"] == [{"name": "tfjob-port", "containerPort": 2222}]
        assert "TF_CONFIG" not in [variable["name"] for variable in container["env"]]


def test_roles_image_and_gpus_are_taken_from_vertex_where_nothing_else_is_said(tmp_path):
    path = tmp_path / "my_job.v2.yaml"
    path.write_text(
        "experiment: {name: digits}\n"
        "vertex:\n"
        "  project: p\n  region: us-central1\n  image: from-vertex\n"
        "  pools:\n"
        "    chief: {machine_type: g2-standard-12, accelerator: {type: NVIDIA_L4}}\n"
        "    worker:\n"
        "      machine_type: g2-standard-12\n"
        "      replicas: 2\n"
        "      accelerator: {type: NVIDIA_L4, count: 1}\n"
    )
    (document,) = kubernetes.render(*plans.load(str(path), "kubernetes"))
    assert document["metadata"]["name"] == "my-job-v2"
    found = pods([document])
    assert len(found) == 3
    for pod in found.values():
        assert pod["container"]["image"] == "from-vertex"
        assert pod["container"]["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_results_that_would_be_lost_are_told():
    def warned(**section: Any) -> tuple[str, ...]:
        overrides = [f"kubernetes.{key}={json.dumps(value)}" for key, value in section.items()]
        return kubernetes.warnings(*plans.load(DIGITS, "kubernetes", overrides))

    assert "/workspace/runs/digits-multiworker" in warned(image="i")[0]
    assert not warned(image="i", volumes=[{"claim": "c", "mount_path": "/workspace/runs/"}])
    assert warned(image="i", volumes=[{"claim": "c", "mount_path": "/workspace/ru"}])
    bucket = ["kubernetes.image=i", "output.directory=gs://bucket/run"]
    assert not kubernetes.warnings(*plans.load(DIGITS, "kubernetes", bucket))
    here = [*bucket, "output.log_dir=logs"]
    assert "/workspace/logs" in kubernetes.warnings(*plans.load(DIGITS, "kubernetes", here))[0]
    assert warned(
        image="i", volumes=[{"claim": "c", "mount_path": "/workspace", "read_only": True}]
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, ["kubernetes.image", "none"]),
        ({"image": "a b"}, ["kubernetes.image", "blanks"]),
        ({"name": "Digits"}, ["kubernetes.name", "'Digits'"]),
        ({"name": "1digits"}, ["kubernetes.name", "letter first"]),
        ({"name": "a" * 64}, ["kubernetes.name", "63"]),
        ({"name": "a" * 50}, ["pods", "shorter by 3"]),
        ({"namespace": "a.b"}, ["kubernetes.namespace"]),
        ({"service_account": "A"}, ["service_account"]),
        ({"labels": {"a": "b" * 64}}, ["kubernetes.labels", "63"]),
        ({"labels": {"a/b/c": "d"}}, ["kubernetes.labels", "a/b"]),
        ({"labels": {"a b": "d"}}, ["kubernetes.labels", "a b"]),
        ({"annotations": {"a b": "d"}}, ["kubernetes.annotations", "a b"]),
        ({"memory": "16"}, ["memory of chief", "'16'"]),
        ({"memory": "16GB"}, ["memory of chief", "'16GB'"]),
        ({"cpus": 0}, ["cpus", "above 0"]),
        ({"gpus": -1}, ["gpus", "-1"]),
        ({"shared_memory": "x"}, ["shared_memory"]),
        ({"volumes": [{"claim": "c", "mount_path": "runs"}]}, ["absolute", "'runs'"]),
        (
            {"volumes": [{"claim": "c", "mount_path": "/a"}, {"claim": "d", "mount_path": "/a/"}]},
            ["its own", "/a/"],
        ),
        ({"volumes": [{"claim": "c", "mount_path": "/a", "sub_path": "../b"}]}, ["sub_path"]),
        ({"tolerations": [{"operator": "Equal"}]}, ["toleration", "key"]),
        ({"port": 0}, ["kubernetes.port", "65535"]),
        ({"kind": "tfjob", "port": 3333}, ["2222"]),
        ({"grace_seconds": 0}, ["grace_seconds"]),
        ({"max_restarts": -1}, ["max_restarts"]),
        ({"env": {"TF_CONFIG": "{}"}}, ["TF_CONFIG"]),
        ({"env": {"a-b": "c"}}, ["'a-b'"]),
        ({"command": []}, ["kubernetes.command"]),
        ({"queue": "q", "kind": "job", "roles": SYNC}, ["Kueue", "--kind jobset"]),
        ({"roles": {"chief": {"count": 2}}}, ["one chief", "chief 2"]),
        ({"roles": {"worker": {"count": 0}}}, ["worker.count", "0"]),
        ({"roles": {"worker": {}, "ps": {}}}, ["chief beside parameter servers"]),
        ({"roles": {"chief": {}, "ps": {}}}, ["worker beside parameter servers"]),
        ({"roles": {"evaluator": {}}}, ["chief or workers"]),
        ({"kind": "pod"}, ["kubernetes.kind"]),
        ({"imag": "x"}, ["kubernetes.imag", "image"]),
    ],
)  # fmt: skip
def test_what_kubernetes_would_refuse_is_refused_here(section, words):
    given = section if not section or "image" in section else {"image": "i", **section}
    with pytest.raises(ConfigError) as caught:
        render(DIGITS, given, given.get("kind", "jobset"))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "roles", "word"),
    [
        ("multi_worker", SERVERS, "parameter"),
        ("parameter_server", SYNC, "parameter"),
        ("mirrored", SYNC, "mirrored"),
        ("mirorred", SYNC, "mirrored"),
    ],
)
def test_a_strategy_that_would_wait_for_ever_is_refused(strategy, roles, word):
    with pytest.raises(ConfigError) as caught:
        kubernetes.render(
            *plans.load(
                DIGITS,
                "kubernetes",
                [
                    f"strategy.name={strategy}",
                    "kubernetes.image=i",
                    f"kubernetes.roles={json.dumps(roles)}",
                ],
            )
        )
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("jobset", ("spec", "failurePolicy", "maxRestart"), 1),
        ("jobset", ("spec", "replicatedJobs", 0, "template", "spec", "completion"), 1),
        ("jobset", ("spec", "replicatedJobs", 0, "replicas"), "1"),
        ("job", ("spec", "podFailurePolicy", "rule"), []),
        ("job", ("spec", "template", "spec", "containers", 0, "arg"), []),
        ("tfjob", ("spec", "runPolicy", "backofLimit"), 1),
        ("tfjob", ("spec", "tfReplicaSpecs", "Chief", "replicas"), 2),
        ("tfjob", ("spec", "tfReplicaSpecs", "Chief", "template", "spec", "container"), []),
    ],
)
def test_the_schemas_see_a_mistake(kind, path, value):
    document = next(d for d in case("sync", kind) if d["kind"] != "Service")
    check_document(document)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(Exception):  # noqa: B017 of three packages
        check_document(document)
