"""Commits in the background, while training goes on.

    with AsyncWriter(store) as writer:
        writer.submit(Snapshot(step, facts, arrays))     # returns at once
    # Here all that was submitted is durable.

One thread writes. It takes a small share of a core (`pace.py`), at a low priority, and lets the
other threads run nearly all the time: they are asked to wait for it for microseconds, not for the
length of a write. Where somebody waits for a commit, it is written as fast as can be.
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
from tfdist.state.pace import Pace
from tfdist.state.store import Store

log = logging.getLogger("absl")

#: 3 % of a core that others keep busy (Linux gives a thread 1024 / 1.25^n shares), all of an idle.
_NICENESS = 15
#: Seconds of rest after which the writer looks whether the program is about to end.
_NAP = 0.1

Work = Snapshot | Callable[[Store], Commit | None]


class AsyncWriter:
    """Writes commits one after the other in a thread of its own.

    At most one is being written and one waits. A newer one takes the place of the one that waits:
    on a slow disk there are fewer commits, and training does not wait. What is being written while
    another waits is completed without rest. `submit` copies nothing: arrays must stay as they are
    until the commit is complete. Those of `Training.capture` do.

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
        self._waiting: tuple[Work, float] | None = None
        self._is_writing = False
        self._impatient = 0  # Threads that wait for all to be durable.
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written and nothing waits."""
        with self._changed:
            return not self._is_writing and self._waiting is None

    def submit(self, work: Work, *, spent: float = 0.0) -> None:
        """Has `work` committed, and returns at once.

        Args:
            work: A snapshot; or what writes a commit with `store.open_commit`, called in the
                writing thread.
            spent: Seconds for which training has waited for the snapshot. The longer, the slower
                it is written, so that it takes the same share of the time.

        Raises:
            Exception: What the write before this one failed with; `work` is then not taken, nor
                what waited. A stale writer fails for ever, others may submit again.
        """
        with self._changed:
            self._raise()
            if not self._is_writing:
                self._is_writing = True
                # A list, which can be emptied: a thread holds its arguments until it ends. Not a
                # daemon: a program that ends first completes what it has submitted.
                first = [(work, spent)]
                threading.Thread(target=self._write_all, args=[first], name="tfdist-commit").start()
                return
            if self._waiting is not None:
                self.skipped += 1
                log.warning(
                    "a commit was skipped: the one before is still being written to %s",
                    self._store.directory,
                )
            self._waiting = work, spent
            self._changed.notify_all()  # Who writes makes haste.

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all that was submitted is durable.

        Args:
            timeout: How long at most, in seconds.

        Returns:
            Whether it is.

        Raises:
            Exception: What a write failed with.
        """
        with self._changed:
            self._impatient += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: not self._is_writing, timeout):
                    return False
            finally:
                self._impatient -= 1
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

    def _write_all(self, first: list[tuple[Work, float]]) -> None:
        # Threads that this one starts inherit it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        taken: tuple[Work, float] | None = first.pop()
        while taken is not None:
            error = self._write(*taken)
            with self._changed:
                if error is not None:
                    self._error, self._waiting = error, None
                taken, self._waiting = self._waiting, None
                if taken is None:
                    self._is_writing = False
                    self._changed.notify_all()

    def _write(self, work: Work, spent: float) -> BaseException | None:
        try:
            if isinstance(work, Snapshot):
                commit: Commit | None = self._store.write(work, pace=Pace(self._rest, spent))
            else:
                commit = work(self._store)
            if commit is not None:
                self.last = commit
                if self._on_commit is not None:
                    self._on_commit(commit)
        except BaseException as error:
            return error
        return None

    def _rest(self, seconds: float) -> None:
        """Lets time pass, unless somebody waits for the commit."""
        end = time.monotonic() + seconds
        with self._changed:
            while (left := end - time.monotonic()) > 0 and not self._is_urgent():
                self._changed.wait(min(left, _NAP))

    def _is_urgent(self) -> bool:
        # The interpreter ends when this thread has.
        is_ending = not threading.main_thread().is_alive()
        return self._impatient > 0 or self._waiting is not None or is_ending

    def _raise(self) -> None:
        error = self._error
        if error is None:
            return
        if not isinstance(error, StaleWriterError):
            self._error = None
        raise error
