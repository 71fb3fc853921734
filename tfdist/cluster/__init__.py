"""Where am I: the cluster, and which of its tasks this process is. Pure Python."""

from __future__ import annotations

from tfdist.cluster.detect import detect
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task

__all__ = ["Cluster", "Task", "detect"]
