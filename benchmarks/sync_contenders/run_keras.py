"""One process of a Keras contender: one device, tfdist, stock Keras 2, or Keras on JAX."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

import measure

orders = measure.begin()
stack = orders.options["stack"]
global_batch = orders.batch * orders.processes


def strategy_of_stack() -> tuple[Any, Any]:
    """Returns the module Keras and a context to build the model in."""
    if stack == "tfdist":
        import tfdist

        strategy = tfdist.strategy()
        import keras

        return keras, strategy.scope()
    if stack == "tf_keras":
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        import tf_keras

        return tf_keras, strategy.scope()
    if stack == "jax":
        _start_jax()
    import keras

    return keras, contextlib.nullcontext()


def _start_jax() -> None:
    import jax

    if orders.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["SYNC_COORDINATOR"], orders.processes, orders.rank)
    import keras

    if orders.processes > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())


def dataset() -> Any:
    """Returns global batches that lie in memory as they are needed, without end."""
    import tensorflow as tf
    from workloads import data

    return tf.data.Dataset.from_tensor_slices(data(orders.model, global_batch)).repeat()


keras, scope = strategy_of_stack()

from keras_models import build  # noqa: E402
from workloads import LEARNING_RATE  # noqa: E402


class Ends(keras.callbacks.Callback):
    """Tells a clock of the end of each execution."""

    def __init__(self, clock: measure.Clock):
        super().__init__()
        self.clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the time."""
        self.clock.step(batch + 1)


keras.utils.set_random_seed(0)  # On JAX all processes must start from equal weights.
with scope:
    model = build(keras, orders.model)
    # Keras 2 does not know the argument; Keras 3 refuses 1.
    accumulation = (
        {"gradient_accumulation_steps": orders.accumulate} if orders.accumulate > 1 else {}
    )
    model.compile(
        keras.optimizers.SGD(LEARNING_RATE, **accumulation),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

batches = dataset()


def train(steps: int, clock: measure.Clock) -> None:
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[Ends(clock)])


parameters = sum(math.prod(weight.shape) for weight in model.trainable_weights)
measure.compare(orders, train, parameters)
