"""The environment that the launcher gives to a task.

| variable | value |
|---|---|
| `TF_CONFIG` | the cluster and this task, also when it is alone |
| `TFDIST_JOB_ID` | random, the same for all tasks, new after every restart |
| `TFDIST_INCARNATION` | 0, then 1 after the first restart of this task, alone or with the job |
| `TFDIST_TRAINING_ENDED` | for the evaluator: a file that appears when training has ended |
| `TFDIST_PROGRESS` | for tasks that train: a file to which commits are added |
| `TFDIST_DATA_SERVICE` | addresses of the processes that make batches, if the job has such |
| `TFDIST_LAUNCHED` | 1 |
| `TFDIST_RENDEZVOUS_TIMEOUT` | seconds to wait for the other tasks at start-up |
| `PYTHONUNBUFFERED` | 1, so that lines arrive when they are printed |
| `TF_CPP_MIN_LOG_LEVEL` | 1 unless set |
| `no_proxy`, `no_grpc_proxy` | also this machine, where a proxy is set |

Everything else is inherited, except what would describe another cluster. A process that makes
batches gets no `TF_CONFIG`, and no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist.cluster.notice import PROGRESS
from tfdist.cluster.notice import TRAINING_ENDED
from tfdist.cluster.topology import DATA
from tfdist.cluster.topology import EVALUATOR
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task

# A laptop inside a Slurm allocation or a TPU machine still gets the local cluster it asked for.
_FOREIGN = ("CLUSTER_SPEC", "TF_CONFIG", "TFDIST_CLUSTER", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
_FOREIGN_PREFIXES = ("SLURM_", "TPU_")


def describes_a_cluster(name: str) -> bool:
    """Whether a variable of this name would describe another cluster to a task."""
    return name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES)


# gRPC sends even 127.0.0.1 through a proxy, and TensorFlow's start-up then waits for ever. These
# are the names gRPC reads.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclasses.dataclass(frozen=True)
class Incarnation:
    """One start of a task.

    Attributes:
        number: 0, then 1 after the first restart of the task, alone or with the job.
        job_id: Random hexadecimal text that no other start of any whole job has.
        addresses: Task to its address; an evaluator has none.
    """

    number: int
    job_id: str
    addresses: Mapping[Task, str]

    @property
    def data_service(self) -> str:
        """The addresses of the processes that make batches, `host:port,host:port`."""
        return ",".join(a for task, a in self.addresses.items() if task.type == DATA)

    def cluster(self, task: Task) -> Cluster:
        """Returns the cluster as `task` is to see it."""
        by_role: dict[str, tuple[str, ...]] = {}
        for other, address in self.addresses.items():
            if other.type not in (EVALUATOR, DATA):
                by_role[other.type] = (*by_role.get(other.type, ()), address)
        return Cluster(environment="local", task=task, addresses=by_role)


def child_environment(
    environ: Mapping[str, str], incarnation: Incarnation, task: Task, rendezvous_timeout: float
) -> dict[str, str]:
    """Returns the environment of the process that runs `task`.

    Args:
        environ: The launcher's own environment.
        incarnation: The start that the process is.
        task: The task it runs.
        rendezvous_timeout: Seconds.
    """
    child = {name: value for name, value in environ.items() if not describes_a_cluster(name)}
    for name in (TRAINING_ENDED, PROGRESS):
        child.pop(name, None)  # of an outer job
    bypass_proxies(child)
    child.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    child.update(
        TF_CONFIG=incarnation.cluster(task).to_tf_config(),
        TFDIST_JOB_ID=incarnation.job_id,
        TFDIST_INCARNATION=str(incarnation.number),
        TFDIST_LAUNCHED="1",
        TFDIST_RENDEZVOUS_TIMEOUT=f"{rendezvous_timeout:g}",
        PYTHONUNBUFFERED="1",
    )
    if incarnation.data_service:
        child["TFDIST_DATA_SERVICE"] = incarnation.data_service
    if task.type == DATA:
        del child["TF_CONFIG"]
        child["TFDIST_ENGINE"] = "0"
    return child


def bypass_proxies(environ: dict[str, str]) -> None:
    """Makes sure that no proxy which `environ` names is asked for addresses of this machine."""
    if any(environ.get(name) for name in _PROXIES):
        environ["no_proxy"] = _with_loopback(environ.get("no_proxy", environ.get("NO_PROXY", "")))
        if "no_grpc_proxy" in environ:  # gRPC prefers it
            environ["no_grpc_proxy"] = _with_loopback(environ["no_grpc_proxy"])


def _with_loopback(hosts: str) -> str:
    known = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost"]))
