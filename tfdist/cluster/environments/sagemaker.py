"""SageMaker training jobs: `SM_HOSTS` and `SM_CURRENT_HOST`.

SageMaker gives hosts and no ports, so every worker listens on port 8890 (`TFDIST_PORT_BASE`
chooses another). Where it also sets `TF_CONFIG` (its parameter-server mode: `master`, and `ps` on
every host at a port of its own), that variable has said more and was read before this one.
"""

from __future__ import annotations

import json

from tfdist.cluster.environments.addresses import check_distinct
from tfdist.cluster.environments.addresses import check_host
from tfdist.cluster.environments.base import Environ
from tfdist.cluster.environments.base import count
from tfdist.cluster.environments.base import head
from tfdist.cluster.environments.base import port_base
from tfdist.cluster.environments.base import text
from tfdist.cluster.topology import WORKER
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import ClusterError

PORT = 8890


def detect(environ: Environ) -> Cluster | None:
    """Reads `SM_HOSTS` and `SM_CURRENT_HOST`."""
    value = text(environ, "SM_HOSTS")
    if not value:
        return None
    hosts = _hosts(value)
    current = text(environ, "SM_CURRENT_HOST")
    if not current and len(hosts) == 1:
        current = hosts[0]
    if current not in hosts:
        raise ClusterError(
            "SM_CURRENT_HOST to be one of SM_HOSTS, to know which task this is",
            f"SM_CURRENT_HOST={head(current)} and SM_HOSTS={head(value)}",
            "run the program as SageMaker starts it, or set TFDIST_CLUSTER",
        )
    port = port_base(environ, PORT)
    gpus = text(environ, "SM_NUM_GPUS")
    task = Task(WORKER, hosts.index(current))
    return Cluster(
        environment="sagemaker",
        task=task,
        addresses={WORKER: tuple(f"{host}:{port}" for host in hosts)},
        accelerators=int(gpus) if gpus.isdecimal() else None,
        hosts=hosts,
        job_name=text(environ, "TRAINING_JOB_NAME"),
        source=f"SM_HOSTS names {count(len(hosts), 'worker')}; this process is {task}.",
    )


def _hosts(value: str) -> tuple[str, ...]:
    try:
        hosts = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            "SM_HOSTS to be a JSON list of hosts", f"{head(value)} ({error})", "correct SM_HOSTS"
        ) from None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
        raise ClusterError(
            "SM_HOSTS to be a JSON list of hosts", head(value), 'write ["algo-1", "algo-2"]'
        )
    checked = tuple(check_host(host, "SM_HOSTS") for host in hosts)
    check_distinct(
        ((f"{WORKER} {index}", f"{host}:{PORT}") for index, host in enumerate(checked)), "SM_HOSTS"
    )
    return checked
