"""`predict` for synchronous replicas."""

from __future__ import annotations

from typing import Any

from keras import tree
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfdist.engine import callbacks as callback_rules
from tfdist.engine import prepare
from tfdist.engine import replicas
from tfdist.engine.inputs import Feed
from tfdist.engine.inputs import executions
from tfdist.engine.loop import stops
from tfdist.engine.loop import verbosity
from tfdist.engine.peers import Peers


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
                verbose=verbosity(verbose, peers),
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
        if stops(peers, agree, model.stop_predicting):
            break
    batches.close()
    calls.on_predict_end()
    if not parts:
        raise ValueError("Expected data to predict on. Received: no batch at all.")
    outputs = tree.map_structure(
        lambda *each: keras_trainer.potentially_ragged_concat(list(each)), *parts
    )
    return tree.map_structure(keras_trainer.convert_to_np_if_not_ragged, outputs)
