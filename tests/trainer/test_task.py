"""The entry point, run as a container runs it: a process of its own, judged by what it leaves."""

from __future__ import annotations

import csv
import json
import pathlib
import time

import pytest

from tests.support.harness import run_script
from trainer import config
from trainer import task

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def rows(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder: pathlib.Path, tag: str) -> int:
    """Returns how many values of `tag` the event files of a folder hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return len(events.Tensors(tag))


@pytest.fixture(scope="module")
def single(train, tmp_path_factory):
    """A whole run of digits-single as it stands, from an empty directory."""
    folder = tmp_path_factory.mktemp("single")
    done = train("--config", str(CONFIGS / "digits-single.yaml"), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "digits-single", done


def test_a_run_prints_a_good_test_accuracy_and_writes_the_same_one(single):
    folder, done = single
    report = json.loads((folder / "model" / "metrics.json").read_text())
    assert report["test"]["accuracy"] >= 0.97
    assert f"test accuracy {report['test']['accuracy']:.4f}\n" in done.stdout
    assert report["experiment"] == "digits"
    assert report["epochs"] == 12
    assert report["replicas"] == 1


def test_a_saved_model_and_the_last_checkpoint_have_the_accuracy_that_was_printed(single, data_dir):
    import keras
    import numpy as np

    from trainer.experiments import digits

    folder, _ = single
    report = json.loads((folder / "model" / "metrics.json").read_text())
    data = digits.datasets(
        digits.Options(data_dir=data_dir), global_batch_size=64, shuffle_buffer=None, seed=0
    )
    parts = [(batch.data, batch.mask.numpy()) for batch in data.test]
    images, labels = (
        np.concatenate([part[position].numpy()[mask] for part, mask in parts])
        for position in (0, 1)
    )
    for path in (folder / "model" / "model.keras", folder / "checkpoints" / "last.keras"):
        model = keras.models.load_model(path)
        guesses = model.predict(images, verbose=0).argmax(axis=-1)
        assert (guesses == labels).mean() == pytest.approx(report["test"]["accuracy"], abs=1e-6)


def test_a_run_logs_every_epoch(single):
    folder, done = single
    history = rows(folder / "logs" / "history.csv")
    assert [row["epoch"] for row in history] == [str(epoch) for epoch in range(12)]
    assert float(history[-1]["loss"]) < 0.3 * float(history[0]["loss"])
    assert float(history[-1]["val_accuracy"]) > 0.95
    assert scalars(folder / "logs" / "train", "epoch_loss") == 12
    assert scalars(folder / "logs" / "validation", "epoch_accuracy") == 12
    assert "Training digits with" in done.stderr


def test_a_run_leaves_nothing_else_behind(single):
    folder, _ = single
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    events = {path for path in found if "events.out.tfevents" in path}
    # What a restart goes on from: the last state, once.
    backup = {path for path in found if path.startswith("checkpoints/backup/")}
    assert {"checkpoints/backup/run.json", "checkpoints/backup/finished.json"} <= backup
    assert sum(path.endswith("manifest.json") for path in backup) == 1
    assert found - events - backup == {
        "model/model.keras",
        "model/metrics.json",
        "checkpoints/last.keras",
        "logs/history.csv",
    }


def test_mirrored_replicas_train_like_one_and_write_where_the_job_says(train, single, tmp_path):
    done = train(
        *("--config", str(CONFIGS / "digits-mirrored.yaml")),
        *("--set", "training.epochs=2", "--set", "output.checkpoint=all"),
        *("--checkpoint-dir", str(tmp_path / "flag")),
        cwd=tmp_path,
        env={
            "AIP_MODEL_DIR": f"{tmp_path}/aip/model/",
            "AIP_CHECKPOINT_DIR": f"{tmp_path}/aip/checkpoints/",
            "AIP_TENSORBOARD_LOG_DIR": f"{tmp_path}/aip/logs/",
        },
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "aip" / "model" / "metrics.json").read_text())
    assert report["replicas"] == 2
    assert (tmp_path / "aip" / "model" / "model.keras").exists()
    # A flag goes before its variable.
    assert not (tmp_path / "aip" / "checkpoints").exists()
    checkpoints = sorted(path.name for path in (tmp_path / "flag").iterdir())
    assert checkpoints == ["backup", "epoch-0001.keras", "epoch-0002.keras"]
    mirrored = rows(tmp_path / "aip" / "logs" / "history.csv")
    assert len(mirrored) == 2
    # The same examples in the same batches, so the same numbers as in one process.
    for one, two in zip(rows(single[0] / "logs" / "history.csv"), mirrored, strict=False):
        for name, value in one.items():
            assert float(two[name]) == pytest.approx(float(value), rel=1e-3), name
    assert not (tmp_path / "runs").exists()


def test_flights_run_without_checkpoints_and_events_where_they_are_not_wanted(train, tmp_path):
    done = train(
        *("--config", str(CONFIGS / "flights-single.yaml")),
        *("--set", "experiment.options.max_rows=3000", "--set", "training.epochs=3"),
        *("--set", "training.steps_per_epoch=2"),
        *("--set", "output={directory: here, checkpoint: none, backup: none, tensorboard: false}"),
        *("--log_dir", "elsewhere"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "test auc 0." in done.stdout
    # 2400 training examples make 3 batches of 1024: the second epoch reads over the end.
    assert len(rows(tmp_path / "elsewhere" / "history.csv")) == 3
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"here/model/model.keras", "here/model/metrics.json", "elsewhere/history.csv"}


def test_help_is_short_and_no_error(train, tmp_path):
    done = train("--help", cwd=tmp_path)
    assert done.returncode == 0
    for flag in ("--config", "--set", "--model-dir", "--checkpoint-dir", "--log-dir"):
        assert flag in done.stdout
    assert len(done.stdout.splitlines()) < 40
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "pass --config"),
        (["--config"], "config"),
        (["--confg=x"], "Did you mean: config"),
        (["--config=configs/digits-single.yaml", "extra"], "'extra'"),
        (["--config=configs/digit-single.yaml"], "did you mean configs/digits-single.yaml"),
        (
            ["--config=configs/digits-single.yaml", "--set=training.epoch=3"],
            "training.epoch: unknown key (did you mean training.epochs?)",
        ),
        (
            ["--config", "configs/digits-single.yaml", "--set", "training.epochs"],
            "--set key.path=value",
        ),
    ],
)
def test_a_mistake_is_one_line_and_code_2_at_once(train, arguments, expected):
    began = time.monotonic()
    done = train(*arguments, cwd=ROOT)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG"),
    ],
)
def test_a_cluster_in_which_this_task_cannot_train_is_code_2_at_once(train, environ, expected):
    done = train("--config", "configs/digits-single.yaml", cwd=ROOT, env=environ)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_tensorflow_is_not_imported_before_the_config_is_checked(train):
    done = train(
        *("--config", "configs/digits-single.yaml", "--set", "training.epochs=x"),
        cwd=ROOT,
        python=("-X", "importtime"),
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "trainer.config" in imported
    assert not imported & {"tensorflow", "keras", "tensorflow_datasets", "sklearn", "pandas"}


def test_each_directory_is_the_first_that_is_given():
    stand = config.load(str(CONFIGS / "digits-single.yaml"), ["output={}"])
    assert task.directories(stand, {}, {}) == task.Directories(
        "runs/digits/model", "runs/digits/checkpoints", "runs/digits/logs"
    )
    given = config.load(
        str(CONFIGS / "digits-single.yaml"),
        ["output={directory: gs://b/run, checkpoint_dir: ckpt}"],
    )
    assert task.directories(given, {}, {}) == task.Directories(
        "gs://b/run/model", "ckpt", "gs://b/run/logs"
    )
    variables = {"AIP_MODEL_DIR": "gs://aip/model/", "AIP_CHECKPOINT_DIR": "gs://aip/ckpt/"}
    assert task.directories(given, {}, variables) == task.Directories(
        "gs://aip/model/", "gs://aip/ckpt/", "gs://b/run/logs"
    )
    flags = {"model-dir": "m", "checkpoint-dir": None, "log-dir": "l"}
    assert task.directories(given, flags, variables) == task.Directories("m", "gs://aip/ckpt/", "l")
    empty = {"AIP_MODEL_DIR": "", "AIP_CHECKPOINT_DIR": ""}
    assert task.directories(given, {}, empty) == task.directories(given, {}, {})


@pytest.mark.timeout(200)
def test_on_parameter_servers_with_an_evaluator_it_trains_and_every_checkpoint_is_scored(tmp_path):
    path = CONFIGS / "flights-ps.yaml"
    changes = ["experiment.options.max_rows=8000", "output.checkpoint=all", "training.epochs=2"]
    arguments = ["--config", str(path), *(word for c in changes for word in ("--set", c))]
    arguments += ["--set", f"output.directory={tmp_path / 'run'}"]
    run = run_script(
        None,
        workers=2,
        launcher_args=["--ps", "1", "--evaluator"],
        args=["-m", "trainer.task", *arguments],
        env={"PYTHONPATH": str(ROOT)},  # with pandas, unlike other clusters of these tests
        timeout=180,
        tmp_path=tmp_path,
    )
    assert run.code == 0, run.output
    assert "test auc 0." in run.output
    lines = (tmp_path / "run" / "checkpoints" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]
    trained = rows(tmp_path / "run" / "logs" / "history.csv")
    for line, row in zip(lines, trained, strict=True):
        assert json.loads(line)["metrics"]["auc"] == pytest.approx(float(row["val_auc"]), abs=1e-4)
