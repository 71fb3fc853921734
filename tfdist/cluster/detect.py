"""From environment variables to a `Cluster`.

    >>> detect({})
    Cluster(environment='local', task=Task(type='worker', index=0), ...)

Pure Python and quick: neither TensorFlow nor Keras is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdist.cluster.environments import explicit
from tfdist.cluster.environments import kubernetes
from tfdist.cluster.environments import local
from tfdist.cluster.environments import sagemaker
from tfdist.cluster.environments import slurm
from tfdist.cluster.environments import tf_config
from tfdist.cluster.environments import tpu
from tfdist.cluster.environments import vertex
from tfdist.cluster.environments.base import Detector
from tfdist.cluster.topology import Cluster

#: Who is asked, in this order; the first that recognises its variables wins.
PRECEDENCE: tuple[Detector, ...] = (
    explicit.detect,  # TFDIST_CLUSTER: the user's word goes before the platform's.
    vertex.detect,  # CLUSTER_SPEC, checked against TF_CONFIG: it knows more than TF_CONFIG.
    tf_config.detect,  # TF_CONFIG: also Kubeflow TFJob, Ray, SageMaker with parameter servers.
    sagemaker.detect,  # SM_HOSTS
    tpu.detect,  # TPU_NAME, ...: before schedulers, which also start the hosts of a slice.
    slurm.detect,  # SLURM_STEP_ID, ...
    kubernetes.detect,  # JOB_COMPLETION_INDEX
    local.detect,
)


def detect(environ: Mapping[str, str] | None = None) -> Cluster:
    """Finds out which cluster this process is in, and which of its tasks it is.

    Args:
        environ: Environment variables; `os.environ` by default.

    Returns:
        The cluster. Its `source` says which variables won, its `warnings` what was tolerated.

    Raises:
        ClusterError: A variable is set to something that cannot be right, or two disagree.

    Example:
        >>> cluster = detect({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, '
        ...                                '"task": {"type": "worker", "index": 1}}'})
        >>> cluster.num_workers, cluster.is_chief
        (2, False)
    """
    variables = os.environ if environ is None else environ
    for ask in PRECEDENCE:
        cluster = ask(variables)
        if cluster is not None:
            return tpu.attach(cluster, variables)
    raise AssertionError("the local environment always answers")
