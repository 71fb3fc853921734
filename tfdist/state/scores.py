"""Where an evaluator writes what it has found: JSON lines and TensorBoard.

A line is written by one call that appends it whole, so that a reader sees all of it or nothing,
and two writers do not mix. After a restart the lines tell what has been done.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

FILE_NAME = "evaluations.jsonl"
#: The run that TensorBoard shows beside "train" and "validation".
RUN = "evaluator"


@dataclasses.dataclass(frozen=True)
class Score:
    """The metrics of one checkpoint.

    Attributes:
        file: Path of the checkpoint.
        version: Which version of the file it was.
        epoch: Complete epochs, or None where the checkpoint does not tell.
        step: Updates of the optimizer, or None where the checkpoint does not tell.
        metrics: Name to value.
        seconds: How long loading and evaluating took.
        time: When it was done, in seconds since 1970.
    """

    file: str
    version: str
    epoch: int | None
    step: int | None
    metrics: dict[str, float]
    seconds: float
    time: float

    @property
    def key(self) -> tuple[str, str]:
        """The key of its checkpoint."""
        return os.path.basename(self.file), self.version


class ScoreWriter:
    """Writes scores, and reads those of an earlier start.

    Args:
        directory: For the JSON lines; made if it is missing.
        log_dir: TensorBoard's directory, or None for no TensorBoard.
    """

    def __init__(self, directory: str, log_dir: str | None):
        self.path = os.path.join(directory, FILE_NAME)
        self._log_dir = log_dir
        self._board: Any = None

    def written(self) -> list[Score]:
        """Returns the scores that are there; broken lines are none."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except OSError:
            return []
        found = []
        names = {field.name for field in dataclasses.fields(Score)}
        for line in lines:
            try:
                record = json.loads(line)
                found.append(Score(**{name: record[name] for name in names}))
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def write(self, score: Score) -> None:
        """Adds a line, and the scalars to TensorBoard."""
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        # Not JSON's own: NaN and Infinity are no JSON, and other readers stop there.
        record = dataclasses.asdict(score)
        record["metrics"] = {k: v if v - v == 0 else str(v) for k, v in score.metrics.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line  # Somebody was killed while writing.
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
        if self._log_dir is not None:
            self._show(score)

    def close(self) -> None:
        """Closes TensorBoard's file."""
        if self._board is not None:
            self._board.close()

    def _show(self, score: Score) -> None:
        import tensorflow as tf

        if self._board is None:
            assert self._log_dir is not None
            self._board = tf.summary.create_file_writer(os.path.join(self._log_dir, RUN))
        with self._board.as_default():
            for name, value in score.metrics.items():
                # As Keras's own callback names and counts them, so that the curves lie together.
                if score.epoch is not None:
                    tf.summary.scalar(f"epoch_{name}", value, step=score.epoch - 1)
                if score.step is not None:
                    tf.summary.scalar(f"evaluation_{name}_vs_iterations", value, step=score.step)
        self._board.flush()
