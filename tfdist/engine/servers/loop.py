"""`fit`, `evaluate` and `predict` on parameter servers.

The coordinator reads the data and calls the callbacks; workers do the steps. Executions are
scheduled ahead, two for each worker, so `on_train_batch_begin` runs when one is scheduled and
`on_train_batch_end` when it and all before it are done, always in the order of the batches.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import tree
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils

from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.engine import build
from tfdist.engine import callbacks as callback_rules
from tfdist.engine import metrics
from tfdist.engine import scope
from tfdist.engine.inputs import Feed
from tfdist.engine.servers import tables
from tfdist.engine.servers.dispatcher import Dispatcher
from tfdist.engine.servers.epoch_logs import EpochLogs
from tfdist.engine.servers.executor import Executor
from tfdist.engine.servers.worker_data import WorkerData
from tfdist.engine.servers.worker_data import is_worker_data
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError

#: Steps of an execution, unless `steps_per_execution` says more.
STEPS = 16
_EXECUTORS = "_tfdist_executors"


def _together(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` that ends with the name of the server whose loss has ended it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = current.group()
        if group is None:
            return function(*args, **kwargs)
        with group.together(function.__name__):
            return function(*args, **kwargs)

    return call


@_together
def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """Trains `model` asynchronously; arguments and result are those of `keras.Model.fit`.

    Raises:
        UnsupportedError: The model asks for what workers that do not wait for each other cannot do.
        PeerLostError: A parameter server died, or no worker answers.
    """
    model._assert_compile_called("fit")
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    strategy = model.distribute_strategy
    feed = _source(
        strategy,
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps=steps_per_epoch,
        shuffle=shuffle,
        class_weight=class_weight,
    )
    validate = None
    if validation_data is not None:
        val_x, val_y, val_weight = data_adapter_utils.unpack_x_y_sample_weight(validation_data)
        held_out = _source(
            strategy,
            val_x,
            val_y,
            val_weight,
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
        )

        def validate(calls: Any) -> dict[str, Any]:
            return _evaluate(model, held_out, calls)

    _prepare(model, feed)
    calls = callback_rules.container(
        model,
        callbacks,
        True,
        add_history=True,
        verbose=_verbosity(verbose),
        epochs=epochs,
        steps=feed.num_batches,
    )
    return _fit(model, feed, validate, calls, epochs, initial_epoch, validation_freq)


def _fit(
    model: Any,
    feed: Any,
    validate: Callable[[Any], dict[str, Any]] | None,
    calls: Any,
    epochs: int,
    initial_epoch: int,
    validation_freq: Any,
) -> Any:
    executor = _executor(model, "train_step", feed)
    size = _steps_per_execution(model, feed, calls.callbacks)
    model.stop_training = False
    calls.on_train_begin()
    start = model._initial_epoch or initial_epoch
    model._initial_epoch = None
    number = int(model.optimizer.iterations.numpy()) if model.optimizer is not None else 0
    training_logs = None
    for epoch in range(start, epochs):
        executor.execution.metrics.reset()
        calls.on_epoch_begin(epoch)
        logs = EpochLogs(executor, calls.callbacks)
        done = executor.run(_works(feed, executor, size, number), calls.on_train_batch_begin)
        for each in done:
            calls.on_train_batch_end(each.first + len(each.rows) - 1, logs.after(each))
            if model.stop_training:
                done.close()
        number += logs.steps
        if not logs.steps:
            _no_data(epoch, start)
            break
        epoch_logs = logs.final()
        if validate is not None and model._should_eval(epoch, validation_freq):
            epoch_logs.update({f"val_{name}": value for name, value in validate(calls).items()})
        calls.on_epoch_end(epoch, epoch_logs)
        training_logs = epoch_logs
        if model.stop_training:
            break
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    calls.on_train_end(logs=training_logs)
    return model.history


@_together
def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    **kwargs: Any,
) -> Any:
    """Evaluates `model` on the workers; arguments and result are those of `keras.Model.evaluate`.

    Every example counts exactly once.
    """
    kwargs.pop("_use_cached_eval_dataset", None)
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    model._assert_compile_called("evaluate")
    feed = _source(
        model.distribute_strategy, x, y, sample_weight, batch_size=batch_size, steps=steps
    )
    _prepare(model, feed)
    calls = callback_rules.container(
        model, callbacks, True, verbose=_verbosity(verbose), epochs=1, steps=feed.num_batches
    )
    logs = _evaluate(model, feed, calls)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(model: Any, feed: Any, calls: Any) -> dict[str, Any]:
    executor = _executor(model, "test_step", feed)
    size = _steps_per_execution(model, feed, calls.callbacks)
    model.stop_evaluating = False
    calls.on_test_begin()
    executor.execution.metrics.reset()
    feed.restart()
    logs = EpochLogs(executor, calls.callbacks)
    done = executor.run(_works(feed, executor, size, 0), calls.on_test_batch_begin)
    for each in done:
        calls.on_test_batch_end(each.first + len(each.rows) - 1, logs.after(each))
        if model.stop_evaluating:
            done.close()
    found = logs.final()
    calls.on_test_end(found)
    return found


@_together
def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Predicts on the workers; arguments and result are those of `keras.Model.predict`.

    The predictions are in the order of the examples.
    """
    feed = _source(model.distribute_strategy, x, batch_size=batch_size, steps=steps)
    _prepare(model, feed, to_train=False)
    calls = callback_rules.container(
        model, callbacks, True, verbose=_verbosity(verbose), epochs=1, steps=feed.num_batches
    )
    executor = _executor(model, "predict_step", feed)
    size = _steps_per_execution(model, feed, calls.callbacks)
    model.stop_predicting = False
    calls.on_predict_begin()
    parts: list[Any] = []
    done = executor.run(_works(feed, executor, size, 0), calls.on_predict_batch_begin)
    for each in done:
        parts += each.outputs
        last = each.first + len(each.rows) - 1
        calls.on_predict_batch_end(last, {"outputs": each.outputs[-1]})
        if model.stop_predicting:
            done.close()
    calls.on_predict_end()
    if not parts:
        raise ValueError("Expected data to predict on. Received: no batch at all.")
    return tree.map_structure(_joined, *parts)


