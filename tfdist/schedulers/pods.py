"""The pod template of one role, the same for every kind of job on Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdist.schedulers.plan import Plan
from tfdist.schedulers.plan import RolePlan
from tfdist.schedulers.sections import Kubernetes

#: Label by which the pods of a job are found.
INSTANCE = "app.kubernetes.io/instance"
_QUEUE = "kueue.x-k8s.io/queue-name"


def labels(name: str, section: Kubernetes, role: str | None = None) -> dict[str, str]:
    """Returns the labels of a job, or of the pods of one of its roles."""
    found = {**section.labels, "app.kubernetes.io/name": "tfdist", INSTANCE: name}
    if role is not None:
        found["app.kubernetes.io/component"] = role
    elif section.queue:
        found[_QUEUE] = section.queue
    return found


def metadata(name: str, section: Kubernetes) -> dict[str, Any]:
    """Returns the metadata of a job."""
    made: dict[str, Any] = {"name": name}
    if section.namespace:
        made["namespace"] = section.namespace
    made["labels"] = labels(name, section)
    if section.annotations:
        made["annotations"] = dict(section.annotations)
    return made


def template(
    name: str,
    plan: Plan,
    section: Kubernetes,
    task: RolePlan,
    *,
    container: str,
    port_name: str,
    variables: Sequence[Mapping[str, Any]] = (),
    restart_policy: str | None = "Never",
    subdomain: str | None = None,
) -> dict[str, Any]:
    """Returns the pod template of one role.

    Args:
        name: Name of the job.
        plan: The job.
        section: What Kubernetes has to know.
        task: The role.
        container: Name of the container.
        port_name: Name of its port.
        variables: Environment variables before those of the config.
        restart_policy: Of the pod; None leaves it out.
        subdomain: Headless service that gives the pods their names, or None.
    """
    meta: dict[str, Any] = {"labels": labels(name, section, task.role)}
    if section.annotations:
        meta["annotations"] = dict(section.annotations)
    spec: dict[str, Any] = {}
    if restart_policy:
        spec["restartPolicy"] = restart_policy
    if subdomain:
        spec["subdomain"] = subdomain
    spec["terminationGracePeriodSeconds"] = section.grace_seconds
    if section.service_account:
        spec["serviceAccountName"] = section.service_account
    if section.priority_class:
        spec["priorityClassName"] = section.priority_class
    if section.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in section.image_pull_secrets]
    if section.node_selector:
        spec["nodeSelector"] = dict(section.node_selector)
    if section.tolerations:
        spec["tolerations"] = [_toleration(each) for each in section.tolerations]
    if section.fs_group is not None:
        spec["securityContext"] = {"fsGroup": section.fs_group}
    spec["containers"] = [_container(plan, section, task, container, port_name, variables)]
    volumes = _volumes(section)
    if volumes:
        spec["volumes"] = volumes
    return {"metadata": meta, "spec": spec}


def literal(text: str) -> str:
    """Returns a text that Kubernetes leaves as it is: it replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$")


def _container(
    plan: Plan,
    section: Kubernetes,
    task: RolePlan,
    name: str,
    port_name: str,
    variables: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    assert plan.image
    words = [literal(word) for word in plan.command]
    own = {"TFDIST_RENDEZVOUS_TIMEOUT": str(section.start_seconds), "PYTHONUNBUFFERED": "1"}
    env = {**own, **plan.env}
    made: dict[str, Any] = {"name": name, "image": plan.image}
    if section.image_pull_policy:
        made["imagePullPolicy"] = section.image_pull_policy
    made["command"] = words[: len(section.command)]
    made["args"] = words[len(section.command) :]
    made["env"] = [
        *variables,
        *({"name": key, "value": literal(value)} for key, value in env.items()),
    ]
    made["ports"] = [{"name": port_name, "containerPort": section.port}]
    resources = _resources(section, task)
    if resources:
        made["resources"] = resources
    mounts = _mounts(section)
    if mounts:
        made["volumeMounts"] = mounts
    return made


def _resources(section: Kubernetes, task: RolePlan) -> dict[str, Any]:
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if task.cpus is not None:
        thousandths = round(task.cpus * 1000)
        whole = thousandths % 1000 == 0
        requests["cpu"] = str(thousandths // 1000) if whole else f"{thousandths}m"
    if task.memory is not None:
        requests["memory"] = limits["memory"] = task.memory
    if task.gpus:
        requests[section.gpu_resource] = limits[section.gpu_resource] = str(task.gpus)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _toleration(toleration: Any) -> dict[str, str]:
    made = {}
    for field in ("key", "operator", "value", "effect"):
        value = getattr(toleration, field)
        if value is not None:
            made[field] = value
    return made


def _volumes(section: Kubernetes) -> list[dict[str, Any]]:
    claims = list(dict.fromkeys(volume.claim for volume in section.volumes))
    found: list[dict[str, Any]] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    if section.shared_memory:
        memory = {"medium": "Memory", "sizeLimit": section.shared_memory}
        found.append({"name": "shared-memory", "emptyDir": memory})
    return found


def _mounts(section: Kubernetes) -> list[dict[str, Any]]:
    claims = list(dict.fromkeys(volume.claim for volume in section.volumes))
    found = []
    for volume in section.volumes:
        mount: dict[str, Any] = {
            "name": f"volume-{claims.index(volume.claim)}",
            "mountPath": volume.mount_path,
        }
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        found.append(mount)
    if section.shared_memory:
        found.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    return found
