"""The functions that Keras calls once an execution: a step on every replica, and one result.

Stock Keras reads the data inside the compiled step. At the end of data of unknown length the step
then fails half done: its counters have run (`optimizer.iterations` is one ahead for every epoch).
Here a step gets its batch as an argument, so what runs is exactly what there is data for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import keras
import optree
import tensorflow as tf
from keras import tree

from tfdist.engine import allreduce
from tfdist.engine.batch import Batch
from tfdist.engine.batch import Packing
from tfdist.engine.current_step import ReplicaStep
from tfdist.engine.current_step import tracing
from tfdist.engine.metrics import metrics_over_all
from tfdist.engine.readers import even_share
from tfdist.engine.replicas import none_if_optional
from tfdist.engine.replicas import quiet
from tfdist.engine.statistics import statistics_of
from tfdist.engine.xla import compiled


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
    return StepFunction(model, step)


class _Variant(NamedTuple):
    """A kind of batches that needs a graph of its own.

    Attributes:
        packing: See `Batch`.
        is_fixed: See `Batch`.
        has_empty_parts: See `Batch`.
        knows_metrics: See `StepFunction`.
    """

    packing: Packing | None
    is_fixed: bool
    has_empty_parts: bool
    knows_metrics: bool


class StepFunction:
    """What Keras calls `train_function` or `test_function`.

    Args:
        model: The model; its strategy runs the step.
        step: `model.train_step` or `model.test_step`.

    Attributes:
        knows_metrics: Whether logs of metrics are to be over all replicas of all workers at every
            step. On several workers this is a message a step; else they are this process's.
        traces_alike: Whether each size of a batch has a graph of its own, whatever came first: a
            process that goes on with a last, smaller batch then has the same numbers to the bit.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any]):
        self._model = model
        self._step = step
        self._strategy = model.distribute_strategy
        self.knows_metrics = False
        self.traces_alike = False
        self._weight: Any = 1.0
        self._even: Any = None
        self._compiled = compiled(model)
        self._functions: dict[_Variant, Any] = {}
        self._last: dict[_Variant, tuple[Any, Any]] = {}

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """Runs `steps_per_execution` steps, or as many as there are batches.

        Returns:
            The logs of the last step.

        Raises:
            StopIteration: There is no batch at all.
        """
        result = None
        for batch in itertools.islice(iterator, self._model.steps_per_execution):
            # `train_on_batch` hands over what it was given, as large on every replica.
            if not isinstance(batch, Batch):
                given = tree.map_structure(none_if_optional, batch)
                batch = Batch(given, self._even_share(), is_fixed=True)
            variant = _Variant(
                batch.packing, batch.is_fixed, batch.has_empty_parts, self.knows_metrics
            )
            try:
                result = self._call(variant, batch.data, batch.share)
            except tf.errors.OpError as error:
                allreduce.explain(error)
                raise
        if result is None:
            raise StopIteration
        logs, self._weight = result
        return logs

    @property
    def weight(self) -> float:
        """Examples of this process over those of the global batch, in the last step."""
        return float(self._weight)

    def resume(self, weight: float) -> None:
        """Goes on after a step of another process, which had `weight`."""
        self._weight = weight

    def _call(self, variant: _Variant, data: Any, share: Any) -> Any:
        if variant not in self._functions:
            # One function with the kind as an argument would have to look at it in every step.
            function: Any = functools.partial(self._run, variant)
            if not self._model.run_eagerly:
                function = quiet(
                    tf.function(function, autograph=False, reduce_retracing=not self.traces_alike)
                )
            self._functions[variant] = function
        function = self._functions[variant]
        flat = tf.nest.flatten((data, share), expand_composites=True)
        tensors = [leaf for leaf in flat if isinstance(leaf, tf.Tensor)]
        if self._model.run_eagerly or len(tensors) < len(flat):
            return function(data, share)
        # Finding the graph for its arguments takes TensorFlow about as long as a small layer. Where
        # nothing but their values is new, it is the one of the last time.
        kind = (optree.tree_structure(data), *((t.dtype, *t._shape_tuple()) for t in tensors))
        known, graph = self._last.get(variant, (None, None))
        if kind != known:
            self._last[variant] = kind, None
            return function(data, share)
        if graph is None:
            graph = function.get_concrete_function(data, share)
            self._last[variant] = kind, graph
        return graph._call_flat(tensors, graph.captured_inputs)

    def _run(self, variant: _Variant, data: Any, share: Any) -> Any:
        def whole_batch(part: Any) -> Any:
            part = part if variant.is_fixed else _open_batch(part)
            return part if variant.packing is None else variant.packing.pack(part)

        def on_replica(part: Any, share: Any) -> Any:
            known = ReplicaStep(share, self._model.name, variant.has_empty_parts)
            with tracing(known), _keep_if_empty(self._model, known):
                outputs = tree.map_structure(_read, self._step(whole_batch(part)))
                return tree.map_structure(lambda value: _weighed(value, known), outputs)

        call = self._compiled.in_place() if self._compiled else contextlib.nullcontext()
        with tf.variable_creator_scope(_outside_the_graph), call:
            outputs = self._strategy.run(on_replica, args=(data, share))
        weight = tf.add_n(self._local(share))
        logs = tree.map_structure(lambda value: self._merged(value, weight), outputs)
        if variant.knows_metrics and isinstance(logs, dict):
            logs = {**logs, **metrics_over_all(self._model, logs)}
        return logs, weight

    def _even_share(self) -> Any:
        if self._even is None:
            self._even = even_share(self._strategy)
        return self._even

    def _merged(self, value: Any, weight: Any) -> Any:
        values = self._local(value)
        first = values[0]
        if not tf.is_tensor(first) or not first.dtype.is_floating:
            return first
        return tf.math.divide_no_nan(tf.add_n(values), tf.cast(weight, first.dtype))

    def _local(self, value: Any) -> list[Any]:
        return list(self._strategy.experimental_local_results(value))


