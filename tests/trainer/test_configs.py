"""The files in configs/: each is valid and says how it is run."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from trainer import config

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATHS = sorted((ROOT / "configs").glob("*.yaml"))


def commands(path: pathlib.Path) -> list[list[str]]:
    """Returns the commands in the comment at the top of a config."""
    head = re.match(r"(#.*\n)+", path.read_text())
    assert head, f"{path} does not begin with a comment"
    return [shlex.split(line) for line in re.findall(r"^# {4,}(\S.*)$", head[0], re.MULTILINE)]


def test_there_are_configs():
    names = {path.stem for path in PATHS}
    assert {
        "digits-single",
        "digits-mirrored",
        "digits-multiworker",
        "flights-single",
        "flights-ps",
    } <= names


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_writes_to_a_directory_of_its_own(path):
    loaded = config.load(str(path))
    assert loaded.output.directory == f"runs/{path.stem}"
    assert path.stem.startswith(loaded.experiment.name)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_config_begins_with_the_commands_that_run_it(path):
    found = commands(path)
    loaded = config.load(str(path))
    assert found
    for command in found:
        if command[:2] == ["tfdist", "vertex"]:
            assert loaded.vertex is not None
            assert command[2:] == ["plan", str(path.relative_to(ROOT))]
            continue
        if command[:2] == ["tfdist", "render"]:
            scheduler = command[3]
            assert getattr(loaded, scheduler) is not None
            assert command[2:5] == ["--for", scheduler, str(path.relative_to(ROOT))]
            continue
        program = command.index("trainer.task")
        assert command[:program] in (
            ["python", "-m"],
            ["tfdist", "run", "--workers", "2", "-m"],
            ["tfdist", "run", "--workers", "2", "--ps", "1", "-m"],
        )
        assert command[program + 1 :] == ["--config", str(path.relative_to(ROOT))]


def test_the_strategies_are_those_of_the_names():
    loaded = {path.stem: config.load(str(path)).strategy for path in PATHS}
    assert (loaded["digits-mirrored"].name, loaded["digits-mirrored"].replicas) == ("mirrored", 2)
    # Chosen from the cluster, so that the file also runs as it stands in one process.
    assert loaded["digits-multiworker"].name is None
    assert loaded["digits-single"].name is None
