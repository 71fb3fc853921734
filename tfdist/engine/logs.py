"""What a call of fit or evaluate reports: values over all examples, the same on every worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.utils.python_utils import pythonify_logs

from tfdist.engine.metrics import was_updated
from tfdist.engine.peers import Peers


def results(model: Any, function: Any, logs: Any, peers: Peers, what: str) -> dict[str, Any]:
    """Returns the values over all examples of all replicas, the same on every worker.

    Args:
        model: The model.
        function: What has run the steps, a `StepFunction` or one of the user's own.
        logs: What it returned last.
        peers: The other workers.
        what: What is reported, for messages.
    """
    own = model._get_metrics_result_or_logs(logs)
    if not isinstance(own, dict):
        own = logs = {"loss": own}
    if own is not logs:
        return _as_logs(own)
    # A custom step reports what it likes. Metrics know all examples; of other values this
    # process has only its own, of the last batch.
    metrics = {metric.name: metric for metric in model.metrics}
    known = {
        name: _plain(metrics[name].result())
        for name in logs
        if name in metrics and was_updated(metrics[name])
    }
    rest = {name: _plain(value) for name, value in logs.items() if name not in known}
    if rest:
        rest = peers.mean(what, rest, getattr(function, "weight", 1.0))
    return _as_logs({**rest, **known})


def _as_logs(values: dict[str, Any]) -> dict[str, Any]:
    # Flat, in the order of names, plain numbers: as Keras hands logs to callbacks.
    logs: dict[str, Any] = pythonify_logs({name: _plain(value) for name, value in values.items()})
    return logs


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if tf.is_tensor(value):
        value = value.numpy()
    return float(value) if np.ndim(value) == 0 and not isinstance(value, (str, bytes)) else value
