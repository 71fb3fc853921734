"""`model.fit` in an evaluator's process: the same call, answered by evaluating checkpoints.

One script serves every task. Where the others train, the evaluator finds in the arguments of `fit`
what it needs: the data to evaluate on, and the callbacks that say where checkpoints and logs are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tfdist.errors import ConfigError
from tfdist.state.evaluator import Evaluator


def follow(
    model: Any,
    *,
    validation_data: Any = None,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
    callbacks: Any = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    **others: Any,
) -> Any:
    """Evaluates each checkpoint that the tasks that train write; returns after the last.

    Args:
        model: A compiled Keras model.
        validation_data: As for `fit`.
        validation_batch_size: As for `fit`.
        validation_steps: As for `fit`.
        callbacks: The callbacks of `fit`, of which none is called. A `ModelCheckpoint`, else a
            `BackupAndRestore`, tells where the checkpoints are; a `TensorBoard` where to log.
        epochs: As for `fit`: a checkpoint of that epoch is the last.
        batch_size: As for `fit`, where `validation_batch_size` says nothing.
        **others: Other arguments of `fit`, which mean nothing here.

    Returns:
        A `keras.callbacks.History` with `val_` metrics, one value per checkpoint, as `fit` returns.

    Raises:
        ConfigError: There is nothing to evaluate on, or no callback that writes checkpoints.
    """
    import keras

    del others
    if validation_data is None:
        raise ConfigError(
            "validation_data in the evaluator's call of fit",
            "validation_data=None",
            "pass validation_data to fit, in every task or in the evaluator's alone",
        )
    listed = _flat(callbacks)
    path = _checkpoints_of(listed)
    if path is None:
        raise ConfigError(
            "a callback that writes checkpoints for the evaluator to follow",
            f"callbacks {[type(callback).__name__ for callback in listed]}",
            "add keras.callbacks.ModelCheckpoint(path) or a BackupAndRestore to fit's callbacks",
        )
    boards = [c.log_dir for c in listed if isinstance(c, keras.callbacks.TensorBoard)]
    scores = Evaluator(
        model,
        validation_data,
        path,
        log_dir=boards[0] if boards else None,
        batch_size=validation_batch_size or batch_size,
        steps=validation_steps,
        epochs=epochs,
    ).run()
    history = keras.callbacks.History()
    history.set_model(model)
    history.on_train_begin()
    for number, score in enumerate(scores):
        history.epoch.append(number if score.epoch is None else score.epoch - 1)
        for name, value in score.metrics.items():
            history.history.setdefault(f"val_{name}", []).append(value)
    model.history = history
    return history


def _checkpoints_of(callbacks: list[Any]) -> str | None:
    """Returns where checkpoints are written; epochs are best told by a ModelCheckpoint's names."""
    import keras

    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            return os.fspath(callback.filepath)
    for callback in callbacks:
        # Keras's own, and those that do the same.
        directory = getattr(callback, "backup_dir", None)
        if directory:
            return os.fspath(directory)
    return None


def _flat(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    listed = getattr(callbacks, "callbacks", callbacks)
    return list(listed) if isinstance(listed, Iterable) else [listed]
