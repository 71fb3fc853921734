"""The README's examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.harness import ROOT
from tests.support.harness import run_script

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_script_of_the_first_screen_trains(workers, tmp_path):
    [source] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run = run_script(source, workers=workers, timeout=120, tmp_path=tmp_path)
    assert run.code == 0, run.output
    for index in range(workers):
        [accuracy] = [
            line.split()[1]
            for line in run.lines(f"worker {index}")
            if line.startswith("accuracy ") and len(line.split()) == 2
        ]
        assert float(accuracy) > 0.9
    assert (tmp_path / "best.keras").exists()


def test_its_two_commands_are_the_first_thing_it_shows():
    [first] = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)[:1]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_every_verb_and_config_it_names_exists():
    verbs = set(re.findall(r"tfdist (env|run|doctor|[a-z]+)\b(?= |`)", " ".join(_commands())))
    assert verbs
    for verb in verbs:
        result = subprocess.run(
            [sys.executable, "-c", "from tfdist.cli.main import main; raise SystemExit(main())"]
            + [verb, "--help"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert result.returncode == 0, result.stderr
    for path in re.findall(r"(?:configs|docs|tests|tfdist)/[\w./-]+\.\w+", README):
        assert (ROOT / path).exists() or path == "configs/X.yaml", path


def _commands():
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        yield from (line for line in block.splitlines() if line.startswith("tfdist"))
