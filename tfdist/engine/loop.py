"""`fit` and `evaluate` for one device and for synchronous replicas.

The loop reads a batch, runs a step on every replica, tells the callbacks. Between processes it
makes sure of three things: that all start from the same arguments and weights, that all stop at
the same step, and that all report the same numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine import callbacks as callback_rules
from tfdist.engine import prepare
from tfdist.engine import scope
from tfdist.engine.accumulation import Accumulation
from tfdist.engine.arguments import FitArguments
from tfdist.engine.batch import Batch
from tfdist.engine.inputs import Feed
from tfdist.engine.inputs import executions
from tfdist.engine.kinds import Kinds
from tfdist.engine.logs import results
from tfdist.engine.peers import Peers
from tfdist.engine.replicas import is_synchronous
from tfdist.engine.statistics import Statistics
from tfdist.engine.steps import StepFunction
from tfdist.engine.training import Training
from tfdist.engine.watcher import has_watchers


def fit(model: Any, asked: FitArguments) -> Any:
    """Trains `model`; `tfdist.engine.fit` calls it.

    Raises:
        DisagreementError: Workers were given different arguments.
        PeerLostError: Another worker died.
    """
    peers = Peers(model.distribute_strategy, "fit")
    with peers.together():
        is_watched = has_watchers(asked.callbacks)
        sources = asked.sources(
            functools.partial(Feed, model.distribute_strategy), recoverable=is_watched
        )
        feed, held_out = sources.feed, sources.held_out

        def validate(training: Training, calls: Any, what: str) -> dict[str, Any]:
            if type(model).evaluate is keras.Model.evaluate:
                return _evaluate(model, held_out, peers, calls, what, training)
            # A subclass that evaluates in its own way, called as Keras calls it.
            own: dict[str, Any] = model.evaluate(
                **sources.evaluate, callbacks=calls, return_dict=True, _use_cached_eval_dataset=True
            )
            return own

        agreed = {
            "epochs": asked.epochs,
            "validation_data": "given" if held_out else "not given",
            "validation_freq": asked.validation_freq,
            "a BackupAndRestore": "given" if is_watched else "not given",
        }
        if held_out is not None:
            agreed |= {f"validation {k}": v for k, v in prepare.data_facts(held_out).items()}
        prepare.prepare(model, feed, peers, agreed)
        with callback_rules.of_one_worker(callback_rules.as_list(asked.callbacks), peers.is_chief):
            calls = callback_rules.container(
                model,
                asked.callbacks,
                peers.is_chief,
                add_history=True,
                verbose=verbosity(asked.verbose, peers),
                epochs=asked.epochs,
                steps=feed.num_batches,
            )
            model.stop_training = False
            model.make_train_function()
            if is_watched and isinstance(model.train_function, StepFunction):
                model.train_function.traces_alike = _has_fixed_inner_shapes(feed.spec)
            with Training(model, feed, peers, calls, asked.epochs, held_out) as training:
                return _fit(training, calls, validate if held_out is not None else None, asked)


def _fit(
    training: Training,
    calls: Any,
    validate: Callable[[Training, Any, str], dict[str, Any]] | None,
    asked: FitArguments,
) -> Any:
    model, peers, epochs = training.model, training.peers, asked.epochs
    if training.open():
        return model.history
    calls.on_train_begin()
    # A callback may have restored weights and the epoch, on the chief alone perhaps.
    start = peers.chiefs("the epoch it starts from", model._initial_epoch or asked.initial_epoch)
    model._initial_epoch = None
    # The state of a seed generator is a replica's own.
    peers.equalize(v for v in scope.variables_of(model) if "seed_generator" not in v.path)
    start = training.begin(start)

    statistics = Statistics(model)
    accumulation = Accumulation(model)
    agree_every_step, reads_logs = peers.any_of(
        "its callbacks",
        callback_rules.may_stop_training(calls.callbacks),
        callback_rules.read_training_logs(calls.callbacks, with_bar=peers.group is None),
    )
    _set_metrics(model.train_function, reads_logs)

    alone = None if is_synchronous(model.distribute_strategy) else model.distribute_strategy
    for epoch in range(start, epochs):
        if training.is_stopped and not training.is_within_epoch:
            break
        if not training.is_within_epoch:
            model.reset_metrics()
        calls.on_epoch_begin(epoch)
        training.enter(epoch)
        accumulation.part()
        batches = training.batches()
        for _, execution in executions(batches, model.steps_per_execution):
            counted = _Counted(execution, alone, training.kinds)
            calls.on_train_batch_begin(training.batch)
            logs = model.train_function(counted)
            training.advance(counted.count, logs)
            calls.on_train_batch_end(training.batch - 1, logs)
            if agree_every_step:
                model.stop_training = peers.any_in_step(model.stop_training)
            training.boundary()
            if model.stop_training and (agree_every_step or peers.group is None):
                break
        batches.close()
        accumulation.join()
        if not training.has_data(start):
            break
        statistics.synchronize()
        what = f"the logs of epoch {epoch + 1}"
        epoch_logs = training.trained_logs
        if epoch_logs is None:
            epoch_logs = results(model, model.train_function, training.logs, peers, what)
        if validate is not None and model._should_eval(epoch, asked.validation_freq):
            training.trained_logs = dict(epoch_logs)
            found = validate(training, calls, f"validation of epoch {epoch + 1}")
            epoch_logs.update({f"val_{name}": value for name, value in found.items()})
        calls.on_epoch_end(epoch, epoch_logs)
        _agree_on_rate(model, peers, epoch)
        model.stop_training = peers.any(f"the end of epoch {epoch + 1}", model.stop_training)
        training.leave(epoch_logs)
        training.boundary()
        if model.stop_training:
            break

    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    calls.on_train_end(logs=training.epoch_logs)
    training.close()
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
    """Evaluates `model`; arguments and result are those of `keras.Model.evaluate`.

    Every worker of a job calls it with the same arguments and gets the same result.
    """
    kwargs.pop("_use_cached_eval_dataset", None)  # As `fit` of Keras passes it on.
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    model._assert_compile_called("evaluate")
    peers = Peers(model.distribute_strategy, "evaluate")
    with peers.together():
        feed = Feed(
            model.distribute_strategy, x, y, sample_weight, batch_size=batch_size, steps=steps
        )
        prepare.prepare(model, feed, peers)
        listed = callback_rules.as_list(callbacks)
        with callback_rules.of_one_worker(listed, peers.is_chief):
            calls = callback_rules.container(
                model,
                callbacks,
                peers.is_chief,
                verbose=verbosity(verbose, peers),
                epochs=1,
                steps=feed.num_batches,
            )
            logs = _evaluate(model, feed, peers, calls, "the results")
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(
    model: Any, feed: Feed, peers: Peers, calls: Any, what: str, training: Training | None = None
) -> dict[str, Any]:
    model.make_test_function()
    model.stop_evaluating = False
    agree, reads_logs = peers.any_of(
        "its callbacks",
        callback_rules.may_stop_testing(calls.callbacks),
        callback_rules.read_test_logs(calls.callbacks, with_bar=peers.group is None),
    )
    _set_metrics(model.test_function, reads_logs)
    calls.on_test_begin()
    logs: Any = {}
    model.reset_metrics()
    feed.restart()
    batches = feed.epoch()
    alone = None if is_synchronous(model.distribute_strategy) else model.distribute_strategy
    for begin, execution in executions(batches, model.steps_per_execution):
        counted = _Counted(execution, alone)
        calls.on_test_batch_begin(begin)
        logs = model.test_function(counted)
        calls.on_test_batch_end(begin + counted.count - 1, logs)
        if training is not None:
            training.boundary_in_validation()
        if stops(peers, agree, model.stop_evaluating):
            break
    batches.close()
    found = results(model, model.test_function, logs, peers, what)
    calls.on_test_end(found)
    return found


def stops(peers: Peers, agree: bool, flag: bool) -> bool:
    """Returns whether all workers are to stop, where one of them has set `flag`."""
    return peers.any_in_step(flag) if agree else flag and peers.group is None


class _Counted:
    """An iterator over batches that counts what was taken.

    Args:
        inner: Iterator over what a feed yields.
        strategy: The default strategy, under which a step is Keras's own and takes plain data;
            else None.
        kinds: Where the shapes of its batches are noted.
    """

    def __init__(self, inner: Any, strategy: Any, kinds: Kinds | None = None):
        self._inner = inner
        self._strategy = strategy
        self._kinds = kinds
        self.count = 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        value = next(self._inner)
        self.count += 1
        if self._strategy is not None and isinstance(value, Batch):
            value = value.unpacked(self._strategy)
            if self._kinds is not None:
                self._kinds.note(value)
        return value


def _has_fixed_inner_shapes(spec: Any) -> bool:
    """Whether batches differ in the number of examples only, so that there are few sizes."""
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(spec)]
    return all(s is not None and s.rank and s[1:].is_fully_defined() for s in shapes)


def _set_metrics(function: Any, known: bool) -> None:
    if isinstance(function, StepFunction):
        function.knows_metrics = known


def _agree_on_rate(model: Any, peers: Peers, epoch: int) -> None:
    optimizer = model.optimizer
    rate = getattr(optimizer, "_learning_rate", None)
    if peers.group is None or not isinstance(rate, keras.Variable):
        return
    mine = float(rate.value.numpy())
    chief = peers.chiefs(f"the learning rate after epoch {epoch + 1}", mine)
    if chief != mine:
        optimizer.learning_rate = chief


def verbosity(verbose: Any, peers: Peers) -> Any:
    """Returns how much this worker says."""
    if not peers.is_chief:
        return 0
    if verbose == "auto" and peers.group is not None and not sys.stdout.isatty():
        return 2  # A line an epoch: a redrawn bar in a log file is a line a step.
    return verbose
