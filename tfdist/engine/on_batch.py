"""`train_on_batch` and the like for synchronous replicas."""

from __future__ import annotations

from typing import Any

from keras import tree
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfdist.engine import build
from tfdist.engine import scope
from tfdist.engine import steps
from tfdist.engine.accumulation import Accumulation
from tfdist.engine.peers import Peers


def on_batch(model: Any, call: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `train_on_batch`, `test_on_batch` or `predict_on_batch` on every replica of the job.

    Each worker passes its own batch, of the same size on every worker; every replica of a machine
    sees the machine's whole batch. What it returns is that worker's.
    """
    peers = Peers(model.distribute_strategy, call)
    with peers.together():
        peers.start_afresh()
        scope.adopt(model, model.distribute_strategy)
        if call != "train_on_batch":
            return original(model, *args, **kwargs)
        # Whoever trains batch by batch may read or save the optimizer after any of them.
        accumulation = Accumulation(model)
        accumulation.part()
        logs = original(model, *args, **kwargs)
        accumulation.join()
        return logs


def predict_on_batch(model: Any, x: Any) -> Any:
    """Predicts one batch on this worker; arguments and result as of Keras's method."""
    peers = Peers(model.distribute_strategy, "predict_on_batch")
    with peers.together():
        build.build(model, build.spec_of((x,)), to_train=False)
        outputs = steps.predict_here(model, x)
        return tree.map_structure(keras_trainer.convert_to_np_if_not_ragged, outputs)
