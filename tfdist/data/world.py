"""What data needs to know of the job that this process is in."""

from __future__ import annotations

import hashlib
import os
import secrets

from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.cluster.detect import detect
from tfdist.errors import ConfigError

_drawn = 0


def workers_here() -> tuple[int, int]:
    """Returns how many workers read data together, and the number of this one among them.

    On parameter servers the coordinator reads for all; an evaluator reads for itself.
    """
    group = current.group()
    cluster = group.cluster if group is not None else detect(os.environ)
    if cluster.has_parameter_servers or cluster.task not in cluster.replicas:
        return 1, 0
    return cluster.num_workers, cluster.replicas.index(cluster.task)


def drawn_seed() -> int:
    """Returns a seed: the n-th call of every worker of a job returns the same.

    Raises:
        ConfigError: There are several workers, and nothing tells this job from others.
    """
    global _drawn
    if workers_here()[0] == 1:
        return secrets.randbits(56)
    group = current.group()
    name = rendezvous.job_name() or (group and str(group.facts[0].get("nonce", "")))
    if not name:
        raise ConfigError(
            "a seed for shuffled data that is read before the workers have met",
            "shuffle=True without a seed",
            "pass seed=..., or call tfdist.strategy() first",
        )
    _drawn += 1
    text = f"{name}/data/{_drawn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
