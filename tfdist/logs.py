"""Log lines that say which task they come from: `[worker 1/4] message`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from tfdist.cluster.topology import Cluster


def role(cluster: Cluster) -> str:
    """Returns the mark of this process, for example "[worker 1/4]", or "" for a lone process."""
    if len(cluster.tasks) < 2 and not cluster.is_evaluator:
        return ""
    known = cluster.addresses.get(cluster.task.type, ())
    of = f"/{len(known)}" if known else ""
    return f"[{cluster.task.type} {cluster.task.index}{of}]"


class _Prefix(logging.Filter):
    """Puts the mark in front of each record once, however many handlers it passes."""

    def __init__(self, mark: str):
        super().__init__("")
        self.mark = mark

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "tfdist_marked", False):
            record.msg = f"{self.mark} {record.msg}"
            record.tfdist_marked = True
        return True


def install(cluster: Cluster, environ: Mapping[str, str] | None = None) -> None:
    """Marks every line of absl's logger. The launcher marks lines itself, so not under it."""
    from absl import logging as absl_logging

    environ = os.environ if environ is None else environ
    mark = role(cluster)
    logger = absl_logging.get_absl_logger()
    # INFO is where the choice of strategy and its reasons are said.
    if absl_logging.get_verbosity() < absl_logging.INFO:
        absl_logging.set_verbosity(absl_logging.INFO)
    # TensorFlow says at this level how it packed each collective.
    tensorflow = logging.getLogger("tensorflow")
    if tensorflow.level == logging.NOTSET:
        tensorflow.setLevel(logging.WARNING)
    if mark and not environ.get("TFDIST_LAUNCHED"):
        logger.filters[:] = [f for f in logger.filters if not isinstance(f, _Prefix)]
        logger.addFilter(_Prefix(mark))
