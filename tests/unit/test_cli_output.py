"""Files that verbs write: new, or replaced as a whole."""

from __future__ import annotations

import os

import pytest

from tfdist.cli.output import write
from tfdist.errors import ConfigError


def test_a_file_is_replaced_when_told_only(tmp_path):
    output = tmp_path / "job.json"
    write("one", output, force=False)
    with pytest.raises(ConfigError, match="--force to replace it"):
        write("two", output, force=False)
    assert output.read_text() == "one"
    write("two", output, force=True)
    assert output.read_text() == "two"
    assert os.listdir(tmp_path) == ["job.json"]


def test_a_replaced_file_stays_whole_for_who_reads_it(tmp_path):
    output = tmp_path / "job.json"
    write("one" * 1000, output, force=False)
    with output.open() as reading:
        write("two", output, force=True)
        assert reading.read() == "one" * 1000


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_is_written_to_and_an_error_of_it_is_told():
    from pathlib import Path

    write("one", Path("/dev/null"), force=True)
    assert not os.path.isfile("/dev/null")
    with pytest.raises(ConfigError, match="No space left"):
        write("one", Path("/dev/full"), force=True)
    assert os.path.exists("/dev/full")
