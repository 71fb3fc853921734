"""Where this process trains: on one device by Keras alone, on local replicas or as a worker.

Keras and TensorFlow are taken from here (`from cells.world import keras`), so that neither is
loaded before the strategy is there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

WHERE, NAMES = sys.argv[1], sys.argv[2:]
TASK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "worker", "index": 0})
OUT = Path(os.environ.get("TFDIST_TEST_OUT", "."))

if WHERE in ("replicas", "workers"):
    import tfdist

    strategy = tfdist.strategy("mirrored", replicas=2) if WHERE == "replicas" else tfdist.strategy()
    WORKERS = tfdist.detect().num_workers

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

if WHERE not in ("replicas", "workers"):  # Keras alone: nothing of tfdist is imported.
    strategy, WORKERS = tf.distribute.get_strategy(), 1
REPLICAS = strategy.num_replicas_in_sync

# The graphs run ten times each; optimising them takes longer.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

__all__ = ["NAMES", "OUT", "REPLICAS", "TASK", "WHERE", "WORKERS", "keras", "np", "strategy", "tf"]
