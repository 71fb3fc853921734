"""An evaluator follows checkpoints of every kind, to the last and not beyond."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from tests.cluster.test_launcher import WHO
from tests.support.harness import run_script

keras = pytest.importorskip("keras")
np = pytest.importorskip("numpy")
tf = pytest.importorskip("tensorflow")

from tfdist.errors import ConfigError  # noqa: E402  after the imports that take seconds
from tfdist.state.checkpoints import Folder  # noqa: E402
from tfdist.state.ending import mark_end  # noqa: E402
from tfdist.state.evaluator import Evaluator  # noqa: E402
from tfdist.state.follow import follow  # noqa: E402

pytestmark = pytest.mark.timeout(120)

X = np.arange(12, dtype="float32").reshape(6, 2) / 10
DATA = (X, X.sum(axis=1, keepdims=True))


def _model(value=0.0, units=1, optimizer="sgd"):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
    model.compile(optimizer, "mse")
    model.set_weights([np.full_like(weight, value) for weight in model.get_weights()])
    return model


def _loss(value):
    return float(np.mean((X @ np.full((2, 1), value) + value - DATA[1]) ** 2))


def _run(model, path, **options):
    return Evaluator(model, DATA, path, poll_seconds=0.1, environ={}, **options).run()


def _end(directory, seconds=1.0):
    timer = threading.Timer(seconds, mark_end, [directory])
    timer.start()
    return timer


SCRIPT = """
import os
import tfdist
strategy = tfdist.strategy()
import keras
import numpy as np
from report import report

x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5]], "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
path = "checkpoints/{epoch}.weights.h5"
callbacks = [
    keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
    keras.callbacks.TensorBoard("logs"),
]
held = (x[:16], y[:16])
if tfdist.detect().is_evaluator:
    history = model.fit(x, y, 10, 10, 0, callbacks, validation_data=held)
    report(epochs=history.epoch, **history.history)
    model.save("evaluator.keras")
