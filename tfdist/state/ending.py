"""How an evaluator knows that no checkpoint will come any more.

An evaluator meets none of the tasks that train, so it looks for signs:

| sign | where |
|---|---|
| the launcher says so (`TFDIST_TRAINING_ENDED`) | under `tfdist run` |
| a file `training-ended` in the directory of the checkpoints, newer than the evaluator | anywhere |
| the chief's address could be reached, and now cannot for a minute | clusters of several tasks |
| nothing new for half an hour, and no chief that could be reached | the last resort |
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

from tfdist.cluster.dial import connect_once
from tfdist.cluster.dial import split_address
from tfdist.cluster.notice import HEARD
from tfdist.cluster.notice import TRAINING_ENDED
from tfdist.cluster.topology import Cluster

log = logging.getLogger("absl")

MARKER = "training-ended"
#: A cluster that is started again as a whole is away for so long.
CHIEF_SECONDS = 60.0
IDLE_SECONDS = 1800.0
_PROBE_SECONDS = 5.0
_CONNECT_SECONDS = 2.0


def mark_end(directory: str | os.PathLike[str]) -> None:
    """Tells the evaluators that follow `directory` that training has ended."""
    path = os.path.join(os.fspath(directory), MARKER)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{time.time():.0f}\n")


class Ending:
    """Watches for the signs.

    Args:
        directory: Where the checkpoints are.
        cluster: The cluster, or None for training in one process.
        environ: The environment.
        idle_seconds: How long nothing new may come while there is no sign at all.
    """

    def __init__(
        self,
        directory: str,
        cluster: Cluster | None,
        environ: Mapping[str, str],
        idle_seconds: float = IDLE_SECONDS,
    ):
        self._marker = os.path.join(directory, MARKER)
        self._notice = environ.get(TRAINING_ENDED, "")
        self._chief = ""
        if cluster is not None and len(cluster.tasks) > 1:
            self._chief = cluster.address(cluster.chief)
        self._idle_seconds = idle_seconds
        self._started = time.time()
        self._probe_at = 0.0
        self._reached_at: float | None = None
        self._news_at = time.monotonic()

    def note_news(self) -> None:
        """Notes that a checkpoint has come."""
        self._news_at = time.monotonic()

    def has_come(self) -> bool:
        """Whether training has ended."""
        if self._notice and os.path.exists(self._notice):
            # The launcher now waits until this process ends.
            with open(self._notice + HEARD, "a", encoding="utf-8"):
                pass
            return True
        if self._is_marked():
            return True
        if self._notice:
            return False
        self._probe()
        now = time.monotonic()
        if self._reached_at is not None and now - self._reached_at > CHIEF_SECONDS:
            log.info("the chief (%s) has ended", self._chief)
            return True
        idle = now - max(self._news_at, self._reached_at or 0.0)
        if idle > self._idle_seconds:
            log.warning("no new checkpoint and no sign of the chief for %.0f s", idle)
            return True
        return False

    def _is_marked(self) -> bool:
        try:
            return os.stat(self._marker).st_mtime >= self._started
        except OSError:
            return False

    def _probe(self) -> None:
        now = time.monotonic()
        if not self._chief or now < self._probe_at:
            return
        self._probe_at = now + _PROBE_SECONDS
        try:
            connect_once(*split_address(self._chief), _CONNECT_SECONDS).close()
        except (OSError, UnicodeError, ValueError):
            return
        self._reached_at = now
