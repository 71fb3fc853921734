"""Configs: what is accepted, and what each mistake says."""

from __future__ import annotations

import pathlib

import pydantic
import pytest

from tfdist.errors import ConfigError
from trainer import config

MINIMAL = "experiment: {name: digits}\n"


def written(folder: pathlib.Path, text: str | bytes) -> str:
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def message(folder: pathlib.Path, text: str | bytes, *overrides: str) -> str:
    """Returns what loading says, which must be one line and exit code 2."""
    with pytest.raises(ConfigError) as caught:
        config.load(written(folder, text), overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert "Fix: " in str(caught.value)
    return str(caught.value)


def test_a_minimal_config_has_every_default(tmp_path):
    loaded = config.load(written(tmp_path, MINIMAL))
    assert loaded.experiment.options.dataset == "digits"
    assert loaded.strategy == config.StrategyConfig(name=None, replicas=None)
    assert loaded.training.epochs == 1
    assert loaded.output.checkpoint == "last"


def test_every_value_is_read(tmp_path):
    loaded = config.load(
        written(
            tmp_path,
            """
            experiment: {name: flights, options: {max_rows: 500, buckets: 7}}
            strategy: {name: mirrored, replicas: 2}
            data: {global_batch_size: 96, shuffle_buffer: 10}
            training: {epochs: 5, steps_per_epoch: 4, learning_rate: 1, seed: 8, verbose: 0,
                       steps_per_execution: 3}
            output: {model_dir: a, checkpoint_dir: b, log_dir: c, checkpoint: all,
                     tensorboard: false}
            """,
        )
    )
    assert loaded.experiment.options.max_rows == 500
    assert loaded.experiment.options.buckets == 7
    assert loaded.strategy == config.StrategyConfig(name="mirrored", replicas=2)
    assert loaded.data == config.DataConfig(global_batch_size=96, shuffle_buffer=10)
    assert loaded.training.steps_per_epoch == 4
    assert loaded.training.learning_rate == 1.0
    assert loaded.training.steps_per_execution == 3
    assert loaded.output.checkpoint_dir == "b"
    assert loaded.output.tensorboard is False


def test_a_config_cannot_be_changed(tmp_path):
    loaded = config.load(written(tmp_path, MINIMAL))
    with pytest.raises(pydantic.ValidationError):
        loaded.training.epochs = 3
    with pytest.raises(pydantic.ValidationError):
        loaded.experiment.options.filters = 3


def test_sections_whose_keys_are_all_commented_out_have_their_defaults(tmp_path):
    text = "experiment:\n  name: digits\n  options:\ntraining:\n  # epochs: 3\n"
    assert config.load(written(tmp_path, text)) == config.load(written(tmp_path, MINIMAL))


@pytest.mark.parametrize("number", ["1e-3", "0.001", "1.0e-3", "1E-3"])
def test_numbers_with_exponents_are_numbers(tmp_path, number):
    text = MINIMAL + f"training: {{learning_rate: {number}}}\n"
    assert config.load(written(tmp_path, text)).training.learning_rate == 0.001


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {epoch: 3}", "training.epoch: unknown key (did you mean training.epochs?)"),
        ("epochs: 3", "epochs: unknown key (did you mean training.epochs?)"),
        ("trainning: {epochs: 3}", "trainning: unknown key (did you mean training?)"),
        (
            "zzz: 3",
            "zzz: unknown key (known here: experiment, strategy, data, training, output, vertex, "
            "kubernetes, slurm, ray)",
        ),
        ("zzz:", "zzz: unknown key"),
        ("data: {1: 3}", "data.1: unknown key (known here: global_batch_size, shuffle_buffer)"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path, text, expected):
    assert expected in message(tmp_path, MINIMAL + text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training: {epochs: three}",
            "training.epochs: expected a valid integer, received 'three'",
        ),
        ("training: {epochs: 2.5}", "training.epochs: expected a valid integer, received 2.5"),
        ("training: {epochs: '3'}", "training.epochs: expected a valid integer, received '3'"),
        ("training: {epochs: true}", "training.epochs: expected a valid integer, received True"),
        ("training: {epochs: 0}", "training.epochs: expected greater than 0, received 0"),
        ("data: {global_batch_size: -8}", "data.global_batch_size: expected greater than 0"),
        ("training: {learning_rate: 0}", "training.learning_rate: expected greater than 0"),
        ("training: {learning_rate: .nan}", "training.learning_rate: expected a finite number"),
        ("training: {seed: -1}", "training.seed: expected greater than or equal to 0, received -1"),
        ("training: {verbose: 3}", "training.verbose: expected 0, 1 or 2, received 3"),
        ("output: {tensorboard: 'no'}", "output.tensorboard: expected a valid boolean"),
        ("output: {checkpoint: lst}", "expected 'last', 'best', 'all' or 'none', received 'lst'"),
        ("training: [3]", "training: expected a mapping of keys to values, received [3]"),
        ("strategy: {replicas: 0}", "strategy.replicas: expected greater than 0, received 0"),
    ],
)
def test_a_wrong_value_shows_path_value_and_expected_type(tmp_path, text, expected):
    assert expected in message(tmp_path, MINIMAL + text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {epochs: 1}", "experiment: required, but not given"),
        ("experiment: {}", "experiment.name: required, but not given"),
        ("experiment: digits", "experiment: expected a mapping of keys to values"),
        ("experiment: {name: 3}", "experiment.name: expected a valid string, received 3"),
        (
            "experiment: {name: digit}",
            "experiment.name: no experiment 'digit' (did you mean digits? known: digits, flights)",
        ),
        ("experiment: {name: xyz}", "no experiment 'xyz' (known: digits, flights)"),
        (
            "experiment: {name: digits, options: {filter: 3}}",
            "experiment.options.filter: unknown key (did you mean experiment.options.filters?)",
        ),
        (
            "experiment: {name: flights, options: {max_rows: many}}",
            "experiment.options.max_rows: expected a valid integer, received 'many'",
        ),
        ("experiment: {name: digits, options: 3}", "experiment.options: expected a mapping"),
        ("experiment: {name: digits, opts: {}}", "experiment.opts: unknown key (did you mean"),
    ],
)
def test_a_mistake_in_the_experiment_is_named(tmp_path, text, expected):
    assert expected in message(tmp_path, text)


