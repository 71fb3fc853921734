"""`fit` and `evaluate` on parameter servers.

The coordinator reads the data and calls the callbacks; workers do the steps. Executions are
scheduled ahead, two for each worker, so `on_train_batch_begin` runs when one is scheduled and
`on_train_batch_end` when it and all before it are done, always in the order of the batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.engine import callbacks as callback_rules
from tfdist.engine.arguments import FitArguments
from tfdist.engine.peers import Peers
from tfdist.engine.servers.calls import executor_of
from tfdist.engine.servers.calls import prepare
from tfdist.engine.servers.calls import source
from tfdist.engine.servers.calls import steps_per_execution
from tfdist.engine.servers.calls import together
from tfdist.engine.servers.calls import verbosity
from tfdist.engine.servers.calls import works
from tfdist.engine.servers.epoch_logs import EpochLogs
from tfdist.engine.servers.flow import Flow
from tfdist.engine.training import Training
from tfdist.engine.watcher import has_watchers


@together
def fit(model: Any, asked: FitArguments) -> Any:
    """Trains `model` asynchronously; `tfdist.engine.fit` calls it.

    Raises:
        UnsupportedError: The model asks for what workers that do not wait for each other cannot do.
        PeerLostError: A parameter server died, or no worker answers.
    """
    sources = asked.sources(
        functools.partial(source, model.distribute_strategy),
        recoverable=has_watchers(asked.callbacks),
    )
    validate = None
    if sources.held_out is not None:

        def validate(training: Training, calls: Any) -> dict[str, Any]:
            return _evaluate(model, sources.held_out, calls, training)

    feed = sources.feed
    prepare(model, feed)
    calls = callback_rules.container(
        model,
        asked.callbacks,
        True,
        add_history=True,
        verbose=verbosity(asked.verbose),
        epochs=asked.epochs,
        steps=feed.num_batches,
    )
    peers = Peers(model.distribute_strategy, "fit")
    with Training(model, feed, peers, calls, asked.epochs) as training:
        return _fit(training, calls, validate, asked)


def _fit(
    training: Training,
    calls: Any,
    validate: Callable[[Training, Any], dict[str, Any]] | None,
    asked: FitArguments,
) -> Any:
    model, feed, epochs = training.model, training.feed, asked.epochs
    executor = executor_of(model, "train_step", feed)
    size = steps_per_execution(model, feed, calls.callbacks)
    model.stop_training = False
    if training.open():
        return model.history
    calls.on_train_begin()
    start = training.begin(model._initial_epoch or asked.initial_epoch)
    model._initial_epoch = None
    number = int(model.optimizer.iterations.numpy()) if model.optimizer is not None else 0
    for epoch in range(start, epochs):
        if training.is_stopped and not training.is_within_epoch:
            break
        goes_on = training.is_within_epoch
        if not goes_on:
            executor.execution.metrics.reset()
        calls.on_epoch_begin(epoch)
        logs = EpochLogs(executor, calls.callbacks)
        if goes_on:
            logs.resume(training.loop_state)
        training.enter(epoch)
        flow = Flow(training, executor, size, number, logs)
        for done in flow.executions(calls.on_train_batch_begin):
            told = logs.after(done)
            training.advance(len(done.rows), told)
            calls.on_train_batch_end(training.batch - 1, told)
            if model.stop_training:
                flow.stop()
            else:
                flow.pause_if_due()
        number += logs.steps
        if not training.has_data(start):
            break
        epoch_logs = training.trained_logs
        if epoch_logs is None:
            epoch_logs = logs.final()
        if validate is not None and model._should_eval(epoch, asked.validation_freq):
            training.trained_logs = dict(epoch_logs)
            found = validate(training, calls)
            epoch_logs.update({f"val_{name}": value for name, value in found.items()})
        calls.on_epoch_end(epoch, epoch_logs)
        training.leave(epoch_logs)
        training.boundary()
        if model.stop_training:
            break
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    calls.on_train_end(logs=training.epoch_logs)
    training.close()
    return model.history


@together
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
    feed = source(
        model.distribute_strategy, x, y, sample_weight, batch_size=batch_size, steps=steps
    )
    prepare(model, feed)
    calls = callback_rules.container(
        model, callbacks, True, verbose=verbosity(verbose), epochs=1, steps=feed.num_batches
    )
    logs = _evaluate(model, feed, calls)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(
    model: Any, feed: Any, calls: Any, training: Training | None = None
) -> dict[str, Any]:
    executor = executor_of(model, "test_step", feed)
    size = steps_per_execution(model, feed, calls.callbacks)
    model.stop_evaluating = False
    calls.on_test_begin()
    executor.execution.metrics.reset()
    feed.restart()
    logs = EpochLogs(executor, calls.callbacks)
    done = executor.run(works(feed, executor, size, 0), calls.on_test_batch_begin)
    for each in done:
        calls.on_test_batch_end(each.first + len(each.rows) - 1, logs.after(each))
        if training is not None and training.is_due_in_validation():
            done.close()  # Nothing is under way.
            training.boundary_in_validation()
            break
        if model.stop_evaluating:
            done.close()
    found = logs.final()
    calls.on_test_end(found)
    return found
