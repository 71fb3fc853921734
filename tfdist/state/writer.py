"""Commits in the background, while training goes on.

    with AsyncWriter(store) as writer:
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
from types import TracebackType

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
    on a slow disk there are fewer commits, and training does not wait. Nothing is copied: arrays
    must be the caller's own and stay as they are until the commit is complete.

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
        self._store = store
        self._on_commit = on_commit
        self._changed = threading.Condition()
        self._waiting: Work | None = None
        self._is_writing = False
        self._error: BaseException | None = None

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
            if self._waiting is not None:
                self.skipped += 1
                log.warning(
                    "a commit was skipped: the one before is still being written to %s",
                    self._store.directory,
                )
            self._waiting = work
            if not self._is_writing:
                self._is_writing = True
                # Not a daemon: a program that ends first completes what it has submitted.
                threading.Thread(target=self._write_all, name="tfdist-commit").start()

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

    def _write_all(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                work, self._waiting = self._waiting, None
                if work is None:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
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
                with self._changed:
                    self._error = error
                    self._waiting = None
            # Its arrays are free from here on.
            del work

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if not isinstance(error, StaleWriterError):
            self._error = None
        raise error
