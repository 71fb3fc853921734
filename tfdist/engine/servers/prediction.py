"""`predict` on parameter servers."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import tree
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfdist.engine import callbacks as callback_rules
from tfdist.engine.servers.calls import executor_of
from tfdist.engine.servers.calls import prepare
from tfdist.engine.servers.calls import source
from tfdist.engine.servers.calls import steps_per_execution
from tfdist.engine.servers.calls import together
from tfdist.engine.servers.calls import verbosity
from tfdist.engine.servers.calls import works


@together
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
    feed = source(model.distribute_strategy, x, batch_size=batch_size, steps=steps)
    prepare(model, feed, to_train=False)
    calls = callback_rules.container(
        model, callbacks, True, verbose=verbosity(verbose), epochs=1, steps=feed.num_batches
    )
    executor = executor_of(model, "predict_step", feed)
    size = steps_per_execution(model, feed, calls.callbacks)
    model.stop_predicting = False
    calls.on_predict_begin()
    parts: list[Any] = []
    done = executor.run(works(feed, executor, size, 0), calls.on_predict_batch_begin)
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
