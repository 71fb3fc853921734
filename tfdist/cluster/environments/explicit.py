"""`TFDIST_CLUSTER`: the cluster said to tfdist alone, above everything a platform sets.

Its value has the shape of `TF_CONFIG`:

    TFDIST_CLUSTER='{"cluster": {"worker": ["a:2222", "b:2222"]},
                     "task": {"type": "worker", "index": 0}}'

A document without cluster, `{"task": {"type": "worker", "index": 0}}`, makes one process of its
own of a process in any cluster.
"""

from __future__ import annotations

import dataclasses

from tfdist.cluster.environments.base import Environ
from tfdist.cluster.environments.base import text
from tfdist.cluster.environments.spec import parse
from tfdist.cluster.environments.tf_config import cluster_from
from tfdist.cluster.topology import Cluster

VARIABLE = "TFDIST_CLUSTER"


def detect(environ: Environ) -> Cluster | None:
    """Reads `TFDIST_CLUSTER`."""
    spec = parse(VARIABLE, text(environ, VARIABLE))
    if spec is None:
        return None
    cluster = cluster_from(spec, "tfdist", environ)
    hidden = [name for name in ("CLUSTER_SPEC", "TF_CONFIG") if text(environ, name)]
    if hidden:
        ignored = f"{VARIABLE} is set, so {' and '.join(hidden)} is not read."
        cluster = dataclasses.replace(cluster, warnings=(*cluster.warnings, ignored))
    return cluster
