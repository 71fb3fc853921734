"""Log lines that say which task they come from: `[worker 1/4] message`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from tfdist.cluster.topology import Cluster

#: As absl writes it, without the number of the thread.
_FORMAT = "%(levelname).1s%(asctime)s %(filename)s:%(lineno)d] %(message)s"
_TIME = "%m%d %H:%M:%S"


def role(cluster: Cluster) -> str:
    """Returns the mark of this process, for example "[worker 1/4]", or "" for a lone process."""
    if len(cluster.tasks) < 2 and not cluster.is_evaluator:
        return ""
    known = cluster.addresses.get(cluster.task.type, ())
    of = f"/{len(known)}" if known else ""
    return f"[{cluster.task.type} {cluster.task.index}{of}]"


class _Handler(logging.Handler):
    """Shows lines on standard error as long as the program has set up no logging of its own.

    Python would then show warnings only, and how a job is run would go unsaid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT, _TIME))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            # One write a line: other threads write, too.
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


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
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler())
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
