"""Trains one experiment. The same command runs in every process of every cluster.

    python -m trainer.task --config configs/digits-single.yaml --set training.epochs=3

It finds its place in the cluster by itself, trains, and writes model.keras and metrics.json to
the model directory, checkpoints to the checkpoint directory, history.csv and TensorBoard events
to the log directory. An evaluator evaluates every checkpoint of the others instead. Each directory
is the first that is given of: its flag; AIP_MODEL_DIR, AIP_CHECKPOINT_DIR or
AIP_TENSORBOARD_LOG_DIR; the config; runs/<experiment>/...

Interrupted and started again, it goes on where it was. Exit codes: 0 done; 2 a mistake in flags,
config or cluster, or no progress in several starts; 1 the training failed; 143 preempted, all is
saved: start it again.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

import tfdist
from tfdist import logs
from tfdist.errors import EXIT_OK
from tfdist.errors import EXIT_USAGE
from tfdist.errors import ConfigError
from tfdist.errors import TfdistError
from tfdist.errors import UnsupportedError
from tfdist.launch.restarts import STALLED_STARTS
from tfdist.launch.restarts import starts_in_vain
from trainer import experiments
from trainer.config import Config
from trainer.config import load

_CONFIG = flags.DEFINE_string(
    "config", None, "YAML file that says what to train, or its content as {...}."
)
_SET = flags.DEFINE_multi_string("set", [], "key.path=value to change in the config; repeatable.")
_MODEL_DIR = flags.DEFINE_string("model-dir", None, "Receives model.keras and metrics.json.")
_CHECKPOINT_DIR = flags.DEFINE_string("checkpoint-dir", None, "Receives checkpoints.")
_LOG_DIR = flags.DEFINE_string("log-dir", None, "Receives history.csv and TensorBoard events.")

_DASHED = ("model-dir", "checkpoint-dir", "log-dir")


@dataclasses.dataclass(frozen=True)
class Directories:
    """Where the results go, local or remote (`gs://`)."""

    model: str
    checkpoint: str
    log: str


def directories(
    config: Config, given: Mapping[str, str | None], environ: Mapping[str, str]
) -> Directories:
    """Chooses each directory: the flag, then the variable, then the config, then its default.

    Args:
        config: The config.
        given: Values of the flags by name.
        environ: The environment; an empty variable counts as not set.
    """
    output = config.output
    parent = output.directory or os.path.join("runs", config.experiment.name)
    return Directories(
        model=given.get("model-dir")
        or environ.get("AIP_MODEL_DIR")
        or output.model_dir
        or os.path.join(parent, "model"),
        checkpoint=given.get("checkpoint-dir")
        or environ.get("AIP_CHECKPOINT_DIR")
        or output.checkpoint_dir
        or os.path.join(parent, "checkpoints"),
        log=given.get("log-dir")
        or environ.get("AIP_TENSORBOARD_LOG_DIR")
        or output.log_dir
        or os.path.join(parent, "logs"),
    )


def train(config: Config, places: Directories, is_chief: bool) -> dict[str, float]:
    """Trains, evaluates and writes the results.

    Args:
        config: What to train.
        places: Where results go.
        is_chief: Whether this process writes what Keras does not write itself. Every process
            calls `model.save` and the writing callbacks: they read variables together, and the
            engine lets only the chief write.

    Returns:
        Metric name to its value on the test data; nothing in an evaluator.
    """
    # Here and not at the top: a mistake in a config must not wait for seconds of imports.
    import keras
    import tensorflow as tf

    strategy = tfdist.strategy(config.strategy.name, replicas=config.strategy.replicas)
    experiment = experiments.get(config.experiment.name)
    options = config.experiment.options
    training = config.training
    data = experiment.datasets(
        options,
        global_batch_size=config.data.global_batch_size,
        shuffle_buffer=config.data.shuffle_buffer,
        seed=training.seed,
    )
    # After the data: whoever had to prepare it first has drawn random numbers on the way.
    keras.utils.set_random_seed(training.seed)
    with strategy.scope():
        model = experiment.build_model(options, data.spec)
        model.compile(
            **experiment.compile_arguments(training.learning_rate),
            steps_per_execution=training.steps_per_execution,
        )
    for directory in dataclasses.astuple(places):
        tf.io.gfile.makedirs(directory)
    logging.info(
        "Training %s with %s: %d replicas, %d weights.",
        config.experiment.name,
        type(strategy).__name__,
        strategy.num_replicas_in_sync,
        model.count_params(),
    )
    model.fit(
        data.train,
        epochs=training.epochs,
        steps_per_epoch=training.steps_per_epoch,
        validation_data=data.validation,
        callbacks=_callbacks(config, places),
        verbose=training.verbose,
    )
    if tfdist.detect().is_evaluator:
        return {}  # It has evaluated every checkpoint; all else is the chief's.
    result = model.evaluate(data.test, verbose=0, return_dict=True)
    model.save(os.path.join(places.model, "model.keras"))
    if is_chief:
        report = {
            "experiment": config.experiment.name,
            "epochs": training.epochs,
            "replicas": strategy.num_replicas_in_sync,
            "test": result,
        }
        _write(os.path.join(places.model, "metrics.json"), json.dumps(report, indent=2) + "\n")
        for name, value in sorted(result.items()):
            print(f"test {name} {value:.4f}", flush=True)
    return result


def _callbacks(config: Config, places: Directories) -> list[Any]:
    import keras

    callbacks: list[Any] = [keras.callbacks.CSVLogger(os.path.join(places.log, "history.csv"))]
    if config.output.backup != "none" and not tfdist.detect().is_evaluator:
        backup = _backup_directory(places)
        callbacks.append(tfdist.callbacks.BackupAndRestore(backup, save_every=config.output.backup))
    if config.output.tensorboard:
        callbacks.append(keras.callbacks.TensorBoard(places.log, write_graph=False))
    keep = config.output.checkpoint
    if keep != "none":
        name = "epoch-{epoch:04d}" if keep == "all" else keep
        callbacks.append(
            keras.callbacks.ModelCheckpoint(
                os.path.join(places.checkpoint, f"{name}.keras"),
                monitor="val_loss",
                save_best_only=keep == "best",
            )
        )
    return callbacks


def _backup_directory(places: Directories) -> str:
    return os.path.join(places.checkpoint, "backup")


def _check_progress(places: Directories) -> None:
    """Refuses to start once more what has ended at the same step again and again."""
    from tfdist.state.provenance import Provenance

    backup = _backup_directory(places)
    try:
        starts = starts_in_vain(Provenance.read(backup))
    except (OSError, ValueError):
        return  # Whoever writes it next says what is wrong.
    if starts >= STALLED_STARTS:
        raise ConfigError(
            "progress between the starts of this run",
            f"{starts} starts in a row that saved nothing, see run.json in {backup}",
            "look at how they ended; remove run.json to try again",
        )


def _write(path: str, text: str) -> None:
    """Writes a file that is complete or absent, also where it is remote."""
    import tensorflow as tf

    aside = f"{path}.tmp-{os.getpid()}"
    with tf.io.gfile.GFile(aside, "w") as file:
        file.write(text)
    tf.io.gfile.rename(aside, path, overwrite=True)


def _run() -> None:
    if not _CONFIG.value:
        raise ConfigError(
            "--config with a YAML file", "no --config", "pass --config configs/digits-single.yaml"
        )
    config = load(_CONFIG.value, _SET.value)
    cluster = tfdist.detect()
    logs.install(cluster)  # Marks log lines with the role of this process.
    if config.output.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UnsupportedError(
            "the package tensorboard, which TensorFlow no longer brings along",
            "output.tensorboard: true without it",
            "pip install tensorboard, or --set output.tensorboard=false",
        )
    # TensorFlow's notes about the processor are no news to who trains; its warnings stay.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    given = {"model-dir": _MODEL_DIR, "checkpoint-dir": _CHECKPOINT_DIR, "log-dir": _LOG_DIR}
    places = directories(config, {name: flag.value for name, flag in given.items()}, os.environ)
    if cluster.is_chief and config.output.backup != "none":
        _check_progress(places)
    train(config, places, cluster.is_chief)


def _main(argv: Sequence[str]) -> int:
    del argv
    try:
        _run()
    except TfdistError as error:
        print(f"trainer.task: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return EXIT_OK


def _parse(argv: Sequence[str]) -> list[str]:
    """Parses flags like absl, with help that succeeds and mistakes that exit with 2."""
    if {"--help", "-help", "-h", "--helpshort"} & set(argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=EXIT_OK)
    try:
        rest = flags.FLAGS([argv[0], *(_dashed(argument) for argument in argv[1:])])
    except flags.Error as error:
        _refuse(str(error))
    if rest[1:]:
        _refuse(f"unexpected argument {rest[1]!r}: every argument belongs to a flag")
    return rest


def _dashed(argument: str) -> str:
    """Reads --log_dir as --log-dir: absl has a flag of that name, which would do nothing here."""
    name, equals, value = argument.partition("=")
    dashed = f"--{name.lstrip('-')}".replace("_", "-")
    return f"{dashed}{equals}{value}" if dashed[2:] in _DASHED else argument


def _refuse(message: str) -> NoReturn:
    print(f"trainer.task: {message}. See --help.", file=sys.stderr, flush=True)
    sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse)
