"""What callbacks remember, as plain values, and back into callbacks of another process.

A callback with `get_state()` and `set_state(state)` is asked. Of any other its attributes are taken
that have changed since training began: counters, best values, lists. What is no plain value (open
files, functions, models) stays behind. What has not changed is not saved, so arguments that were
given other values for a restart keep those.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import zlib
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.callbacks.monitor_callback import MonitorCallback

from tfdist.engine import plain

log = logging.getLogger("absl")

#: Keras's own that remember nothing, or whose place is kept in another way.
_WITHOUT = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.CSVLogger,
    keras.callbacks.BackupAndRestore,
)
_NEVER = frozenset({"model", "_model", "params", "_params"})
#: What is longer, as JSON, is no small state.
_LONGEST = 2**22
#: Bytes of an array that is always saved: looking whether it has changed would take as long.
_LARGE = 2**22
_counter = itertools.count()


class CallbackStates:
    """The states of the callbacks of one call of `fit`.

    Args:
        callbacks: Callbacks that have not begun yet or have just begun; what differs from now is
            their state.
    """

    def __init__(self, callbacks: Iterable[Any]):
        self._callbacks = {
            name: each for name, each in _named(callbacks) if not isinstance(each, _WITHOUT)
        }
        self._made = self._now()
        self._before: dict[str, dict[str, str]] = {}

    def begin(self) -> None:
        """Takes what the callbacks have now as what they begin with."""
        self._before = self._now()

    def _now(self) -> dict[str, dict[str, str]]:
        return {
            name: _texts(callback)
            for name, callback in self._callbacks.items()
            if not _has_own(callback)
        }

    def capture(
        self, arrays: dict[str, np.ndarray] | None, *, ended: bool = False
    ) -> dict[str, Any]:
        """Returns what they remember, by name, fit for JSON.

        Args:
            arrays: Where arrays are put; None leaves them out.
            ended: Whether training has ended: who goes on from here trains nothing, so that
                nobody tells the callbacks that it begins.
        """
        began = self._made if ended else self._before
        found: dict[str, Any] = {}
        for name, callback in self._callbacks.items():
            if _has_own(callback):
                found[name] = {"own": self._encoded(callback.get_state(), arrays, name, "own")}
                continue
            before = began.get(name, {})
            state = {}
            for key, text in _texts(callback).items():
                if before.get(key) != text:
                    value = _unsigned(callback, key, vars(callback)[key])
                    state[key] = self._encoded(value, arrays, name, key)
            if state:
                found[name] = {"attributes": state}
        return found

    def restore(
        self,
        states: Mapping[str, Any],
        arrays: Any,
        chiefs: Mapping[str, Any],
        *,
        anew: bool = False,
    ) -> None:
        """Gives callbacks of the same names what was captured.

        Args:
            states: What `capture` has returned on this worker.
            arrays: Mapping of name to array, those of the chief.
            chiefs: What `capture` has returned on the chief, for callbacks that have arrays here
                which the chief's have not.
            anew: Whether what they have changed meanwhile and what was not captured gets the value
                again that they began with.
        """
        if anew:
            for name, callback in self._callbacks.items():
                if not _has_own(callback):
                    _begin_anew(callback, self._before.get(name, {}))
        for name, state in states.items():
            callback = self._callbacks.get(name)
            if callback is None:
                log.warning("no callback %s here; what it remembered is left out", name)
                continue
            try:
                found = plain.decode(state, arrays)
            except KeyError:
                found = plain.decode(chiefs[name], arrays)
            if "own" in found:
                callback.set_state(found["own"])
            else:
                for key, value in found["attributes"].items():
                    setattr(callback, key, _signed(callback, key, value))

    def _encoded(self, value: Any, arrays: dict[str, np.ndarray] | None, *name: str) -> Any:
        if arrays is None:
            arrays = {}
        return plain.encode(value, arrays, "/".join(("callbacks", *name)))


def _named(callbacks: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    counts: dict[str, int] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        counts[kind] = counts.get(kind, 0) + 1
        yield f"{kind} {counts[kind]}", callback


def _has_own(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(
        getattr(callback, "set_state", None)
    )


def _texts(callback: Any) -> dict[str, str]:
    """Returns a text for each attribute that is a plain value, another one for another value."""
    found = {}
    for key, value in vars(callback).items():
        if key in _NEVER:
            continue
        arrays: dict[str, np.ndarray] = {}
        try:
            text = json.dumps(plain.encode(_unsigned(callback, key, value), arrays), sort_keys=True)
        except (plain.NotPlainError, RecursionError):
            continue
        if len(text) > _LONGEST:
            log.warning("%s.%s is too long to be saved", type(callback).__name__, key)
            continue
        text += "".join(map(_mark, arrays.values()))
        found[key] = text if len(text) < 200 else f"#{hash(text)}"  # This is no JSON.
    return found


def _begin_anew(callback: Any, before: dict[str, str]) -> None:
    """Gives attributes that have changed the values of `before`, where that holds them."""
    for key, text in _texts(callback).items():
        if before.get(key, text) != text:
            with contextlib.suppress(ValueError):
                setattr(callback, key, plain.decode(json.loads(before[key])))


def _unsigned(callback: Any, key: str, value: Any) -> Any:
    """Returns what is saved of an attribute.

    Keras makes `min_delta` negative where less is better, once a process: when it finds out, and
    sets `monitor_op`, which is a function and not saved.
    """
    return abs(value) if _is_turned(callback, key) and isinstance(value, (int, float)) else value


def _signed(callback: Any, key: str, value: Any) -> Any:
    """Returns what an attribute gets, given what was saved of it."""
    if not _is_turned(callback, key) or not isinstance(value, (int, float)):
        return value
    return -abs(value) if callback.monitor_op is keras.ops.less else abs(value)


def _is_turned(callback: Any, key: str) -> bool:
    return key == "min_delta" and isinstance(callback, MonitorCallback)


def _mark(array: np.ndarray) -> str:
    """Returns a text that changes with an array; at every call if that is large."""
    content = zlib.crc32(array.tobytes()) if array.nbytes < _LARGE else next(_counter)
    return f"{id(array)} {content}"


def reopen_tables(callbacks: Iterable[Any], epoch: int) -> list[Any]:
    """Lets CSV files of an interrupted training go on, without the rows that are made again.

    Args:
        callbacks: Callbacks that have not begun yet.
        epoch: The first epoch that will end in this process.

    Returns:
        Those callbacks that append only for this once.
    """
    changed = []
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.CSVLogger):
            continue
        if not callback.append:
            callback.append = True
            changed.append(callback)
        if tf.io.gfile.exists(callback.filename):
            _cut(callback.filename, callback.sep, epoch)
    return changed


def _cut(path: str, separator: str, epoch: int) -> None:
    with tf.io.gfile.GFile(path) as file:
        text = file.read()
    lines = text.splitlines(keepends=True)
    while lines and (not lines[-1].endswith("\n") or _epoch_of(lines[-1], separator) >= epoch):
        lines.pop()
    if len(lines) == len(text.splitlines()):
        return
    aside = f"{path}.tfdist-new"
    with tf.io.gfile.GFile(aside, "w") as file:
        file.write("".join(lines))
    tf.io.gfile.rename(aside, path, overwrite=True)


def _epoch_of(line: str, separator: str) -> int:
    try:
        return int(line.split(separator, 1)[0])
    except ValueError:
        return -1
