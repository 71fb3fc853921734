"""Evaluates each checkpoint that training writes, in a process of its own.

    evaluator = Evaluator(model, validation_data, "checkpoints", log_dir="logs")
    scores = evaluator.run()        # returns when training has ended and the last is evaluated

Files are read while others write them: what cannot be read is tried again later, what has vanished
is left out, and neither ends the evaluator. One that is started again goes on where it was.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.detect import detect
from tfdist.cluster.topology import Cluster
from tfdist.errors import ConfigError
from tfdist.errors import TfdistError
from tfdist.state import checkpoints
from tfdist.state.checkpoints import Checkpoint
from tfdist.state.checkpoints import Folder
from tfdist.state.ending import IDLE_SECONDS
from tfdist.state.ending import Ending
from tfdist.state.scores import Score
from tfdist.state.scores import ScoreWriter

log = logging.getLogger("absl")

_LONGEST_PAUSE = 30.0
#: Tries after which a file is given up when it stays as it is and training has ended.
_LAST_TRIES = 3
#: Tries after which a file that can be read, but not loaded, is taken not to fit the model.
_MISFITS = 5


@dataclasses.dataclass
class _Trouble:
    tries: int = 0
    again_at: float = 0.0


class Evaluator:
    """Follows a directory of checkpoints.

    Args:
        model: A compiled Keras model like the one that trains.
        data: What `model.evaluate` takes: a dataset, or a tuple of inputs, targets and sample
            weights; or a function that returns a dataset.
        directory: Directory of the checkpoints, or the path that `ModelCheckpoint` was given, with
            its fields such as `{epoch}`. It need not exist yet.
        log_dir: TensorBoard's directory; the scalars go to its run "evaluator". None writes none.
        scores_dir: Directory of `evaluations.jsonl`; by default that of the checkpoints.
        batch_size: For data given as arrays.
        steps: Batches to evaluate; None evaluates all.
        epochs: Epochs that training will have: a checkpoint of that epoch is the last.
        checkpoint: The `tf.train.Checkpoint` that those of a `tf.train.CheckpointManager` are
            written from; by default one that holds the model as `model`.
        poll_seconds: Pause between two looks at the directory.
        idle_seconds: How long nothing may come while there is no sign of those who train.
        environ: Environment; this process's by default.

    Example:
        >>> Evaluator(model, (x, y), "run/{epoch:03d}.weights.h5").run()[-1].metrics["loss"]
        0.25
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        directory: str | os.PathLike[str],
        *,
        log_dir: str | os.PathLike[str] | None = None,
        scores_dir: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        checkpoint: Any = None,
        poll_seconds: float = 1.0,
        idle_seconds: float = IDLE_SECONDS,
        environ: Mapping[str, str] | None = None,
    ):
        self._model = model
        self._data = _data(data)
        self._folder = Folder(directory)
        self._writer = ScoreWriter(
            os.fspath(scores_dir) if scores_dir is not None else self._folder.directory,
            None if log_dir is None else os.fspath(log_dir),
        )
        self._batch_size = batch_size
        self._steps = steps
        self._epochs = epochs
        self._into = checkpoint
        self._poll_seconds = poll_seconds
        environ = os.environ if environ is None else environ
        self._ending = Ending(self._folder.directory, _cluster(environ), environ, idle_seconds)
        self._started = time.time()
        self._done: set[tuple[str, str]] = set()
        self._troubles: dict[tuple[str, str], _Trouble] = {}
        self._scores: list[Score] = []

    def run(self) -> list[Score]:
        """Evaluates what is there and what comes, until the last.

        Returns:
            The scores, in the order in which the checkpoints were written.

        Raises:
            ConfigError: No checkpoint fits the model.
        """
        self._scores = self._writer.written()
        self._done = {score.key for score in self._scores}
        log.info("following the checkpoints in %s", self._folder.directory)
        try:
            self._run()
        finally:
            self._writer.close()
        return self._scores

    def _run(self) -> None:
        while True:
            # Asked first: what was written before the end is seen after it.
            ended = self._ending.has_come()
            waiting = False
            for checkpoint in self._folder.find():
                if checkpoint.key in self._done:
                    continue
                if not self._take(checkpoint, ended):
                    waiting = True
                elif self._is_last(checkpoint):
                    log.info("epoch %s was the last", checkpoint.epoch)
                    return
            if ended and not waiting:
                log.info("training has ended; %d checkpoints evaluated", len(self._scores))
                return
            time.sleep(self._poll_seconds)

    def _take(self, checkpoint: Checkpoint, ended: bool) -> bool:
        """Evaluates a checkpoint; returns whether nothing is left to do with it."""
        trouble = self._troubles.setdefault(checkpoint.key, _Trouble())
        if time.monotonic() < trouble.again_at and not ended:
            return False
        started = time.monotonic()
        self._build()
        try:
            step = checkpoints.load(self._model, checkpoint, self._into)
        except Exception as error:  # noqa: BLE001  half a file fails in any way
            return self._put_off(checkpoint, trouble, error, ended)
        if not checkpoint.is_current():
            log.info("%s was written again or removed meanwhile", checkpoint.path)
            return True  # The new version, if there is one, is another checkpoint.
        metrics = self._evaluate()
        score = Score(
            file=checkpoint.path,
            version=checkpoint.version,
            epoch=checkpoint.epoch,
            step=step,
            metrics=metrics,
            seconds=round(time.monotonic() - started, 3),
            time=round(time.time(), 3),
        )
        self._writer.write(score)
        self._scores.append(score)
        self._done.add(checkpoint.key)
        self._ending.note_news()
        place = f"epoch {score.epoch}" if score.epoch is not None else f"step {score.step}"
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        log.info("%s (%s): %s", os.path.basename(checkpoint.path), place, shown)
        return True

    def _put_off(
        self, checkpoint: Checkpoint, trouble: _Trouble, error: Exception, ended: bool
    ) -> bool:
        if not checkpoint.is_current():
            log.info("%s was written again or removed meanwhile", checkpoint.path)
            return True
        trouble.tries += 1
        fits_not = isinstance(error, ValueError) and not isinstance(error, OSError)
        if fits_not and trouble.tries >= _MISFITS and not self._scores:
            raise ConfigError(
                f"a model that the checkpoint {checkpoint.path} fits",
                f"{type(error).__name__}: {error}",
                "build the evaluator's model as the one that trains",
            ) from error
        if ended and trouble.tries >= _LAST_TRIES:
            log.error("%s cannot be read and is left out: %s", checkpoint.path, error)
            self._done.add(checkpoint.key)
            return True
        if trouble.tries == 1:
            log.warning("%s cannot be read yet: %s", checkpoint.path, error)
        pause = min(self._poll_seconds * 2.0 ** (trouble.tries - 1), _LONGEST_PAUSE)
        trouble.again_at = time.monotonic() + pause
        return False

    def _build(self) -> None:
        """Makes the variables of a model that learns its shapes from data."""
        if not self._model.built:
            self._model.evaluate(**self._data, batch_size=self._batch_size, steps=1, verbose=0)

    def _evaluate(self) -> dict[str, float]:
        found = self._model.evaluate(
            **self._data,
            batch_size=self._batch_size,
            steps=self._steps,
            verbose=0,
            return_dict=True,
        )
        return {name: float(value) for name, value in found.items()}

    def _is_last(self, checkpoint: Checkpoint) -> bool:
        # One that was there before belongs to an earlier run, perhaps.
        fresh = checkpoint.modified / 1e9 >= self._started
        return bool(fresh and self._epochs and (checkpoint.epoch or 0) >= self._epochs)


def _data(data: Any) -> dict[str, Any]:
    """Returns the data as `evaluate` takes them."""
    import keras
    import tensorflow as tf

    if callable(data) and not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset)):
        try:
            data = data()
        except TypeError:  # As a dataset_fn of tf.distribute, which wants to know its place.
            data = data(tf.distribute.InputContext())
    if isinstance(data, (tuple, list)):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(tuple(data))
        return {"x": x, "y": y, "sample_weight": weights}
    return {"x": data}


def _cluster(environ: Mapping[str, str]) -> Cluster | None:
    try:
        return detect(environ)
    except TfdistError as error:
        log.warning("no cluster to watch: %s", error)
        return None
