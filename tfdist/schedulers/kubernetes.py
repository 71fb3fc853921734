"""A job on Kubernetes: a JobSet, indexed Jobs with a headless service, or a TFJob of Kubeflow.

    plan, section = plan.load("configs/flights-kubernetes.yaml", "kubernetes")
    documents = render(plan, section)
    print(tfdist.schedulers.manifest.text(documents, "yaml"))

Every pod of a JobSet or an indexed Job gets a `TF_CONFIG`: all of it is known when the job is
written but the index of the pod, which Kubernetes puts in the place of `$(TFDIST_TASK_INDEX)`. The
operator of TFJobs sets `TF_CONFIG` itself.

What a task's exit code does (docs/kubernetes.md has it in full):

| code | JobSet | Jobs | TFJob |
|---|---|---|---|
| 0 | the chief's end, and the evaluator's, is the end | each role by itself | as JobSet |
| 2, a mistake in the configuration | fails at once | that Job fails at once | fails at once |
| 143, preempted and saved | the pod starts again, any number of times | the same | the same |
| others | all start again, `max_restarts` times | the pod | fails below 128 |

Pods that do not need each other start again alone: evaluators, and workers of parameter servers.
When the coordinator of parameter servers is preempted, its servers and workers end with 0. A
JobSet starts all of them; in a TFJob they have the restart policy Always; Jobs leave them ended.

Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/,
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/,
https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any

from tfdist.cluster.topology import CHIEF
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import PS
from tfdist.cluster.topology import WORKER
from tfdist.errors import EXIT_PREEMPTED
from tfdist.errors import EXIT_USAGE
from tfdist.errors import ConfigError
from tfdist.schedulers import names
from tfdist.schedulers import pods
from tfdist.schedulers.plan import Plan
from tfdist.schedulers.plan import RolePlan
from tfdist.schedulers.sections import Kubernetes

#: Where `Dockerfile` has its image work, so that relative directories are below it.
_IMAGE_DIRECTORY = "/workspace"
_CONTAINER = "trainer"
_INDEX = "TFDIST_TASK_INDEX"
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_TFJOB_ROLES = {CHIEF: "Chief", WORKER: "Worker", PS: "PS", EVALUATOR: "Evaluator"}
#: Kubernetes adds so many characters to the name of a Job for that of a pod.
_SUFFIX = "-xxxxx"


def render(plan: Plan, section: Kubernetes) -> list[dict[str, Any]]:
    """Returns the documents that make the job, to apply in their order.

    Args:
        plan: The job.
        section: What Kubernetes has to know; its `kind` says what to make.

    Raises:
        ConfigError: Kubernetes would refuse it, or it would do something else than was meant.
    """
    name = section.name or names.dns_form(plan.name)
    _check(name, plan, section)
    if section.kind == "tfjob":
        return [_tfjob(name, plan, section)]
    if section.kind == "job":
        service = [_service(name, section)] if plan.size > 1 else []
        return [*service, *(_job(name, plan, section, task) for task in plan.tasks)]
    return [_jobset(name, plan, section)]


def warnings(plan: Plan, section: Kubernetes) -> tuple[str, ...]:
    """Returns what looks wrong without being an error, one sentence each."""
    found = []
    mounts = [volume.mount_path for volume in section.volumes if not volume.read_only]
    for output in plan.outputs:
        if "://" in output:
            continue
        place = posixpath.join(_IMAGE_DIRECTORY, output)
        if not any(posixpath.commonpath([place, mount]) == mount.rstrip("/") for mount in mounts):
            found.append(
                f"results go to {place} in the container, on no volume: they, and saved state, "
                "are lost with the pod. Mount a volume there or name a bucket (gs://...)."
            )
    if section.kind == "job" and plan.has_parameter_servers:
        found.append(
            "Jobs know nothing of each other: when the chief is preempted, servers and workers end "
            "and nobody starts them again. A JobSet (--kind jobset) does."
        )
    if section.kind == "tfjob" and plan.has_parameter_servers and EVALUATOR in plan.roles:
        found.append(
            "A TFJob with parameter servers stops its evaluator with the chief, perhaps before "
            "the last checkpoint is evaluated. A JobSet (--kind jobset) waits for it."
        )
    return tuple(found)


def _jobset(name: str, plan: Plan, section: Kubernetes) -> dict[str, Any]:
    ends_with = [plan.main_role, *([EVALUATOR] if EVALUATOR in plan.roles else [])]
    spec: dict[str, Any] = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": name,
            "publishNotReadyAddresses": True,
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ends_with},
        "failurePolicy": {"maxRestarts": plan.restarts, "rules": _set_rules(plan)},
    }
    if section.keep_seconds is not None:
        spec["ttlSecondsAfterFinished"] = section.keep_seconds
    spec["replicatedJobs"] = [
        {
            "name": task.role,
            "replicas": 1,
            "template": {
                "metadata": {"labels": pods.labels(name, section, task.role)},
                "spec": _job_spec(name, plan, section, task),
            },
        }
        for task in plan.tasks
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(name, section),
        "spec": spec,
    }


def _set_rules(plan: Plan) -> list[dict[str, Any]]:
    """Returns what a JobSet does where the rules of `_pod_rules` have failed one of its Jobs."""
    reason = ["PodFailurePolicy"]
    rules: list[dict[str, Any]] = []
    if plan.has_parameter_servers:
        rules.append(
            {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": reason,
                "onJobFailureMessagePatterns": ["rule at index [12]$"],
            }
        )
    rules.append({"name": "configuration", "action": "FailJobSet", "onJobFailureReasons": reason})
    return rules


def _service(name: str, section: Kubernetes) -> dict[str, Any]:
    """Returns the headless service that gives pods their names, before they are ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(name, section),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {pods.INSTANCE: name},
            "ports": [{"name": "tfdist", "port": section.port, "targetPort": section.port}],
        },
    }


