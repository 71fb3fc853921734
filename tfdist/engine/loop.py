"""`fit`, `evaluate` and `predict` for synchronous replicas.

The loop reads a batch, runs a step on every replica, tells the callbacks. Between processes it
makes sure of three things: that all start from the same arguments and weights, that all stop at
the same step, and that all report the same numbers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
from keras import tree
from keras.src.backend import config as keras_config
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils

from tfdist.engine import callbacks as callback_rules
from tfdist.engine import prepare
from tfdist.engine import replicas
from tfdist.engine import scope
from tfdist.engine.accumulation import Accumulation
from tfdist.engine.inputs import Feed
from tfdist.engine.inputs import executions
from tfdist.engine.logs import results
from tfdist.engine.peers import Peers
from tfdist.engine.statistics import Statistics
from tfdist.engine.steps import StepFunction


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
    """Trains `model`; arguments and result are those of `keras.Model.fit`.

    Every worker of a job calls it with the same arguments and gets the same `History`.

    Raises:
        DisagreementError: Workers were given different arguments.
        PeerLostError: Another worker died.
    """
    model._assert_compile_called("fit")
    peers = Peers(model.distribute_strategy, "fit")
    with peers.together():
        limit = keras_config.max_epochs()
        if limit and limit < epochs:
            warnings.warn(f"Limiting epochs to {limit}", stacklevel=2)
            epochs = limit
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        feed = Feed(
            model.distribute_strategy,
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        validation = None
        if validation_data is not None:
            val_x, val_y, val_weight = data_adapter_utils.unpack_x_y_sample_weight(validation_data)
            validation = Feed(
                model.distribute_strategy,
                val_x,
                val_y,
                val_weight,
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
            )

        def validate(calls: Any, what: str) -> dict[str, Any]:
            assert validation is not None
            if type(model).evaluate is keras.Model.evaluate:
                return _evaluate(model, validation, peers, calls, what)
            # A subclass that evaluates in its own way, called as Keras calls it.
            own: dict[str, Any] = model.evaluate(
                x=val_x,
                y=val_y,
                sample_weight=val_weight,
                batch_size=validation_batch_size or batch_size,
                steps=validation_steps,
                callbacks=calls,
                return_dict=True,
                _use_cached_eval_dataset=True,
            )
            return own

        agreed = {
            "epochs": epochs,
            "validation_data": "given" if validation else "not given",
            "validation_freq": validation_freq,
        }
        if validation is not None:
            agreed |= {f"validation {k}": v for k, v in prepare.data_facts(validation).items()}
        prepare.prepare(model, feed, peers, agreed)
        calls = callback_rules.as_list(callbacks)
        with callback_rules.of_one_worker(calls, peers.is_chief):
            return _fit(
                model,
                feed,
                validate if validation is not None else None,
                peers,
                callbacks,
                epochs,
                initial_epoch,
                _verbosity(verbose, peers),
                validation_freq,
            )


def _fit(
    model: Any,
    feed: Feed,
    validate: Callable[[Any, str], dict[str, Any]] | None,
    peers: Peers,
    callbacks: Any,
    epochs: int,
    initial_epoch: int,
    verbose: Any,
    validation_freq: Any,
) -> Any:
    calls = callback_rules.container(
        model,
        callbacks,
        peers.is_chief,
        add_history=True,
        verbose=verbose,
        epochs=epochs,
        steps=feed.num_batches,
    )
    model.stop_training = False
    model.make_train_function()
    calls.on_train_begin()
    # A callback may have restored weights and the epoch, on the chief alone perhaps.
    start = peers.chiefs("the epoch it starts from", model._initial_epoch or initial_epoch)
    model._initial_epoch = None
    # The state of a seed generator is a replica's own.
    peers.equalize(v for v in scope.variables_of(model) if "seed_generator" not in v.path)

    statistics = Statistics(model)
    accumulation = Accumulation(model)
    agree_every_step, reads_logs = peers.any_of(
        "its callbacks",
        callback_rules.may_stop_training(calls.callbacks),
        callback_rules.read_training_logs(calls.callbacks, with_bar=peers.group is None),
    )
    _set_metrics(model.train_function, reads_logs)

    logs: Any = {}
    training_logs = None
    for epoch in range(start, epochs):
        model.reset_metrics()
        calls.on_epoch_begin(epoch)
        done = 0
        accumulation.part()
        batches = feed.epoch()
        for begin, execution in executions(batches, model.steps_per_execution):
            counted = _Counted(execution)
            calls.on_train_batch_begin(begin)
            logs = model.train_function(counted)
            done = begin + counted.count
            calls.on_train_batch_end(done - 1, logs)
            if agree_every_step:
                model.stop_training = peers.any_in_step(model.stop_training)
            if model.stop_training and (agree_every_step or peers.group is None):
                break
        batches.close()
        accumulation.join()
        if not done:
            _no_data(epoch, start)
            break
        statistics.synchronize()
        what = f"the logs of epoch {epoch + 1}"
        epoch_logs = results(model, model.train_function, logs, peers, what)
        if validate is not None and model._should_eval(epoch, validation_freq):
            found = validate(calls, f"validation of epoch {epoch + 1}")
            epoch_logs.update({f"val_{name}": value for name, value in found.items()})
        calls.on_epoch_end(epoch, epoch_logs)
        training_logs = epoch_logs
        _agree_on_rate(model, peers, epoch)
        model.stop_training = peers.any(f"the end of epoch {epoch + 1}", model.stop_training)
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
                verbose=_verbosity(verbose, peers),
                epochs=1,
                steps=feed.num_batches,
            )
            logs = _evaluate(model, feed, peers, calls, "the results")
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def _evaluate(model: Any, feed: Feed, peers: Peers, calls: Any, what: str) -> dict[str, Any]:
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
    for begin, execution in executions(batches, model.steps_per_execution):
        counted = _Counted(execution)
        calls.on_test_batch_begin(begin)
        logs = model.test_function(counted)
        calls.on_test_batch_end(begin + counted.count - 1, logs)
        if _stops(peers, agree, model.stop_evaluating):
            break
    batches.close()
    found = results(model, model.test_function, logs, peers, what)
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
    """Predicts; arguments and result are those of `keras.Model.predict`.

    Every worker of a job calls it with the same arguments and gets all predictions, in the order
    of the examples.
    """
    peers = Peers(model.distribute_strategy, "predict")
    with peers.together():
        feed = Feed(model.distribute_strategy, x, batch_size=batch_size, steps=steps)
        prepare.prepare(model, feed, peers, to_train=False)
        listed = callback_rules.as_list(callbacks)
        with callback_rules.of_one_worker(listed, peers.is_chief):
            calls = callback_rules.container(
                model,
                callbacks,
                peers.is_chief,
                verbose=_verbosity(verbose, peers),
                epochs=1,
                steps=feed.num_batches,
            )
            return _predict(model, feed, peers, calls)


def _predict(model: Any, feed: Feed, peers: Peers, calls: Any) -> Any:
    model.make_predict_function()
    replicas.quiet(model.predict_function)
    model.stop_predicting = False
    agree = peers.any("its callbacks", callback_rules.may_stop_predicting(calls.callbacks))
    calls.on_predict_begin()
    parts: list[Any] = []
    batches = feed.epoch()
    for begin, execution in executions(batches, model.steps_per_execution):
        counted = list(execution)
        calls.on_predict_batch_begin(begin)
        data = [batch.unpacked(model.distribute_strategy) for batch in counted]
        parts.append(model.predict_function(data))
        calls.on_predict_batch_end(begin + len(counted) - 1, {"outputs": parts[-1]})
        if _stops(peers, agree, model.stop_predicting):
            break
    batches.close()
    calls.on_predict_end()
    if not parts:
        raise ValueError("Expected data to predict on. Received: no batch at all.")
    outputs = tree.map_structure(
        lambda *each: keras_trainer.potentially_ragged_concat(list(each)), *parts
    )
    return tree.map_structure(keras_trainer.convert_to_np_if_not_ragged, outputs)


def _stops(peers: Peers, agree: bool, flag: bool) -> bool:
    return peers.any_in_step(flag) if agree else flag and peers.group is None


class _Counted:
    """An iterator that counts what was taken."""

    def __init__(self, inner: Any):
        self._inner = inner
        self.count = 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        value = next(self._inner)
        self.count += 1
        return value


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


def _verbosity(verbose: Any, peers: Peers) -> Any:
    if not peers.is_chief:
        return 0
    if verbose == "auto" and peers.group is not None and not sys.stdout.isatty():
        return 2  # A line an epoch: a redrawn bar in a log file is a line a step.
    return verbose


def _no_data(epoch: int, start: int) -> None:
    if epoch == start:
        raise ValueError("Expected data to train on. Received: no batch at all.")
    warnings.warn(
        "Your input ran out of data; interrupting training. Use `.repeat()`, or a dataset that "
        "can be read once an epoch.",
        stacklevel=4,
    )
