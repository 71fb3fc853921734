"""Kubernetes indexed jobs: `JOB_COMPLETION_INDEX`, and what must be told beside it.

Kubernetes tells a pod of an indexed Job (also one of JobSet or Kubeflow Trainer) its index and no
more. The rest comes from variables of the pod template:

| variable | meaning |
|---|---|
| `TFDIST_NUM_WORKERS` | number of pods, `spec.completions` of the Job |
| `TFDIST_SERVICE` | headless service, `subdomain` of the pod template; default `JOBSET_NAME` |
| `TFDIST_JOB_NAME` | name of the Job; default: `HOSTNAME` without its index |
| `TFDIST_PORT_BASE` | port of every worker; default 2222 |
| `TFDIST_WORKER_HOSTS` | instead of all the above: hosts (`host` or `host:port`), with commas |

Pods then meet at `JOB-0.SERVICE:2222`, `JOB-1.SERVICE:2222` and so on. Pods that belong to no
common training set `TFDIST_NUM_WORKERS=1`.
"""

from __future__ import annotations

from tfdist.cluster.environments.addresses import check_address
from tfdist.cluster.environments.addresses import check_distinct
from tfdist.cluster.environments.addresses import check_host
from tfdist.cluster.environments.base import Environ
from tfdist.cluster.environments.base import count
from tfdist.cluster.environments.base import port_base
from tfdist.cluster.environments.base import text
from tfdist.cluster.environments.base import whole_number
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import ClusterError

PORT = 2222

_INDEX = "JOB_COMPLETION_INDEX"
_NUMBER = "TFDIST_NUM_WORKERS"
_HOSTS = "TFDIST_WORKER_HOSTS"


def detect(environ: Environ) -> Cluster | None:
    """Reads the index of the pod and the variables of the table above."""
    value = text(environ, _INDEX)
    if not value:
        return None
    index = whole_number(_INDEX, value, "the index of this pod in its Job")
    number = _number(environ)
    addresses = _listed(environ) or _derived(environ, index, number)
    if number is not None and addresses and number != len(addresses):
        raise ClusterError(
            f"{_NUMBER} to be the number of hosts in {_HOSTS}",
            f"{_NUMBER}={number} and {count(len(addresses), 'host')}",
            f"unset {_NUMBER}",
        )
    if not addresses:
        return _alone(environ, index, number)
    if index >= len(addresses):
        raise ClusterError(
            f"{_INDEX} to be the index of one of the {count(len(addresses), 'worker')}",
            f"{_INDEX}={index}",
            f"set {_NUMBER} to spec.completions of the Job",
        )
    check_distinct(((f"{WORKER} {i}", item) for i, item in enumerate(addresses)), _HOSTS)
    task = Task(WORKER, index)
    return Cluster(
        environment="kubernetes",
        task=task,
        addresses={WORKER: addresses},
        hosts=tuple(address.rpartition(":")[0] for address in addresses),
        job_name=_job_name(environ, index),
        source=(
            f"{_HOSTS if text(environ, _HOSTS) else _NUMBER} names "
            f"{count(len(addresses), 'worker')} and {_INDEX} is {index}."
        ),
    )


def _number(environ: Environ) -> int | None:
    value = text(environ, _NUMBER)
    return whole_number(_NUMBER, value, "the number of pods", minimum=1) if value else None


def _listed(environ: Environ) -> tuple[str, ...]:
    hosts = [host.strip() for host in text(environ, _HOSTS).split(",") if host.strip()]
    port = port_base(environ, PORT)
    return tuple(
        check_address(host if _has_port(host) else f"{host}:{port}", f"{_HOSTS}, worker {index}")
        for index, host in enumerate(hosts)
    )


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]


def _derived(environ: Environ, index: int, number: int | None) -> tuple[str, ...]:
    if number is None or number == 1:
        return ()
    job = _job_name(environ, index)
    service = text(environ, "TFDIST_SERVICE") or text(environ, "JOBSET_NAME")
    if not job or not service:
        missing = [
            name
            for name, known in (("TFDIST_JOB_NAME", job), ("TFDIST_SERVICE", service))
            if not known
        ]
        raise ClusterError(
            f"{' and '.join(missing)}, to know the names of the {number} pods of the Job",
            f"{_INDEX}={index} and {_NUMBER}={number} alone",
            "set TFDIST_SERVICE to the headless service (subdomain) of the pods and "
            f"TFDIST_JOB_NAME to the name of the Job, or list the hosts in {_HOSTS}",
        )
    port = port_base(environ, PORT)
    check_host(job, "TFDIST_JOB_NAME")
    check_host(service, "TFDIST_SERVICE")
    return tuple(f"{job}-{pod}.{service}:{port}" for pod in range(number))


def _job_name(environ: Environ, index: int) -> str:
    name = text(environ, "TFDIST_JOB_NAME")
    hostname = text(environ, "HOSTNAME").partition(".")[0]
    # The host name of a pod of an indexed Job is the name of the Job and the index.
    if not name and hostname.endswith(f"-{index}"):
        name = hostname.removesuffix(f"-{index}")
    return name


def _alone(environ: Environ, index: int, number: int | None) -> Cluster:
    """Returns a cluster of one where that is what was meant, or may be.

    A pod with an index above 0 has siblings; trained apart, each would make a model of its own
    and none would notice, so it stops. The Job then fails, whatever pod 0 does.
    """
    if number is None and index:
        raise ClusterError(
            f"{_NUMBER} and TFDIST_SERVICE, to know the other pods of the Job",
            f"{_INDEX}={index} alone",
            f"set {_NUMBER} to spec.completions and TFDIST_SERVICE to the headless service of "
            f"the pods, or {_NUMBER}=1 if each pod trains a model of its own",
        )
    warnings: tuple[str, ...] = ()
    if number is None:
        alone = (
            f"{_INDEX} is 0 and {_NUMBER} is not set: this pod trains alone. Set {_NUMBER} and "
            "TFDIST_SERVICE if the Job has more pods."
        )
        warnings = (alone,)
    return Cluster(
        environment="kubernetes",
        task=Task(WORKER, 0),
        job_name=_job_name(environ, index),
        warnings=warnings,
        source=f"{_INDEX} is {index}, in a Job of which each pod is on its own.",
    )
