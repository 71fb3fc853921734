"""The examples of docs/data.md run as they stand, and print what it says."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.harness import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_examples_run_and_print_what_the_page_says():
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    [printed] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout
    assert "[3 4 4] [ True  True False]" in result.stdout
