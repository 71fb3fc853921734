"""Sums among workers that share one host, of gradients say, through memory, not sockets.

    >>> reduce, reason = connect(rank, names, all_gather, [Bucket("float32", ((784, 10), (10,)))])
    >>> reduce.submit(0, gradients)     # returns at once
    >>> sums = reduce.wait(0)           # the same bits on every worker

Pure Python and numpy, no TensorFlow: the engine calls it from its graph with `tf.numpy_function`.
"""

from __future__ import annotations

from tfdist.collectives.allreduce import AllReduce
from tfdist.collectives.allreduce import connect
from tfdist.collectives.layout import ITEM_BYTES
from tfdist.collectives.layout import Bucket

__all__ = ["ITEM_BYTES", "AllReduce", "Bucket", "connect"]
