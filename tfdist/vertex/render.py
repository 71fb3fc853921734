"""A custom job as the service takes it: the JSON of `CustomJob`, by the names of its REST API.

    body = render(spec)
    body["jobSpec"]["workerPoolSpecs"][0]["replicaCount"]     # 1, the primary

Worker pools have positions: 0 the chief, 1 workers, 2 parameter servers or a Reduction Server, 3
evaluators. A pool that is not used and stands before one that is used is an empty object.

Source: https://cloud.google.com/vertex-ai/docs/training/distributed-training and the reference of
projects.locations.customJobs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdist.vertex.duration import seconds
from tfdist.vertex.facts import facts
from tfdist.vertex.spec import POOL_INDEX
from tfdist.vertex.spec import REDUCTION_SERVER
from tfdist.vertex.spec import JobSpec
from tfdist.vertex.spec import Pool
from tfdist.vertex.spec import Reservation

FORMATS = ("json", "yaml", "gcloud")

_STRATEGIES = {"standard": "STANDARD", "spot": "SPOT", "flex_start": "FLEX_START"}
_RESERVATIONS = {
    "any": "ANY_RESERVATION",
    "specific": "SPECIFIC_RESERVATION",
    "none": "NO_RESERVATION",
}
_RESERVATION_KEY = "compute.googleapis.com/reservation-name"


def render(spec: JobSpec) -> dict[str, Any]:
    """Returns the body of the request that creates the job.

    Args:
        spec: The job.

    Returns:
        A `CustomJob` in JSON as protobuf reads it.

    Raises:
        JobError: The job breaks a rule of the service.
    """
    from tfdist.vertex.checks import check

    check(spec)
    return body(spec)


def body(spec: JobSpec) -> dict[str, Any]:
    """Returns what `render` does, of a job that is checked already."""
    job: dict[str, Any] = {"workerPoolSpecs": pools(spec), "scheduling": scheduling(spec)}
    if spec.service_account:
        job["serviceAccount"] = spec.service_account
    if spec.network:
        job["network"] = spec.network
    if spec.reserved_ip_ranges:
        job["reservedIpRanges"] = list(spec.reserved_ip_ranges)
    if spec.network_attachment:
        job["pscInterfaceConfig"] = {"networkAttachment": spec.network_attachment}
    if spec.base_output_directory:
        job["baseOutputDirectory"] = {"outputUriPrefix": spec.base_output_directory}
    if spec.tensorboard:
        job["tensorboard"] = spec.tensorboard
    if spec.enable_web_access:
        job["enableWebAccess"] = True
    if spec.persistent_resource:
        job["persistentResourceId"] = spec.persistent_resource
    made: dict[str, Any] = {"displayName": spec.display_name, "jobSpec": job}
    if spec.labels:
        made["labels"] = dict(spec.labels)
    if spec.encryption_key:
        made["encryptionSpec"] = {"kmsKeyName": spec.encryption_key}
    return made


def text(spec: JobSpec, form: str = "json") -> str:
    """Returns the job in a format of `FORMATS`, with a line end.

    Args:
        spec: The job.
        form: "json" or "yaml" for the REST API; "gcloud" for the file of
            `gcloud ai custom-jobs create --config FILE`, which holds `jobSpec` alone: name, labels
            and encryption key are flags of that command, shown in its first lines.

    Raises:
        JobError: The job breaks a rule of the service.
    """
    made = render(spec)
    if form == "json":
        return json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    import yaml

    def dumped(value: object) -> str:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1_000_000)

    if form == "yaml":
        return dumped(made)
    # A name may hold line ends, and they must not end the comment.
    comment = "\n# ".join(gcloud(spec).splitlines())
    return f"# {comment}\n{dumped(made['jobSpec'])}"


def gcloud(spec: JobSpec, path: str = "FILE") -> str:
    """Returns the command that creates the job from the file of the format "gcloud"."""
    import shlex

    words = ["gcloud", "ai", "custom-jobs", "create", f"--project={spec.project}"]
    words += [f"--region={spec.region}", f"--display-name={spec.display_name}", f"--config={path}"]
    if spec.labels:
        labels = ",".join(f"{key}={value}" for key, value in spec.labels.items())
        words.append(f"--labels={labels}")
    if spec.encryption_key:
        words.append(f"--kms-key={spec.encryption_key}")
    return shlex.join(words)


def pools(spec: JobSpec) -> list[dict[str, Any]]:
    """Returns `workerPoolSpecs`, up to the last pool that is used."""
    made: list[dict[str, Any]] = [{} for _ in range(max(POOL_INDEX.values()) + 1)]
    for role, pool in spec.pools:
        made[POOL_INDEX[role]] = _pool(spec, role, pool)
    while not made[-1]:
        made.pop()
    return made


def _pool(spec: JobSpec, role: str, pool: Pool) -> dict[str, Any]:
    made: dict[str, Any] = {"machineSpec": _machine(spec, pool), "replicaCount": pool.replicas}
    made["diskSpec"] = {"bootDiskType": disk_type(pool), "bootDiskSizeGb": pool.disk.size_gb}
    if role == REDUCTION_SERVER:
        # It takes no arguments, and variables of the trainer mean nothing to it.
        made["containerSpec"] = {"imageUri": image(spec, role)}
    elif spec.code == "package":
        made["pythonPackageSpec"] = _package(spec)
    else:
        container: dict[str, Any] = {"imageUri": image(spec, role)}
        if spec.command:
            container["command"] = list(spec.command)
        made["containerSpec"] = {**container, **_program(spec)}
    return made


def image(spec: JobSpec, role: str) -> str:
    """Returns the image that a role runs."""
    if role != REDUCTION_SERVER:
        return spec.image
    pool = spec.pools.reduction_server
    return (pool.image if pool else None) or facts().reduction_server_image(spec.region)


def disk_type(pool: Pool) -> str:
    """Returns the type of the boot disk: as given, or what the machine takes."""
    machine = facts().machine(pool.machine_type)
    return pool.disk.type or (machine.default_disk if machine else "pd-ssd")


def _package(spec: JobSpec) -> dict[str, Any]:
    package = {
        "executorImageUri": spec.image,
        "packageUris": [package_uri(spec)],
        "pythonModule": spec.module,
    }
    return {**package, **_program(spec)}


def package_uri(spec: JobSpec) -> str:
    """Returns where the source distribution is, or where `submit` would put it."""
    return spec.package_uri or f"{(spec.staging_bucket or '').rstrip('/')}/tfdist/trainer.tar.gz"


def _program(spec: JobSpec) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if spec.args:
        made["args"] = list(spec.args)
    if spec.env:
        made["env"] = [{"name": name, "value": value} for name, value in spec.env.items()]
    return made


def _machine(spec: JobSpec, pool: Pool) -> dict[str, Any]:
    made: dict[str, Any] = {"machineType": pool.machine_type}
    if pool.accelerator:
        made["acceleratorType"] = pool.accelerator.type
        made["acceleratorCount"] = pool.accelerator.count
    if pool.tpu_topology:
        made["tpuTopology"] = pool.tpu_topology
    reservation = pool.reservation or spec.reservation
    if reservation:
        made["reservationAffinity"] = _reservation(reservation)
    return made


def _reservation(reservation: Reservation) -> dict[str, Any]:
    made: dict[str, Any] = {"reservationAffinityType": _RESERVATIONS[reservation.affinity]}
    if reservation.affinity == "specific":
        made |= {"key": _RESERVATION_KEY, "values": [reservation.name]}
    return made


def scheduling(spec: JobSpec) -> Mapping[str, Any]:
    """Returns `scheduling`."""
    given = spec.scheduling
    made: dict[str, Any] = {"strategy": _STRATEGIES[given.strategy]}
    if given.timeout is not None:
        made["timeout"] = f"{seconds(given.timeout)}s"
    if given.strategy == "flex_start" and given.max_wait is not None:
        made["maxWaitDuration"] = f"{seconds(given.max_wait)}s"
    if restarts_job(spec):
        made["restartJobOnWorkerRestart"] = True
    if given.disable_retries:
        made["disableRetries"] = True
    return made


def restarts_job(spec: JobSpec) -> bool:
    """Whether all replicas start again when one does.

    Workers that train in step wait for a lost one for ever, so they start again together. Parameter
    servers and their workers carry on. `disable_retries` switches it off in the service.
    """
    given = spec.scheduling
    if given.disable_retries:
        return False
    if given.restart_job_on_worker_restart is not None:
        return given.restart_job_on_worker_restart
    return spec.pools.worker is not None and spec.pools.ps is None
