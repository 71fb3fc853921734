"""What several files of cluster tests share."""

from __future__ import annotations

import sys

import pytest

from tests.support.harness import CLI


@pytest.fixture
def clocks(monkeypatch):
    """Changes one of the launcher's waiting times, so that the test need not sit through it."""
    commands = [CLI[2]]

    def change(name, seconds):
        module, constant = name.split(".")
        patch = f"import tfdist.launch.{module} as m; assert m.{constant}; m.{constant} = {seconds}"
        commands.insert(0, patch)
        command = "; ".join(commands)
        monkeypatch.setattr("tests.support.harness.CLI", (sys.executable, "-c", command))

    return change
