"""When to commit: every so many steps, every so many seconds, or after every epoch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tfdist.errors import ConfigError

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*s")


class Schedule:
    """Says when the next commit is due.

    Args:
        every: "epoch", a number of steps, or seconds as text: "60s".
        clock: Seconds that only go up.

    Attributes:
        steps: Steps between two commits, or None.
        seconds: Seconds between two commits, or None.

    Raises:
        ConfigError: `every` is none of these.

    Example:
        >>> Schedule("60s").seconds
        60.0
    """

    def __init__(self, every: str | int, clock: Callable[[], float] = time.monotonic):
        self.steps: int | None = None
        self.seconds: float | None = None
        self._clock = clock
        match = _SECONDS.fullmatch(every) if isinstance(every, str) else None
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            self.steps = every
        elif match and float(match[1]) > 0:
            self.seconds = float(match[1])
        elif every != "epoch":
            raise ConfigError(
                "a number of steps, 'epoch' or seconds such as '60s' as save_every",
                repr(every),
                "pass for example save_every=100",
            )
        self.begin(0)

    def begin(self, step: int) -> None:
        """Counts from here on.

        Args:
            step: Steps that are done.
        """
        self._step = step
        self._at = self._clock()

    def is_due(self, step: int, is_between_epochs: bool) -> bool:
        """Whether a commit is due, by this process's clock.

        Args:
            step: Steps that are done.
            is_between_epochs: Whether an epoch has just ended.
        """
        if self.steps is not None:
            return step - self._step >= self.steps
        if self.seconds is not None:
            return self._clock() - self._at >= self.seconds
        return is_between_epochs
