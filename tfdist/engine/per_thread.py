"""A value that each thread has for itself, for as long as a block runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic
from typing import TypeVar

T = TypeVar("T")


class PerThread(Generic[T]):
    """What is current in this thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> T | None:
        """Returns the current value of this thread, or None."""
        value: T | None = getattr(self._local, "value", None)
        return value

    @contextlib.contextmanager
    def having(self, value: T) -> Iterator[None]:
        """Makes `value` the current one of this thread."""
        outer = self.get()
        self._local.value = value
        try:
            yield
        finally:
            self._local.value = outer