else:
    class Check(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            losses.append(self.model.evaluate(*held, verbose=0, return_dict=True))
            self.model.stop_training = epoch == 2

    losses = []
    model.fit(x, y, epochs=10, batch_size=10, verbose=0, callbacks=[*callbacks, Check()])
    report(val_loss=[l["loss"] for l in losses], val_mae=[l["mae"] for l in losses])
"""


def test_an_evaluator_beside_the_training_scores_every_epoch_and_ends_after_the_last(tmp_path):
    run = run_script(
        SCRIPT, workers=1, launcher_args=["--evaluator"], tmp_path=tmp_path, timeout=100
    )
    assert run.code == 0, run.output
    assert "SIGTERM" not in run.output and "Traceback" not in run.output
    assert not (tmp_path / "evaluator.keras").exists()
    found, expected = run.result("evaluator 0"), run.result("worker 0")
    assert found["epochs"] == [0, 1, 2]
    for name in ("val_loss", "val_mae"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    lines = (tmp_path / "checkpoints" / "evaluations.jsonl").read_text().splitlines()
    scores = [json.loads(line) for line in lines]
    assert [score["epoch"] for score in scores] == [1, 2, 3]
    assert [score["step"] for score in scores] == [4, 8, 12]
    assert [score["metrics"]["mae"] for score in scores] == found["val_mae"]
    assert all(score["seconds"] > 0 and score["file"].endswith(".weights.h5") for score in scores)
    shown = {}
    [events] = (tmp_path / "logs" / "evaluator").iterdir()
    for event in tf.compat.v1.train.summary_iterator(str(events)):
        for value in event.summary.value:
            shown[value.tag, event.step] = tf.make_ndarray(value.tensor).item()
    for number, loss in enumerate(found["val_loss"]):
        assert shown["epoch_loss", number] == pytest.approx(loss)
        assert shown["evaluation_loss_vs_iterations", 4 * number + 4] == pytest.approx(loss)


def test_an_evaluator_that_has_heard_of_the_end_gets_its_time_and_one_that_dies_a_new_start(
    tmp_path, clocks
):
    clocks("supervisor.EVALUATOR_SECONDS", 0.5)
    source = f"""{WHO}
assert ("TFDIST_TRAINING_ENDED" in os.environ) == (role == "evaluator")
if role == "evaluator":
    if os.environ["TFDIST_INCARNATION"] == "0":
        os.kill(os.getpid(), 9)
    while not os.path.exists(os.environ["TFDIST_TRAINING_ENDED"]):
        time.sleep(0.05)
    open(os.environ["TFDIST_TRAINING_ENDED"] + ".heard", "w").close()
    time.sleep(2)
    print("done", flush=True)
else:
    time.sleep(2)
"""
    options = ["--evaluator", "--max-restarts", "1"]
    run = run_script(source, workers=2, launcher_args=options, tmp_path=tmp_path, timeout=30)
    assert run.code == 0, run.output
    assert run.lines("evaluator 0") == ["done"]
    starts = [run.output.count(f"{task} is process") for task in ("worker 0", "evaluator 0")]
    assert starts == [1, 2]


def test_half_files_are_tried_again_and_broken_ones_are_left_out(tmp_path):
    whole = tmp_path / "elsewhere.weights.h5"
    _model(0.5).save_weights(whole)
    folder = tmp_path / "folder"
    folder.mkdir()
    half = folder / "first.weights.h5"
    half.write_bytes(whole.read_bytes()[:1500])
    (folder / "broken.keras").write_bytes(b"no zip at all")
    (folder / ".hidden.weights.h5").write_bytes(whole.read_bytes())
    threading.Timer(0.6, os.replace, [whole, half]).start()
    _end(folder, 1.5)
    scores = _run(_model(), folder)
    assert [os.path.basename(score.file) for score in scores] == ["first.weights.h5"]
    assert scores[0].metrics["loss"] == pytest.approx(_loss(0.5), rel=1e-5)


def test_an_evaluator_that_is_started_again_goes_on_where_it_was(tmp_path):
    path = tmp_path / "{epoch}.weights.h5"
    _model(0.1).save_weights(tmp_path / "1.weights.h5")
    _end(tmp_path, 0.5)
    assert [score.epoch for score in _run(_model(), path)] == [1]
    with open(tmp_path / "evaluations.jsonl", "a") as file:
        file.write('{"file": "killed while wri')
    _model(0.2).save_weights(tmp_path / "2.weights.h5")
    time.sleep(1.1)
    _end(tmp_path, 0.5)
    scores = _run(_model(), path)
    assert [(score.epoch, score.metrics["loss"]) for score in scores] == [
        (1, pytest.approx(_loss(0.1), rel=1e-5)),
        (2, pytest.approx(_loss(0.2), rel=1e-5)),
    ]
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[2])["epoch"] == 2


def test_a_file_that_is_written_again_is_a_new_checkpoint_and_the_last_epoch_the_last(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    seen = []

    class Wait(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.evaluate(*DATA, verbose=0))
            time.sleep(1.0)

    model = _model(0.3)
    training = threading.Thread(
        target=lambda: model.fit(*DATA, 3, epochs=3, verbose=0, callbacks=[backup, Wait()])
    )
    training.start()
    # Nobody says that training has ended: the number of epochs does.
    scores = _run(_model(), backup.backup_dir, epochs=3)
    training.join()
    assert [score.epoch for score in scores] == [1, 2, 3]
    assert [score.step for score in scores] == [2, 4, 6]
    assert [score.metrics["loss"] for score in scores] == pytest.approx(seen, rel=1e-5)


def test_checkpoints_of_a_manager_are_followed(tmp_path):
    model = _model(optimizer="adam")
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), tmp_path, max_to_keep=2)
    for number in (1, 2, 3):
        model.set_weights([np.full_like(weight, number / 10) for weight in model.get_weights()])
        manager.save()
    _end(tmp_path, 0.5)
    scores = _run(_model(), tmp_path)
    assert [score.step for score in scores] == [2, 3]
    losses = [score.metrics["loss"] for score in scores]
    assert losses == pytest.approx([_loss(0.2), _loss(0.3)], rel=1e-5)


def test_a_model_that_nothing_fits_is_an_error(tmp_path):
    _model(units=3).save_weights(tmp_path / "1.weights.h5")
    with pytest.raises(ConfigError, match="that the checkpoint .*1.weights.h5 fits"):
        _run(_model(), tmp_path)


def test_a_whole_model_and_a_model_that_learns_its_shapes(tmp_path):
    model = _model(0.4)
    model.fit(*DATA, batch_size=2, verbose=0)
    model.save(tmp_path / "whole.keras")
    expected = model.evaluate(*DATA, verbose=0)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    _end(tmp_path, 0.5)
    [score] = _run(unbuilt, tmp_path)
    assert (score.step, score.metrics["loss"]) == (3, pytest.approx(expected, rel=1e-5))


def test_fit_without_what_an_evaluator_needs_is_an_error():
    with pytest.raises(ConfigError, match="validation_data"):
        follow(_model(), x=X, callbacks=[keras.callbacks.ModelCheckpoint("a.keras")])
    with pytest.raises(ConfigError, match="ModelCheckpoint"):
        follow(_model(), validation_data=DATA, callbacks=[keras.callbacks.EarlyStopping()])


def test_names_of_model_checkpoint_tell_the_epoch(tmp_path):
    for name in ("07-0.25.weights.h5", "12-0.1.weights.h5", "x-0.1.weights.h5", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    folder = Folder(tmp_path / "{epoch:02d}-{val_loss:.2f}.weights.h5")
    assert sorted(checkpoint.epoch for checkpoint in folder.find()) == [7, 12]
    assert folder.directory == str(tmp_path)
