"""The variables that the service sets in each replica.

| variable | value |
|---|---|
| `CLUSTER_SPEC` | cluster by pools, the task, the job; on every replica |
| `TF_CONFIG` | cluster by roles, without evaluators; only in jobs of more than one replica |
| `AIP_MODEL_DIR`, `AIP_CHECKPOINT_DIR`, `AIP_TENSORBOARD_LOG_DIR` | `<base>/model/`, \
`<base>/checkpoints/`, `<base>/logs/`, where the job has a base output directory |
| `AIP_TENSORBOARD_RESOURCE_NAME`, `AIP_TENSORBOARD_API_URI` | where the job names a TensorBoard |
| `CLOUD_ML_JOB_ID`, `CLOUD_ML_PROJECT_ID`, `CLOUD_ML_REGION` | id of the job, number of the \
project, region |
| `HOSTNAME` | the replica's own, the same after each restart |

Sources: "Environment variables for your cluster" and "Training code requirements" of the service's
manual, `google.cloud.aiplatform.training_utils`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.topology import EVALUATOR
from tfdist.launch.environment import describes_a_cluster
from tfdist.vertex.local.custom_job import ReceivedJob
from tfdist.vertex.local.custom_job import Replica

#: What a program sees in the cloud of this machine's own variables: nothing that begins so.
_FOREIGN_PREFIXES = ("AIP_", "CLOUD_ML_", "JOB_COMPLETION_", "JOBSET_", "SM_", "TFDIST_")
_FOREIGN = ("COLAB_TPU_ADDR", "HOSTNAME")

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Who the job is to the service.

    Attributes:
        job_id: Last part of its resource name.
        project_number: Number of its project.
        region: For example "us-central1".
        mark: Part of the host names of its replicas, its own.
        output: What stands for the job's base output directory, or "".
    """

    job_id: str
    project_number: str
    region: str
    mark: str
    output: str

    def host_name(self, replica: Replica) -> str:
        """Returns the host name of `replica`, the same in each of its lives."""
        return f"cmle-training-{replica.pool_name}-{self.mark}-{replica.index}"


def service_variables(
    job: ReceivedJob, identity: Identity, addresses: Mapping[Replica, str], replica: Replica
) -> dict[str, str]:
    """Returns what the service sets for `replica`.

    Args:
        job: The job.
        identity: Who it is.
        addresses: `host:port` of every replica.
        replica: Whose variables.
    """
    variables = {
        "CLUSTER_SPEC": _cluster_spec(job, addresses, replica),
        "CLOUD_ML_JOB_ID": identity.job_id,
        "CLOUD_ML_PROJECT_ID": identity.project_number,
        "CLOUD_ML_REGION": identity.region,
        "HOSTNAME": identity.host_name(replica),
    }
    if len(addresses) > 1:
        variables["TF_CONFIG"] = _tf_config(job, identity, addresses, replica)
    if identity.output:
        for name, folder in (
            ("AIP_MODEL_DIR", "model"),
            ("AIP_CHECKPOINT_DIR", "checkpoints"),
            ("AIP_TENSORBOARD_LOG_DIR", "logs"),
        ):
            variables[name] = f"{identity.output}/{folder}/"
    if job.tensorboard:
        variables["AIP_TENSORBOARD_RESOURCE_NAME"] = job.tensorboard
        variables["AIP_TENSORBOARD_API_URI"] = f"{identity.region}-aiplatform.googleapis.com"
    return variables


def replica_environment(
    inherited: Mapping[str, str], service: Mapping[str, str], replica: Replica
) -> dict[str, str]:
    """Returns the whole environment of a replica: the machine's, the user's, the service's.

    Args:
        inherited: The environment of this machine, or what an image brings.
        service: What the service sets; nobody overrides it.
        replica: Whose environment.
    """
    environ = {name: value for name, value in inherited.items() if not is_foreign(name)}
    environ.update(service)
    for name, value in replica.program.env:
        # As the service documents it: earlier variables of the container and its own.
        environ[name] = _expand(value, environ)
    environ.update(service)
    return environ


def is_foreign(name: str) -> bool:
    """Whether a variable of this machine would tell a replica of another job or cluster."""
    return describes_a_cluster(name) or name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES)


def _expand(value: str, environ: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return _REFERENCE.sub(replace, value)


def _cluster_spec(job: ReceivedJob, addresses: Mapping[Replica, str], replica: Replica) -> str:
    cluster: dict[str, list[str]] = {}
    for other, address in addresses.items():
        cluster.setdefault(other.pool_name, []).append(address)
    return _json(
        {
            "cluster": cluster,
            "environment": "cloud",
            "task": {"type": replica.pool_name, "index": replica.index, "trial": ""},
            "job": job.spec,
        }
    )


def _tf_config(
    job: ReceivedJob, identity: Identity, addresses: Mapping[Replica, str], replica: Replica
) -> str:
    cluster: dict[str, list[str]] = {}
    for other, address in addresses.items():
        if other.task.type != EVALUATOR:
            cluster.setdefault(other.task.type, []).append(address)
    task = {"type": replica.task.type, "index": replica.index, "cloud": identity.mark}
    return _json({"cluster": cluster, "environment": "cloud", "job": job.spec, "task": task})


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
