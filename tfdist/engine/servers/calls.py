"""What `fit`, `evaluate`, `predict` and the calls for one batch have in common on servers."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.engine import build
from tfdist.engine import callbacks as callback_rules
from tfdist.engine import metrics
from tfdist.engine import scope
from tfdist.engine.inputs import Feed
from tfdist.engine.servers import tables
from tfdist.engine.servers.dispatcher import Dispatcher
from tfdist.engine.servers.executor import Executor
from tfdist.engine.servers.worker_data import WorkerData
from tfdist.engine.servers.worker_data import is_worker_data
from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError

#: Steps of an execution, unless `steps_per_execution` says more.
STEPS = 16
_EXECUTORS = "_tfdist_executors"


def together(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` that ends with the name of the server whose loss has ended it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = current.group()
        if group is None:
            return function(*args, **kwargs)
        with group.together(function.__name__):
            return function(*args, **kwargs)

    return call


def source(strategy: Any, x: Any, y: Any = None, weight: Any = None, **options: Any) -> Any:
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
    # An earlier process's place in it is not known: `options["recoverable"]` means nothing here.
    dispatcher = dispatcher_of(strategy)
    return WorkerData(dispatcher.coordinator, x, dispatcher.workers, options.get("steps"))


def works(feed: Any, executor: Executor, size: int, number: int) -> Any:
    """Returns the executions of one pass over the data."""
    if isinstance(feed, WorkerData):
        return feed.works(executor, size, number)
    return executor.over(feed.epoch(), size, number)


def prepare(model: Any, feed: Any, *, to_train: bool = True) -> None:
    """Refuses what servers cannot do, and builds what is not built yet."""
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


def executor_of(model: Any, step: str, feed: Any) -> Executor:
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


def steps_per_execution(model: Any, feed: Any, callbacks: list[Any]) -> int:
    """Returns the number of steps that a worker does at a time."""
    wanted: int = getattr(model, "steps_per_execution", 1) or 1
    if wanted > 1 or callback_rules.have_own_batch_hooks(callbacks):
        return wanted
    batches = feed.num_batches
    workers = dispatcher_of(model.distribute_strategy).workers
    return STEPS if batches is None else max(1, min(STEPS, batches // (2 * workers)))


def verbosity(verbose: Any) -> Any:
    """Returns how much is said: a redrawn bar in a log file is a line a step."""
    return 2 if verbose == "auto" and not sys.stdout.isatty() else verbose
