"""Puts variables on parameter servers by bytes.

TensorFlow goes round: every server gets as many variables, and one of them the large table. Here a
new variable goes to the server that holds the fewest bytes. And no variable of Keras is cut into
parts by the strategy's `variable_partitioner`, which Keras cannot hold; `tfdist.layers.Embedding`
cuts its table itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engine.replicas import is_asynchronous
from tfdist.layers.shards import unpartitioned

_loads: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def create(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a strategy's `_create_variable_round_robin` that places by bytes."""

    @functools.wraps(original)
    def _create_variable_round_robin(self: Any, next_creator: Any, **kwargs: Any) -> Any:
        loads = _loads.setdefault(self, [0] * self._num_ps)
        server = loads.index(min(loads))
        self._variable_count = server  # The original takes it modulo the number of servers.
        variable = original(self, next_creator, **kwargs)
        loads[server] += int(np.prod(variable.shape.as_list())) * variable.dtype.size
        return variable

    return _create_variable_round_robin


def whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's `Variable._initialize` that makes one `tf.Variable`, never parts."""

    @functools.wraps(original)
    def _initialize(self: Any, value: Any) -> None:
        if not is_asynchronous(tf.distribute.get_strategy()):
            original(self, value)
            return
        with unpartitioned():
            original(self, value)

    return _initialize
