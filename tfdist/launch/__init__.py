"""A real cluster of local processes: ports, roles, logs, supervision, restarts.

Used by `tfdist run`. Imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

from tfdist.launch.launcher import launch
from tfdist.launch.spec import Command
from tfdist.launch.spec import LaunchSpec

__all__ = ["Command", "LaunchSpec", "launch"]
