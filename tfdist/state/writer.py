"""Commits in the background, while training goes on.

    with AsyncWriter(store) as writer:
        arrays = writer.copy({v.path: v.value for v in model.variables})
        writer.submit(Snapshot(step, facts, arrays))     # returns at once
    # Here all that was submitted is durable.

One thread writes. It runs at the lowest claim on the processor that still gets on, and lets the
other threads run nearly all the time: they are asked to wait for it for microseconds, not for the
length of a write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from tfdist.errors import StaleWriterError
from tfdist.state.commit import Commit
from tfdist.state.commit import Snapshot
from tfdist.state.store import Store

log = logging.getLogger("absl")

#: 3 % of a core that others keep busy (Linux gives a thread 1024 / 1.25^n shares), all of an idle.
_NICENESS = 15

Work = Snapshot | Callable[[Store], Commit | None]


class AsyncWriter:
    """Writes commits one after the other in a thread of its own.

    At most one is being written and one waits. A newer one takes the place of the one that waits:
    on a slow disk there are fewer commits, and training does not wait. `submit` copies nothing:
    arrays must stay as they are until the commit is complete. `copy` makes such arrays.

    Args:
        store: Where to.
        on_commit: Called with each commit when it is complete, in the writing thread.

    Attributes:
        last: The newest commit that is complete, None before the first.
        skipped: How many gave way to newer ones.
    """

    def __init__(self, store: Store, *, on_commit: Callable[[Commit], None] | None = None):
        self.last: Commit | None = None
        self.skipped = 0
        self._told = 0
        self._store = store
        self._on_commit = on_commit
        self._changed = threading.Condition()
        self._waiting: Work | None = None
        self._is_writing = False
        self._error: BaseException | None = None
        self._lent: list[dict[str, np.ndarray]] = []
        self._free: list[dict[str, np.ndarray]] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written and nothing waits."""
        with self._changed:
            return not self._is_writing and self._waiting is None

    def submit(self, work: Work) -> None:
        """Has `work` committed, and returns at once.

        Args:
            work: A snapshot; or what writes a commit with `store.open_commit`, called in the
                writing thread.

        Raises:
            Exception: What the write before this one failed with; `work` is then not taken, nor
                what waited. A stale writer fails for ever, others may submit again.
        """
        with self._changed:
            self._raise()
            if not self._is_writing:
                self._is_writing = True
                # Not a daemon: a program that ends first completes what it has submitted.
                thread = threading.Thread(target=self._write_all, args=[work], name="tfdist-commit")
                thread.start()
                return
            self._skip()
            self._waiting = work

    def copy(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Copies values into memory that is used again once their snapshot is committed.

        Fresh memory of this size is had page by page from the system, which takes several times as
        long as the copy. There are two copies at most, one that is being written and this one: a
        snapshot that waits gives its memory up, as it would have its place at the next `submit`.

        Args:
            values: Arrays, or what NumPy can look at as such: tensors on the CPU, for example.

        Returns:
            Arrays for one `Snapshot`, whose `arrays` must be this very dict, and nothing else.
        """
        with self._changed:
            if isinstance(self._waiting, Snapshot):
                self._skip()
            memory = self._free.pop() if self._free else {}
        copies = {}
        for name, value in values.items():
            array, old = np.asarray(value), memory.get(name)
            if array.dtype.kind == "O":
                copies[name] = array.copy()
            elif old is not None and (old.shape, old.dtype) == (array.shape, array.dtype):
                np.copyto(old, array)
                copies[name] = old
            else:
                copies[name] = np.array(array, order="C")
        with self._changed:
            # What was never submitted is forgotten.
            self._lent = [*self._lent[-2:], copies]
        return copies

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all that was submitted is durable.

        Args:
            timeout: How long at most, in seconds.

        Returns:
            Whether it is.

        Raises:
            Exception: What a write failed with.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._is_writing:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            self._raise()
            return True

    def close(self) -> None:
        """Waits until all that was submitted is durable.

        Raises:
            Exception: What a write failed with.
        """
        if self.skipped > max(1, self._told):
            self._told = self.skipped
            log.warning(
                "%d commits were skipped: those before them were still being written to %s; saving "
                "less often loses nothing",
                self.skipped,
                self._store.directory,
            )
        self.wait()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # What ended the program is the cause to show.
        try:
            self.close()
        except Exception as late:
            log.error("the last commit failed: %s", late)

    def _write_all(self, first: Work) -> None:
        # Threads that this one starts inherit it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work: Work | None = first
        del first
        while work is not None:
            error = self._write(work)
            with self._changed:
                self._take_back(work)
                if error is not None:
                    self._error = error
                    self._take_back(self._waiting)
                    self._waiting = None
                work, self._waiting = self._waiting, None
                if work is None:
                    self._is_writing = False
                    self._changed.notify_all()

    def _write(self, work: Work) -> BaseException | None:
        try:
            if isinstance(work, Snapshot):
                commit: Commit | None = self._store.write(work)
            else:
                commit = work(self._store)
            if commit is not None:
                self.last = commit
                if self._on_commit is not None:
                    self._on_commit(commit)
        except BaseException as error:
            return error
        return None

    def _skip(self) -> None:
        """Gives up what waits, for something newer."""
        if self._waiting is None:
            return
        self.skipped += 1
        if self.skipped == 1:
            log.warning(
                "a commit was skipped: the one before is still being written to %s. More such are "
                "counted, and told of at the end",
                self._store.directory,
            )
        self._take_back(self._waiting)
        self._waiting = None

    def _take_back(self, work: Work | None) -> None:
        """Notes that the memory of a snapshot can be used again."""
        if not isinstance(work, Snapshot):
            return
        for index, arrays in enumerate(self._lent):
            if arrays is work.arrays:
                self._free = [self._lent.pop(index)]
                return

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if not isinstance(error, StaleWriterError):
            self._error = None
        raise error