def _read(value: Any) -> Any:
    """Returns a tensor for a variable: what a metric's result may be."""
    return tf.convert_to_tensor(value.value) if isinstance(value, keras.Variable) else value


def _weighed(value: Any, step: ReplicaStep) -> Any:
    """Returns what a replica reports, times its share, so that the sum is the mean by examples."""
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    part = step.part(value)
    if part is not None:
        return part
    return step.mean(value) * tf.cast(step.share, value.dtype)


def _outside_the_graph(create: Callable[..., Any], **kwargs: Any) -> Any:
    """Creates what a step makes on its first run where it stays: outside the graph being traced.

    A model without `call` builds its parts and optimizers inside the step. TensorFlow would put
    their initial values behind a condition in the graph, which replicas cannot enter.
    """
    with tf.init_scope():
        return create(**kwargs)


@contextlib.contextmanager
def _keep_if_empty(model: Any, step: ReplicaStep) -> Iterator[None]:
    """Leaves the moving statistics of a replica that has no examples as they were."""
    variables = statistics_of(model, synchronized=False) if step.may_be_empty else []
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(step.share > 0, variable.value, value))


def forget_prediction(model: Any) -> None:
    """Forgets the compiled function of `predict_here`; the model is compiled anew."""
    if hasattr(model, _PREDICT):
        object.__setattr__(model, _PREDICT, None)


def _open_batch(part: Any) -> Any:
    """Hides from the trace how many examples a replica has, which changes from step to step.

    Keras takes the mean of a batch that is known to be empty as 0/0, of one that turns out to be
    empty as 0; and it weighs the losses of several outputs by the size of the batch if it is known.
    """

    def hide(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            shape = [None, *leaf.shape[1:]]
            return tf.compat.v1.placeholder_with_default(leaf, shape)
        return leaf

    return part if tf.executing_eagerly() else tree.map_structure(hide, part)


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
