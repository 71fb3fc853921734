"""Settings of a process that trains on CPU, each looked at in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.support.harness import ROOT
from tfdist import tuning

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs x86")

#: Prints what `keep_pages` returned and the page faults of ten large arrays after it.
FAULTS = """
import resource, threading
import numpy as np
from tfdist import tuning
kept = tuning.keep_pages()
def work():
    for step in range(12):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(20_000_000, np.float32)
    print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def run(source, **variables):
    """Returns the words that `source` prints under `variables`; None takes one away."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", source],
        env={name: value for name, value in environ.items() if value is not None},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.split()


@on_glibc
def test_kept_pages_are_not_faulted_in_again():
    kept, faults = run(FAULTS, TFDIST_KEEP_PAGES="1")
    assert kept == "True"
    assert int(faults) < 200


@on_glibc
def test_malloc_can_be_left_alone():
    kept, faults = run(FAULTS, TFDIST_KEEP_PAGES="0")
    assert kept == "False"
    assert int(faults) > 200


def test_pages_are_not_kept_where_many_threads_would_take_turns(monkeypatch):
    monkeypatch.delenv("TFDIST_KEEP_PAGES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)), raising=False)
    assert tuning.keep_pages() is False


ONEDNN = "import os, tfdist.tuning as t; t.tune(); print(os.environ.get('TF_ENABLE_ONEDNN_OPTS'))"


@on_x86
@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("0", "0")])
def test_onednn_is_on_unless_the_environment_says_otherwise(given, wanted):
    assert run(ONEDNN, TF_ENABLE_ONEDNN_OPTS=given) == [wanted]


def test_nothing_is_set_once_tensorflow_is_loaded():
    assert run(f"import tensorflow; {ONEDNN}", TF_ENABLE_ONEDNN_OPTS=None) == ["None"]