def _job(name: str, plan: Plan, section: Kubernetes, task: RolePlan) -> dict[str, Any]:
    spec = _job_spec(name, plan, section, task)
    if section.keep_seconds is not None:
        spec["ttlSecondsAfterFinished"] = section.keep_seconds
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**pods.metadata(name, section), "name": f"{name}-{task.role}"},
        "spec": spec,
    }


def _job_spec(name: str, plan: Plan, section: Kubernetes, task: RolePlan) -> dict[str, Any]:
    in_set = section.kind == "jobset"
    # Where tasks need each other, the set starts all of them again; where they do not, the pod.
    alone = task.role == EVALUATOR or (task.role == WORKER and plan.has_parameter_servers)
    # The others end with such a coordinator and are not started again one by one.
    all_again = in_set and plan.has_parameter_servers and not alone
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": task.count,
        "parallelism": task.count,
        "backoffLimit": 0 if in_set and not alone else plan.restarts * task.count,
        "podFailurePolicy": {"rules": _pod_rules(all_again)},
    }
    if section.timeout_seconds is not None:
        spec["activeDeadlineSeconds"] = section.timeout_seconds
    spec["template"] = pods.template(
        name,
        plan,
        section,
        task,
        container=_CONTAINER,
        port_name="tfdist",
        variables=_tf_config(name, plan, section, task),
        # A JobSet sets it itself.
        subdomain=name if plan.size > 1 and not in_set else None,
    )
    return spec


def _pod_rules(all_again: bool) -> list[dict[str, Any]]:
    action = "FailJob" if all_again else "Ignore"
    evicted = {"type": "DisruptionTarget", "status": "True"}
    return [
        _on_exit_code("FailJob", EXIT_USAGE),
        _on_exit_code(action, EXIT_PREEMPTED),
        {"action": action, "onPodConditions": [evicted]},
    ]


def _on_exit_code(action: str, code: int) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [code]},
    }


def _tf_config(
    name: str, plan: Plan, section: Kubernetes, task: RolePlan
) -> tuple[dict[str, Any], ...]:
    """Returns `TF_CONFIG` of a pod, whose index Kubernetes puts in when it starts."""
    infix = "-0" if section.kind == "jobset" else ""  # The number of the Job in its set.
    cluster = {
        other.role: [
            f"{name}-{other.role}{infix}-{index}.{name}:{section.port}"
            for index in range(other.count)
        ]
        for other in plan.tasks
        if other.role != EVALUATOR
    }
    head = f'{{"cluster": {json.dumps(cluster)}, "task": {{"type": "{task.role}", '
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX_ANNOTATION}']"}}
    return (
        # Before what refers to it: only earlier variables are known.
        {"name": _INDEX, "valueFrom": field},
        {"name": "TF_CONFIG", "value": f'{head}"index": $({_INDEX})}}}}'},
    )


def _tfjob(name: str, plan: Plan, section: Kubernetes) -> dict[str, Any]:
    # An evaluator has the last checkpoint before it when the chief ends. Servers and their workers
    # would wait for another chief for ever.
    leave = EVALUATOR in plan.roles and not plan.has_parameter_servers
    policy: dict[str, Any] = {
        "cleanPodPolicy": "None" if leave else "Running",
        "backoffLimit": plan.restarts * plan.size,
    }
    if section.timeout_seconds is not None:
        policy["activeDeadlineSeconds"] = section.timeout_seconds
    if section.keep_seconds is not None:
        policy["ttlSecondsAfterFinished"] = section.keep_seconds
    replicas = {
        _TFJOB_ROLES[task.role]: {
            "replicas": task.count,
            "restartPolicy": _restart_policy(plan, section, task),
            "template": pods.template(
                name,
                plan,
                section,
                task,
                container="tensorflow",  # The operator looks for this name.
                port_name="tfjob-port",
                restart_policy=None,  # The operator sets it.
            ),
        }
        for task in plan.tasks
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": pods.metadata(name, section),
        "spec": {"runPolicy": policy, "tfReplicaSpecs": replicas},
    }


