"""Saving a model: by the chief alone, whole or not at all.

Every worker may call `model.save` and its like. Where reading the model is a collective (it holds
variables that are summed over replicas when read), every worker must read, and those that do not
write save into a scratch directory that is deleted. The chief writes beside the target and renames
it into place: a reader finds the old file or the new one, never a part.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.cluster import current
from tfdist.engine import role
from tfdist.engine import scope

log = logging.getLogger("absl")

Save = Callable[..., Any]

_said = False
_saves: list[str] = []
_OLD = "old-"
_BEGUN, _DONE = "save begun", "save done"
_NAMED_SECONDS = 5.0
_CHIEF_BEGINS_SECONDS = 25.0
_CHIEF_ENDS_SECONDS = 3600.0


def guarded(original: Save) -> Save:
    """Returns `original(model, filepath, ...)` made safe for models under a strategy."""

    @functools.wraps(original)
    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = getattr(self, "_distribute_strategy", None)
        target = _local_path(filepath)
        if not role.trains():
            _say_once(filepath)
            return None
        if strategy is None:
            return original(self, filepath, *args, **kwargs)
        if not _is_chief(strategy):
            if _reads_collectively(self):
                with tempfile.TemporaryDirectory(prefix="tfdist-scratch-") as scratch:
                    name = os.path.basename(os.fspath(filepath).rstrip("/"))
                    original(self, os.path.join(scratch, name), *args, **kwargs)
            _say_once(filepath)
            _wait_for_chief(target or str(filepath))
            return None
        overwrite = kwargs.get("overwrite", args[0] if args else True)

        def write(path: Any) -> Any:
            return _outside_scope(lambda: original(self, path, *args, **kwargs))

        with _announced(target or str(filepath)):
            if target is None or overwrite is False:
                # Object stores show an object when it is complete. overwrite=False asks the user.
                return write(filepath)
            return _write_aside(target, write)

    return save


def closing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `CSVLogger.on_train_end` that closes files on remote file systems, too."""

    @functools.wraps(original)
    def on_train_end(self: Any, logs: Any = None) -> None:
        if self.csv_file is not None and not hasattr(self.csv_file, "closed"):
            self.csv_file.close()
            self.csv_file = None
        original(self, logs)

    return on_train_end


def _outside_scope(write: Callable[[], Any]) -> Any:
    """Runs `write` where no strategy's scope is open.

    Keras builds throw-away optimizers while it saves. In an open scope their variables are made in
    a collective that the chief alone would enter, and wait in for ever.
    """
    if not tf.distribute.has_strategy():
        return write()
    # Scopes belong to a thread.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(write).result()


@contextlib.contextmanager
def _announced(path: str) -> Iterator[None]:
    """Tells the others that the chief begins to save, and that it is done, with or without luck."""
    group = current.group()
    if group is None:
        yield
        return
    group.announce(_BEGUN, path)
    try:
        # What is being written is written to its end, whoever dies meanwhile.
        with group.alone():
            yield
    finally:
        group.announce(_DONE, path)


def _wait_for_chief(path: str) -> None:
    """Waits on another worker until the chief has saved, so that the file may be read at once.

    The chief waits for nobody, so it may save alone. A save of the chief is known by the name of
    its file, numbers aside: the workers may each save to a directory of their own, as in
    TensorFlow's tutorial. Where the names differ too, saves are counted.
    """
    group = current.group()
    if group is None:
        return
    name = _name(path)
    _saves.append(name)
    own = _saves.count(name)

    def begun(paths: list[str]) -> bool:
        return [_name(each) for each in paths].count(name) >= own

    def counted(paths: list[str]) -> bool:
        return begun(paths) or len(paths) >= len(_saves)

    # A save that the chief does not begin is one that it does not make.
    for reached, seconds in ((begun, _NAMED_SECONDS), (counted, _CHIEF_BEGINS_SECONDS)):
        if group.wait_for_news(_BEGUN, reached, seconds):
            group.wait_for_news(_DONE, reached, _CHIEF_ENDS_SECONDS)
            return
    _saves.remove(name)
    log.warning("the chief does not save %s; on this worker nothing is written", path)


def _name(path: str) -> str:
    return re.sub(r"\d+", "#", os.path.basename(path.rstrip("/")))


def _say_once(filepath: Any) -> None:
    global _said
    if not _said:
        _said = True
        log.info("only the chief writes; this worker leaves %s and the like to it", filepath)


def _is_chief(strategy: Any) -> bool:
    if not strategy.extended._in_multi_worker_mode():
        return True
    group = current.group()
    return group is None or group.cluster.is_chief


def _reads_collectively(model: Any) -> bool:
    on_read = tf.VariableSynchronization.ON_READ
    return any(v.value.synchronization == on_read for v in scope.variables_of(model))


def _local_path(filepath: Any) -> str | None:
    try:
        path = os.fspath(filepath)
    except TypeError:
        return None  # A file object.
    if not isinstance(path, str) or "://" in path:
        return None
    return os.path.abspath(path)


def _write_aside(target: str, write: Callable[[str], Any]) -> Any:
    parent, name = os.path.split(target)
    prefix = f".{name}.tfdist-"
    if not os.path.isdir(parent):
        return write(target)  # Let Keras say what it says of a missing directory.
    _sweep(parent, name, prefix)
    aside = os.path.join(parent, prefix + secrets.token_hex(4))
    os.mkdir(aside)
    try:
        result = write(os.path.join(aside, name))
        # A sharded save makes several files; the one that names the others comes last.
        for entry in sorted(os.listdir(aside), key=lambda entry: entry == name):
            _move(os.path.join(aside, entry), os.path.join(parent, entry))
        return result
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move(source: str, target: str) -> None:
    """Puts `source` in the place of `target`, files by one atomic rename after their data."""
    if not os.path.isdir(source):
        descriptor = os.open(source, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(source, target)
        return
    # A directory cannot replace one that is not empty: the old one steps aside for a moment.
    old = None
    if os.path.lexists(target):
        old = os.path.join(os.path.dirname(source), _OLD + secrets.token_hex(4))
        os.rename(target, old)
    os.rename(source, target)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _restore(aside: str, target: str) -> None:
    """Puts a directory back that had stepped aside when its successor was not yet in place."""
    if not os.path.lexists(target):
        for entry in os.listdir(aside):
            if entry.startswith(_OLD):
                os.rename(os.path.join(aside, entry), target)
                return


def _sweep(parent: str, name: str, prefix: str) -> None:
    """Removes what an earlier save of the same target left when it was killed."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(parent):
            if entry.startswith(prefix):
                _restore(os.path.join(parent, entry), os.path.join(parent, name))
                shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)