def test_all_mistakes_are_shown_at_once(tmp_path):
    said = message(
        tmp_path,
        "experiment: {name: digits, options: {filter: 3}}\n"
        "training: {epoch: 1, seed: x}\ndata: {global_batch_size: 0}\n",
    )
    for path in ("experiment.options.filter", "training.epoch", "training.seed", "data.global"):
        assert path in said


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("experiment: {name: digits\n", ":2:1: "),
        ("experiment:\n  name: digits\n training: 3\n", ":3:2: "),
        ("experiment: {name: digits}\ntraining:\n\tepochs: 3\n", ":3:1: "),
        ("experiment: {name: digits}\n---\nexperiment: {name: digits}\n", ":2:1: "),
        ("experiment: !!python/object:os.system {}\n", ":1:13: "),
    ],
)
def test_bad_yaml_is_shown_with_file_line_and_column(tmp_path, text, position):
    said = message(tmp_path, text)
    assert f"run.yaml{position}" in said
    assert "valid YAML" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + MINIMAL, ":2:1: key 'experiment' given twice, first in line 1"),
        (
            MINIMAL + "training:\n  epochs: 1\n  seed: 2\n  epochs: 3\n",
            ":5:3: key 'epochs' given twice, first in line 3",
        ),
    ],
)
def test_a_key_given_twice_is_refused(tmp_path, text, expected):
    assert expected in message(tmp_path, text)


def test_merge_keys_may_be_overridden(tmp_path):
    text = "experiment: {<<: {name: flights}, name: digits}\n"
    assert config.load(written(tmp_path, text)).experiment.name == "digits"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
def test_an_empty_file_is_named_so(tmp_path, text):
    assert "an empty file" in message(tmp_path, text)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "3\n"])
def test_a_file_without_sections_is_refused(tmp_path, text):
    assert "sections such as 'experiment:'" in message(tmp_path, text)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    assert "can be read" in message(tmp_path, b"\xff\xfe\x00experiment")


def test_a_missing_file_names_the_nearest_one(tmp_path):
    path = written(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=r"rum\.yaml, which does not exist") as caught:
        config.load(path.replace("run", "rum"))
    assert f"did you mean {path}" in str(caught.value)


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can be read"):
        config.load(str(tmp_path))


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("training.epochs=7", lambda loaded: loaded.training.epochs == 7),
        ("training.learning_rate=1e-2", lambda loaded: loaded.training.learning_rate == 0.01),
        ("strategy.name=", lambda loaded: loaded.strategy.name is None),
        ("strategy.name=null", lambda loaded: loaded.strategy.name is None),
        ("strategy={name: mirrored}", lambda loaded: loaded.strategy.replicas is None),
        ("output.directory=a=b", lambda loaded: loaded.output.directory == "a=b"),
        ("output.directory=gs://b/x", lambda loaded: loaded.output.directory == "gs://b/x"),
        ("output.tensorboard=false", lambda loaded: loaded.output.tensorboard is False),
        ("experiment.options.filters=4", lambda loaded: loaded.experiment.options.filters == 4),
    ],
)
def test_set_changes_one_value(tmp_path, override, read):
    text = MINIMAL + "strategy: {name: multi_worker, replicas: 3}\n"
    assert read(config.load(written(tmp_path, text), [override]))


def test_the_last_set_of_a_key_wins_and_keeps_its_neighbours(tmp_path):
    text = MINIMAL + "training: {epochs: 2, seed: 5}\n"
    overrides = ["training.epochs=3", "training.epochs=4"]
    loaded = config.load(written(tmp_path, text), overrides)
    assert loaded.training.epochs == 4
    assert loaded.training.seed == 5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.epoch=3", "training.epoch: unknown key (did you mean training.epochs?)"),
        ("training.epochs=x", "training.epochs: expected a valid integer, received 'x'"),
        ("training.epochs.more=1", "training.epochs: expected a valid integer"),
        ("training=1", "training: expected a mapping"),
        ("training.epochs", "--set key.path=value. Received: 'training.epochs'"),
        ("=3", "--set key.path=value"),
        ("training..epochs=3", "--set key.path=value"),
        ("training.epochs=[1", "--set training.epochs=[1:1:3"),
        ("training={seed: 1, seed: 2}", "key 'seed' given twice"),
    ],
)
def test_a_mistake_in_set_is_named(tmp_path, override, expected):
    said = message(tmp_path, MINIMAL, override)
    assert expected in said
    assert override in said
