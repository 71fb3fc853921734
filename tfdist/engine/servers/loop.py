"""`fit`, `evaluate` and `predict` on parameter servers.

The coordinator reads the data and calls the callbacks; workers do the steps. Executions are
scheduled ahead, two for each worker, so `on_train_batch_begin` runs when one is scheduled and
`on_train_batch_end` when it and all before it are done, always in the order of the batches.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils.python_utils import pythonify_logs

from tfdist.cluster import rendezvous
from tfdist.engine import build
from tfdist.engine import callbacks as callback_rules
from tfdist.engine import scope
from tfdist.engine.inputs import Feed
from tfdist.engine.servers import tables
from tfdist.engine.servers.dispatcher import Dispatcher
from tfdist.engine.servers.executor import Done
from tfdist.engine.servers.executor import Executor
from tfdist.errors import UnsupportedError

#: Steps of an execution, unless `steps_per_execution` says more.
STEPS = 8
#: A progress bar is drawn that often, so its numbers need not be newer.
_LOGS_SECONDS = 0.1


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
    feed = Feed(
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
        held_out = Feed(
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
    feed: Feed,
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
        logs = _Logs(executor, calls.callbacks)
        batches = feed.epoch()
        done = executor.run(batches, size, number, calls.on_train_batch_begin)
        for each in done:
            calls.on_train_batch_end(each.first + each.steps - 1, logs.after(each))
            if model.stop_training:
                done.close()
        batches.close()
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
    feed = Feed(model.distribute_strategy, x, y, sample_weight, batch_size=batch_size, steps=steps)
    _prepare(model, feed)
    calls = callback_rules.container(
        model, callbacks, True, verbose=_verbosity(verbose), epochs=1, steps=feed.num_batches
    )
    logs = _evaluate(model, feed, calls)
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(model: Any, feed: Feed, calls: Any) -> dict[str, Any]:
    executor = _executor(model, "test_step", feed)
    size = _steps_per_execution(model, feed, calls.callbacks)
    model.stop_evaluating = False
    calls.on_test_begin()
    executor.execution.metrics.reset()
    feed.restart()
    logs = _Logs(executor, calls.callbacks)
    batches = feed.epoch()
    done = executor.run(batches, size, 0, calls.on_test_batch_begin)
    for each in done:
        calls.on_test_batch_end(each.first + each.steps - 1, logs.after(each))
        if model.stop_evaluating:
            done.close()
    batches.close()
    found = logs.final()
    calls.on_test_end(found)
    return found


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
    feed = Feed(model.distribute_strategy, x, batch_size=batch_size, steps=steps)
    _prepare(model, feed, to_train=False)
    calls = callback_rules.container(
        model, callbacks, True, verbose=_verbosity(verbose), epochs=1, steps=feed.num_batches
    )
    executor = _executor(model, "predict_step", feed)
    size = _steps_per_execution(model, feed, calls.callbacks)
    model.stop_predicting = False
    calls.on_predict_begin()
    parts: list[Any] = []
    batches = feed.epoch()
    done = executor.run(batches, size, 0, calls.on_predict_batch_begin)
    for each in done:
        parts += each.outputs
        last = each.first + each.steps - 1
        calls.on_predict_batch_end(last, {"outputs": each.outputs[-1]})
        if model.stop_predicting:
            done.close()
    batches.close()
    calls.on_predict_end()
    if not parts:
        raise ValueError("Expected data to predict on. Received: no batch at all.")
    return tree.map_structure(
        lambda *each: keras_trainer.convert_to_np_if_not_ragged(
            keras_trainer.potentially_ragged_concat(list(each))
        ),
        *parts,
    )


class _Logs:
    """What callbacks are told of the executions of an epoch."""

    def __init__(self, executor: Executor, callbacks: list[Any]):
        self._metrics = executor.execution.metrics
        self._newest = callback_rules.read_every_log(callbacks)
        self._logs: dict[str, Any] = {}
        self._at = float("-inf")
        self._sums: dict[str, Any] = {}
        self.steps = 0

    def after(self, done: Done) -> dict[str, Any]:
        """Returns the logs after an execution; for a progress bar, some that are as good as new."""
        self.steps += done.steps
        for output in done.outputs:
            self._add(output if isinstance(output, dict) else {"loss": output})
        now = time.monotonic()
        if self._newest or now - self._at > _LOGS_SECONDS:
            self._logs, self._at = self._current(), now
        return self._logs

    def final(self) -> dict[str, Any]:
        """Returns the logs of the whole epoch, and puts the states into the metrics."""
        self._metrics.store()
        return self._current()

    def _add(self, output: dict[str, Any]) -> None:
        for name, value in output.items():
            known = self._sums.get(name, 0.0)
            self._sums[name] = known + np.asarray(value) if np.ndim(value) == 0 else value

    def _current(self) -> dict[str, Any]:
        known = self._metrics.results()
        own = {
            name: total / max(1, self.steps) if np.ndim(total) == 0 else total
            for name, total in self._sums.items()
            if name not in known
        }
        names = [*self._sums] or [*known]
        logs: dict[str, Any] = pythonify_logs({**own, **{n: known[n] for n in names if n in known}})
        return logs


def _prepare(model: Any, feed: Feed, *, to_train: bool = True) -> None:
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
    tables.mark(model)


def _executor(model: Any, step: str, feed: Feed) -> Executor:
    """Returns the executor of `model.<step>`, with the graphs that it has already."""
    known = model.__dict__.setdefault("_tfdist_executors", {})
    function = getattr(model, step)
    key = step, repr(feed.spec), _compiled(model)
    if key not in known:
        known[key] = Executor(model, function, feed.spec, _dispatcher(model.distribute_strategy))
    executor: Executor = known[key]
    return executor


def _compiled(model: Any) -> tuple[Any, ...]:
    """Returns what a graph depends on that `compile` and `trainable` may change."""
    return (
        id(model.optimizer),
        id(model._compile_loss),
        id(model._compile_metrics),
        tuple(id(v) for v in model.trainable_variables),
    )


def _dispatcher(strategy: Any) -> Dispatcher:
    if not hasattr(strategy, "_tfdist_dispatcher"):
        strategy._tfdist_dispatcher = Dispatcher(strategy, rendezvous.patience_from(os.environ))
    dispatcher: Dispatcher = strategy._tfdist_dispatcher
    return dispatcher


def _steps_per_execution(model: Any, feed: Feed, callbacks: list[Any]) -> int:
    wanted: int = getattr(model, "steps_per_execution", 1) or 1
    if wanted > 1 or callback_rules.have_own_batch_hooks(callbacks):
        return wanted
    batches = feed.num_batches
    workers = _dispatcher(model.distribute_strategy).workers
    return STEPS if batches is None else max(1, min(STEPS, batches // (2 * workers)))


def _verbosity(verbose: Any) -> Any:
    import sys

    return 2 if verbose == "auto" and not sys.stdout.isatty() else verbose


def _no_data(epoch: int, start: int) -> None:
    if epoch == start:
        raise ValueError("Expected data to train on. Received: no batch at all.")
    warnings.warn(
        "Your input ran out of data; interrupting training. Use `.repeat()`, or a dataset that "
        "can be read once an epoch.",
        stacklevel=4,
    )