def _restart_policy(plan: Plan, section: Kubernetes, task: RolePlan) -> str:
    serves = plan.has_parameter_servers and task.role in (PS, WORKER)
    return "Always" if serves else section.restart_policy


def _check(name: str, plan: Plan, section: Kubernetes) -> None:
    if not plan.image:
        raise ConfigError(
            "a container image in kubernetes.image", "none", "--set kubernetes.image=IMAGE"
        )
    if re.search(r"\s", plan.image):
        raise ConfigError("kubernetes.image without blanks", repr(plan.image), "correct it")
    names.check_label(name, "kubernetes.name")
    for task in plan.tasks:
        infix = "-0" if section.kind == "jobset" else ""
        longest = f"{name}-{task.role}{infix}-{task.count - 1}{_SUFFIX}"
        if len(longest) > names.LONGEST:
            raise ConfigError(
                f"names of pods of at most {names.LONGEST} characters",
                f"{longest} ({len(longest)})",
                f"choose a kubernetes.name shorter by {len(longest) - names.LONGEST}",
            )
        names.check_bytes(task.memory, f"memory of {task.role}")
    if section.namespace:
        names.check_label(section.namespace, "kubernetes.namespace")
    names.check_subdomain(section.service_account, "kubernetes.service_account")
    names.check_subdomain(section.priority_class, "kubernetes.priority_class")
    for secret in section.image_pull_secrets:
        names.check_subdomain(secret, "kubernetes.image_pull_secrets")
    names.check_labels(section.labels, "kubernetes.labels")
    names.check_labels(section.node_selector, "kubernetes.node_selector")
    names.check_labels(section.annotations, "kubernetes.annotations", values=False)
    names.check_labels({section.gpu_resource: ""}, "kubernetes.gpu_resource")
    names.check_bytes(section.shared_memory, "kubernetes.shared_memory")
    if section.queue is not None:
        names.check_subdomain(section.queue, "kubernetes.queue")
        if section.kind == "job" and len(plan.tasks) > 1:
            raise ConfigError(
                "kind jobset or tfjob with kubernetes.queue: Kueue would admit each Job alone",
                "kind job",
                "--kind jobset",
            )
    _check_numbers(section)
    _check_volumes(section)
    for toleration in section.tolerations:
        if toleration.operator == "Equal" and not toleration.key:
            raise ConfigError(
                "a key in a toleration of operator Equal", repr(toleration), "add the key"
            )
        if toleration.operator == "Exists" and toleration.value:
            raise ConfigError(
                "no value in a toleration of operator Exists", repr(toleration), "operator: Equal"
            )


def _check_numbers(section: Kubernetes) -> None:
    for field, least, most in (
        ("port", 1, 65535),
        ("grace_seconds", 1, None),
        ("timeout_seconds", 1, None),
        ("keep_seconds", 0, None),
        ("start_seconds", 1, None),
        ("fs_group", 0, None),
    ):
        value = getattr(section, field)
        if value is not None and not (least <= value and (most is None or value <= most)):
            limits = f"{least} or more" if most is None else f"between {least} and {most}"
            raise ConfigError(f"kubernetes.{field} to be {limits}", f"{value}", "correct it")
    if section.kind == "tfjob" and section.port != 2222:
        raise ConfigError(
            "kubernetes.port 2222 for a TFJob, whose operator writes TF_CONFIG with it",
            f"{section.port}",
            "leave kubernetes.port out",
        )


def _check_volumes(section: Kubernetes) -> None:
    seen = {"/dev/shm"} if section.shared_memory else set()
    for volume in section.volumes:
        names.check_subdomain(volume.claim, "kubernetes.volumes.claim")
        path = volume.mount_path
        if not path.startswith("/") or ":" in path or path.rstrip("/") in ("", *seen):
            raise ConfigError(
                "an absolute mount_path of its own for each of kubernetes.volumes",
                repr(path),
                "correct it",
            )
        seen.add(path.rstrip("/"))
        if volume.sub_path and (
            volume.sub_path.startswith("/") or ".." in volume.sub_path.split("/")
        ):
            raise ConfigError(
                "sub_path relative to the volume, without ..", repr(volume.sub_path), "correct it"
            )
