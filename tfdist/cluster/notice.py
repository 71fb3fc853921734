"""How the evaluator, which meets none of the tasks that train, learns that they have ended.

The launcher names a file in the evaluator's environment and writes it when the tasks that train
have ended with 0. The evaluator answers with a second file, and is then given all the time that
it needs for the last checkpoints; one that does not know the file is stopped after a while.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType

#: The variable that holds the path.
TRAINING_ENDED = "TFDIST_TRAINING_ENDED"
#: What the path of the answer has more.
HEARD = ".heard"


class EndNotice:
    """The two files, in a directory of their own that ends with the context.

    Attributes:
        path: The file that appears when training has ended.
    """

    def __init__(self) -> None:
        self._directory = ""
        self.path = ""

    def __enter__(self) -> EndNotice:
        self._directory = tempfile.mkdtemp(prefix="tfdist-run-")
        self.path = os.path.join(self._directory, "training-ended")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def give(self) -> None:
        """Says that training has ended."""
        with open(self.path, "a", encoding="utf-8"):
            pass

    @property
    def was_heard(self) -> bool:
        """Whether the evaluator has answered."""
        return os.path.exists(self.path + HEARD)