def _joined(*parts: Any) -> Any:
    whole = keras_trainer.potentially_ragged_concat(list(parts))
    # Of one batch it is the array that came back from the worker.
    is_array = isinstance(whole, np.ndarray)
    return whole if is_array else keras_trainer.convert_to_np_if_not_ragged(whole)


@_together
def train_on_batch(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Trains on one batch, on a worker; arguments and result as of Keras's method."""
    model._assert_compile_called("train_on_batch")
    rows = len(tree.flatten(x)[0])
    feed = Feed(
        model.distribute_strategy,
        x,
        y,
        sample_weight,
        batch_size=rows,
        class_weight=class_weight,
    )
    _prepare(model, feed)
    number = int(model.optimizer.iterations.numpy()) if model.optimizer is not None else 0
    return _on_batch(model, _executor(model, "train_step", feed), feed, number, return_dict)


@_together
def test_on_batch(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
) -> Any:
    """Tests on one batch, on a worker; arguments and result as of Keras's method."""
    model._assert_compile_called("test_on_batch")
    rows = len(tree.flatten(x)[0])
    feed = Feed(model.distribute_strategy, x, y, sample_weight, batch_size=rows)
    _prepare(model, feed)
    return _on_batch(model, _executor(model, "test_step", feed), feed, 0, return_dict)


def _on_batch(model: Any, executor: Executor, feed: Any, number: int, return_dict: bool) -> Any:
    # As in Keras, metrics go on from batch to batch until `reset_metrics`.
    executor.execution.metrics.load()
    logs = EpochLogs(executor, [])
    for done in executor.run(_works(feed, executor, 1, number)):
        logs.after(done)
    found = logs.final()
    return found if return_dict else model._flatten_metrics_in_order(found)


def predict_on_batch(model: Any, x: Any) -> Any:
    """Predicts one batch, on a worker; arguments and result as of Keras's method."""
    return predict(model, x, batch_size=len(tree.flatten(x)[0]), verbose=0)


def _source(strategy: Any, x: Any, y: Any = None, weight: Any = None, **options: Any) -> Any:
    """Returns the data as a `Feed`, read here, or as `WorkerData`."""
    if not is_worker_data(x):
        return Feed(strategy, x, y, weight, **options)
    unknown = [n for n in ("batch_size", "class_weight") if options.get(n) is not None]
    unknown += [n for n, value in (("y", y), ("sample_weight", weight)) if value is not None]
    if unknown:
        raise ConfigError(
            "no other description of the data beside a dataset function",
            ", ".join(unknown),
            "let the function's dataset give (x, y, sample_weight) in batches",
        )
    dispatcher = dispatcher_of(strategy)
    return WorkerData(dispatcher.coordinator, x, dispatcher.workers, options.get("steps"))


def _works(feed: Any, executor: Executor, size: int, number: int) -> Any:
    if isinstance(feed, WorkerData):
        return feed.works(executor, size, number)
    return executor.over(feed.epoch(), size, number)


def _prepare(model: Any, feed: Any, *, to_train: bool = True) -> None:
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1:
        raise UnsupportedError(
            "workers with at most one accelerator under parameter servers",
            f"{strategy.num_replicas_in_sync} accelerators a worker",
            "use multi_worker on such machines, or start a worker for each accelerator",
        )
    if model.run_eagerly:
        warnings.warn(
            "run_eagerly has no effect under parameter servers: workers run compiled steps",
            stacklevel=4,
        )
    if getattr(model, "jit_compile", False) is True:
        raise UnsupportedError(
            "jit_compile=False under parameter servers, between whose steps weights travel",
            "jit_compile=True",
            "leave jit_compile at its default",
        )
    for optimizer in scope.optimizers_of(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise UnsupportedError(
                "an optimizer that does not scale the loss under parameter servers",
                "LossScaleOptimizer (as mixed_float16 brings)",
                "use mixed_bfloat16, which needs no scaling",
            )
    scope.adopt(model, strategy)
    build.build(model, feed.spec, feed.sample(), to_train=to_train)
    with strategy.scope():
        if to_train and model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    scope.adopt(model, strategy)
    metrics.adopt(model)
    tables.mark(model)


def _executor(model: Any, step: str, feed: Any) -> Executor:
    """Returns the executor of `model.<step>`, with the graphs that it has already."""
    # What a graph holds on to: `compile`, and `trainable` of a layer, may change any of it.
    compiled = (getattr(model, n, None) for n in ("optimizer", "_compile_loss", "_compile_metrics"))
    parts = (*compiled, *model.trainable_variables)
    known, executors = model.__dict__.get(_EXECUTORS, ((), {}))
    if len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
        executors = {}
        # Not by setattr, which would make them a part of the model.
        model.__dict__[_EXECUTORS] = parts, executors
    key = step, repr(feed.spec)
    if key not in executors:
        dispatcher = dispatcher_of(model.distribute_strategy)
        executors[key] = Executor(model, getattr(model, step), feed.spec, dispatcher)
    executor: Executor = executors[key]
    return executor


def dispatcher_of(strategy: Any) -> Dispatcher:
    """Returns the one dispatcher of a strategy."""
    if not hasattr(strategy, "_tfdist_dispatcher"):
        strategy._tfdist_dispatcher = Dispatcher(strategy, rendezvous.patience_from(os.environ))
    dispatcher: Dispatcher = strategy._tfdist_dispatcher
    return dispatcher


def _steps_per_execution(model: Any, feed: Any, callbacks: list[Any]) -> int:
    wanted: int = getattr(model, "steps_per_execution", 1) or 1
    if wanted > 1 or callback_rules.have_own_batch_hooks(callbacks):
        return wanted
    batches = feed.num_batches
    workers = dispatcher_of(model.distribute_strategy).workers
    return STEPS if batches is None else max(1, min(STEPS, batches // (2 * workers)))


def _verbosity(verbose: Any) -> Any:
    return 2 if verbose == "auto" and not sys.stdout.isatty() else verbose


def _no_data(epoch: int, start: int) -> None:
    if epoch == start:
        raise ValueError("Expected data to train on. Received: no batch at all.")
    warnings.warn(
        "Your input ran out of data; interrupting training. Use `.repeat()`, or a dataset that "
        "can be read once an epoch.",
        stacklevel=4,
    )
