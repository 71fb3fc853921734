"""The functions that Keras calls once an execution: a step on every replica, and one result.

Stock Keras reads the data inside the compiled step. At the end of data of unknown length the step
then fails half done: its counters have run (`optimizer.iterations` is one ahead for every epoch).
Here a step gets its batch as an argument, so what runs is exactly what there is data for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras import tree

from tfdist.engine.gradients import share_of_replica
from tfdist.engine.readers import Batch
from tfdist.engine.replicas import local_mean
from tfdist.engine.replicas import none_if_optional
from tfdist.engine.replicas import quiet
from tfdist.engine.replicas import strategy_name
from tfdist.engine.statistics import statistics_of
from tfdist.errors import UnsupportedError


def make_function(model: Any, step: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Any]:
    """Returns what Keras calls `train_function` or `test_function`.

    Args:
        model: The model; its strategy runs the step.
        step: `model.train_step` or `model.test_step`.

    Returns:
        A function of an iterator over batches. It runs `steps_per_execution` steps, or as many as
        there are batches, and returns the logs of the last: replicas' values averaged over this
        process. It raises `StopIteration` where there is no batch at all.
    """
    strategy = model.distribute_strategy

    def on_replica(part: Any, share: Any) -> Any:
        with share_of_replica(share), _keep_if_empty(model, part, share):
            return step(_open_if_empty(part))

    def on_replicas(data: Any, share: Any) -> Any:
        with tf.variable_creator_scope(_outside_the_graph):
            outputs = strategy.run(on_replica, args=(data, share))
        return tree.map_structure(lambda value: local_mean(strategy, value), outputs)

    refuse_xla(model)
    if not model.run_eagerly:
        on_replicas = quiet(
            tf.function(
                tf.autograph.experimental.do_not_convert(on_replicas), reduce_retracing=True
            )
        )

    def function(iterator: Iterator[Any]) -> Any:
        outputs = None
        for batch in itertools.islice(iterator, model.steps_per_execution):
            # `train_on_batch` hands over what it was given, as large on every replica.
            data, share = (batch.data, batch.share) if isinstance(batch, Batch) else (batch, None)
            outputs = on_replicas(tree.map_structure(none_if_optional, data), share)
        if outputs is None:
            raise StopIteration
        return outputs

    return function


def _outside_the_graph(create: Callable[..., Any], **kwargs: Any) -> Any:
    """Creates what a step makes on its first run where it stays: outside the graph being traced.

    A model without `call` builds its parts and optimizers inside the step. TensorFlow would put
    their initial values behind a condition in the graph, which replicas cannot enter.
    """
    with tf.init_scope():
        return create(**kwargs)


@contextlib.contextmanager
def _keep_if_empty(model: Any, part: Any, share: Any) -> Iterator[None]:
    """Leaves the moving statistics of a replica that has no examples as they were."""
    leaves = [leaf for leaf in tree.flatten(part) if isinstance(leaf, tf.Tensor)]
    may_be_empty = not leaves or leaves[0].shape.rank is None or not leaves[0].shape[:1][0]
    variables = statistics_of(model) if share is not None and may_be_empty else []
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(share > 0, variable.value, value))


def forget_prediction(model: Any) -> None:
    """Forgets the compiled function of `predict_here`; the model is compiled anew."""
    if hasattr(model, _PREDICT):
        object.__setattr__(model, _PREDICT, None)


def _open_if_empty(part: Any) -> Any:
    """Hides from the trace that a replica's part has no examples.

    Keras takes the mean of a batch that is known to be empty as 0/0, of one that turns out to be
    empty as 0.
    """

    def hide(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] == 0:
            shape = [None, *leaf.shape[1:]]
            return tf.compat.v1.placeholder_with_default(leaf, shape)
        return leaf

    return part if tf.executing_eagerly() else tree.map_structure(hide, part)


def refuse_xla(model: Any) -> None:
    """Refuses `jit_compile=True`, which Keras passes on to a step that XLA cannot hold.

    Raises:
        UnsupportedError: The model was compiled with `jit_compile=True`.
    """
    if model.jit_compile:
        raise UnsupportedError(
            "a model compiled without XLA: its collectives do not run under "
            f"{strategy_name(model.distribute_strategy)}",
            "jit_compile=True",
            "call compile(jit_compile=False) or leave jit_compile out",
        )


def predict_here(model: Any, x: Any) -> Any:
    """Returns the prediction for one batch, made by one replica of this process.

    Args:
        model: The model.
        x: The batch, as `predict_on_batch` takes it.
    """

    def on_replicas(data: Any) -> Any:
        outputs = model.distribute_strategy.run(model.predict_step, args=(data,))
        return tree.map_structure(
            lambda value: model.distribute_strategy.experimental_local_results(value)[0], outputs
        )

    if model.run_eagerly:
        return on_replicas((x,))
    if getattr(model, _PREDICT, None) is None:
        object.__setattr__(model, _PREDICT, quiet(tf.function(on_replicas, reduce_retracing=True)))
    return getattr(model, _PREDICT)((x,))


_PREDICT = "_tfdist_predict_here"
