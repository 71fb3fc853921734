"""Cloud TPU: `TPU_NAME`, `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS` and the variables of TPU machines.

`TPU_WORKER_HOSTNAMES` and `TPU_WORKER_ID` name the hosts of a slice and this one among them. They
do not name the TPU: on one host it is "local"; on several, "local" would see the cores of one host
only (tensorflow issue 53296), so that a name is required.
"""

from __future__ import annotations

import dataclasses

from tfdist.cluster.environments.addresses import check_host
from tfdist.cluster.environments.base import Environ
from tfdist.cluster.environments.base import count
from tfdist.cluster.environments.base import first
from tfdist.cluster.environments.base import head
from tfdist.cluster.environments.base import text
from tfdist.cluster.environments.base import whole_number
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import ClusterError

LOCAL = "local"

_NAMES = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR")
_HOSTS = "TPU_WORKER_HOSTNAMES"
_ID = "TPU_WORKER_ID"


def detect(environ: Environ) -> Cluster | None:
    """Reads the variables of Cloud TPU."""
    variable, name = first(environ, *_NAMES)
    hosts = tuple(
        check_host(host, _HOSTS) for host in text(environ, _HOSTS).split(",") if host.strip()
    )
    worker_id = text(environ, _ID)
    if not (name or hosts or worker_id):
        return None
    if variable == "COLAB_TPU_ADDR":
        name = name if "://" in name else f"grpc://{name}"
    tpu = name or LOCAL
    if tpu.lower() == LOCAL:
        tpu = LOCAL
        if len(hosts) > 1:
            raise ClusterError(
                "the name of the TPU where it spans several hosts, because 'local' sees one only",
                f"{_HOSTS}={head(','.join(hosts))} ({len(hosts)} hosts) and "
                + (f"{variable}={name}" if name else "no TPU_NAME, which means 'local'"),
                "set TPU_NAME to the name or the grpc:// address of the TPU",
            )
    index = _index(worker_id, hosts, tpu)
    named = f"{variable} names the TPU {tpu}" if name else f"{_HOSTS if hosts else _ID} is set"
    spans = f" on {count(len(hosts), 'host')}" if hosts else ""
    return Cluster(
        environment="tpu",
        task=Task(WORKER, index),
        tpu=tpu,
        hosts=hosts,
        source=f"{named}{spans}; this process is worker {index}.",
    )


def attach(cluster: Cluster, environ: Environ) -> Cluster:
    """Adds the TPU of `environ` to a cluster that another variable described.

    Vertex AI and Kubeflow describe a TPU machine as a cluster of one; a cluster of several takes
    precedence over TPU variables.
    """
    if cluster.tpu or cluster.is_evaluator or cluster.has_parameter_servers:
        return cluster
    if cluster.num_workers == 1:
        found = detect(environ)
        return cluster if found is None else dataclasses.replace(cluster, tpu=found.tpu)
    variable, name = first(environ, *_NAMES)
    if not name:
        return cluster
    ignored = f"{variable} names a TPU, which a cluster of several workers does not use."
    return dataclasses.replace(cluster, warnings=(*cluster.warnings, ignored))


def _index(worker_id: str, hosts: tuple[str, ...], tpu: str) -> int:
    if not worker_id:
        if len(hosts) > 1:
            raise ClusterError(
                f"{_ID}, the index of this host in {_HOSTS}",
                f"{len(hosts)} hosts and no {_ID}",
                f"set {_ID} to a number from 0 to {len(hosts) - 1}",
            )
        return 0
    index = whole_number(_ID, worker_id, f"the index of this host in {_HOSTS}")
    if hosts and index >= len(hosts):
        raise ClusterError(
            f"{_ID} to be the index of one of the {count(len(hosts), 'host')} in {_HOSTS}",
            f"{_ID}={index}",
            f"use a number from 0 to {len(hosts) - 1}",
        )
    if not hosts and index and tpu == LOCAL:
        raise ClusterError(
            f"{_HOSTS} beside an {_ID} above 0, which tells of several hosts",
            f"{_ID}={index}, no TPU_NAME and no {_HOSTS}",
            "set TPU_NAME to the name of the TPU",
        )
    return 0 if not hosts else index
