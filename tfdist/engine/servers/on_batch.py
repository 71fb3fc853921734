"""`train_on_batch` and the like on parameter servers."""

from __future__ import annotations

from typing import Any

from keras import tree

from tfdist.engine.inputs import Feed
from tfdist.engine.servers.calls import executor_of
from tfdist.engine.servers.calls import prepare
from tfdist.engine.servers.calls import together
from tfdist.engine.servers.calls import works
from tfdist.engine.servers.epoch_logs import EpochLogs
from tfdist.engine.servers.executor import Executor
from tfdist.engine.servers.prediction import predict


@together
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
    prepare(model, feed)
    number = int(model.optimizer.iterations.numpy()) if model.optimizer is not None else 0
    return _on_batch(model, executor_of(model, "train_step", feed), feed, number, return_dict)


@together
def test_on_batch(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
) -> Any:
    """Tests on one batch, on a worker; arguments and result as of Keras's method."""
    model._assert_compile_called("test_on_batch")
    rows = len(tree.flatten(x)[0])
    feed = Feed(model.distribute_strategy, x, y, sample_weight, batch_size=rows)
    prepare(model, feed)
    return _on_batch(model, executor_of(model, "test_step", feed), feed, 0, return_dict)


def _on_batch(model: Any, executor: Executor, feed: Any, number: int, return_dict: bool) -> Any:
    # As in Keras, metrics go on from batch to batch until `reset_metrics`.
    executor.execution.metrics.load()
    logs = EpochLogs(executor, [])
    for done in executor.run(works(feed, executor, 1, number)):
        logs.after(done)
    found = logs.final()
    return found if return_dict else model._flatten_metrics_in_order(found)


def predict_on_batch(model: Any, x: Any) -> Any:
    """Predicts one batch, on a worker; arguments and result as of Keras's method."""
    return predict(model, x, batch_size=len(tree.flatten(x)[0]), verbose=0)
