"""Callbacks under several workers: they all run everywhere, but only the chief's leave traces.

A callback may enter a collective (reading a metric, evaluating), so it must be called on every
worker; dropping one somewhere would hang the others. What must not happen twice is its effect on
files and screen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import keras
from keras import tree
from keras.src.utils import io_utils

#: Callbacks of Keras that do nothing but write, and are left out on other workers than the chief.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.BackupAndRestore,
)
#: Callbacks of Keras that never stop training within an epoch.
_NEVER_STOP = (
    *_WRITERS,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)
_TRAIN = (
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)
_TEST = ("on_test_batch_begin", "on_test_batch_end")
_PREDICT = ("on_predict_batch_begin", "on_predict_batch_end")


def as_list(callbacks: Any) -> list[Any]:
    """Returns the callbacks given to `fit`, in whatever form, as a list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(tree.flatten(callbacks)) if callbacks else []


def may_stop_training(callbacks: list[Any]) -> bool:
    """Whether one of them might set `stop_training` within an epoch."""
    return _has_hook(_free(callbacks), _TRAIN)


def may_stop_testing(callbacks: list[Any]) -> bool:
    """Whether one of them might set `stop_evaluating`."""
    return _has_hook(_free(callbacks), _TEST)


def may_stop_predicting(callbacks: list[Any]) -> bool:
    """Whether one of them might set `stop_predicting`."""
    return _has_hook(_free(callbacks), _PREDICT)


def _free(callbacks: list[Any]) -> list[Any]:
    return [callback for callback in callbacks if type(callback) not in _NEVER_STOP]


def read_training_logs(callbacks: list[Any], *, with_bar: bool) -> bool:
    """Whether one of them is told, and may look at, the logs of every step of training.

    Args:
        callbacks: Callbacks.
        with_bar: Whether a progress bar counts.
    """
    return _read_logs(callbacks, ("on_train_batch_end", "on_batch_end"), with_bar)


def read_test_logs(callbacks: list[Any], *, with_bar: bool) -> bool:
    """Whether one of them may look at the logs of every step of an evaluation."""
    return _read_logs(callbacks, ("on_test_batch_end",), with_bar)


def have_own_batch_hooks(callbacks: list[Any]) -> bool:
    """Whether one that is not Keras's wants to be called at every step."""
    steps = [hook for hook in (*_TRAIN, *_TEST, *_PREDICT) if hook != "on_epoch_begin"]
    return _has_hook(_free(callbacks), tuple(steps))


def act_on_epoch_begin(callbacks: list[Any]) -> bool:
    """Whether one that is not Keras's wants to be called when an epoch begins."""
    return _has_hook(_free(callbacks), ("on_epoch_begin",))


def read_every_log(callbacks: list[Any]) -> bool:
    """Whether one of them may look at the logs of every step, not only to draw them."""
    hooks = ("on_train_batch_end", "on_batch_end", "on_test_batch_end")
    return _read_logs(callbacks, hooks, with_bar=False)


def _read_logs(callbacks: list[Any], hooks: tuple[str, ...], with_bar: bool) -> bool:
    def looks(callback: Any) -> bool:
        if type(callback) is keras.callbacks.ProgbarLogger:
            return with_bar
        if type(callback) is keras.callbacks.ModelCheckpoint:
            return callback.save_freq != "epoch"
        if type(callback) is keras.callbacks.TensorBoard:
            return callback.update_freq != "epoch"
        return type(callback) not in _NEVER_STOP

    return _has_hook([callback for callback in callbacks if looks(callback)], hooks)


def _has_hook(callbacks: list[Any], hooks: tuple[str, ...]) -> bool:
    # LambdaCallback puts its functions on the instance, others override methods.
    return any(
        getattr(getattr(callback, hook, None), "__func__", None)
        is not getattr(keras.callbacks.Callback, hook)
        for callback in callbacks
        for hook in hooks
    )


def container(model: Any, callbacks: Any, is_chief: bool, **params: Any) -> Any:
    """Returns the `CallbackList` of this worker.

    Args:
        model: The model.
        callbacks: As given to `fit`.
        is_chief: Whether this worker writes.
        **params: As of `CallbackList`; `add_history` and `verbose` are understood.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if not is_chief:
            kept = [c for c in callbacks.callbacks if type(c) not in _WRITERS]
            callbacks.callbacks[:] = kept
        return callbacks
    listed = as_list(callbacks)
    if not is_chief:
        listed = [c for c in listed if type(c) not in _WRITERS]
    return keras.callbacks.CallbackList(
        listed,
        add_history=params.pop("add_history", False),
        add_progbar=params["verbose"] != 0,
        model=model,
        **params,
    )


@contextlib.contextmanager
def of_one_worker(callbacks: list[Any], is_chief: bool) -> Iterator[None]:
    """On other workers than the chief: silences callbacks and sends what they write to nowhere.

    Subclasses of Keras's writers may do more than write, so they are kept, with their output
    redirected: a CSV file to the null device, a TensorBoard directory to one that is deleted.
    """
    if is_chief:
        yield
        return
    scratch = None
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        # What Keras and its callbacks have to say goes through this one function.
        change(io_utils, "print_msg", lambda message, line_break=True: None)
        for callback in callbacks:
            if type(callback) in _WRITERS:
                continue
            if isinstance(callback, keras.callbacks.CSVLogger):
                change(callback, "filename", os.devnull)
            if isinstance(callback, keras.callbacks.TensorBoard):
                scratch = scratch or tempfile.mkdtemp(prefix="tfdist-scratch-")
                change(callback, "log_dir", scratch)
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
