"""The order of files, and what every test process has."""

from __future__ import annotations

import gc

# TensorFlow's modules are objects that stay: looking for garbage among them takes time.
gc.set_threshold(20_000)


def pytest_configure(config):
    # pytest-xdist puts files of few tests last; with us those take longest.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Puts quick files last, so that all cores have work to the end."""
    items.sort(key=_rank)


def _rank(item):
    if item.path.parent.name != "unit":
        return 0  # These start clusters or whole trainings.
    return 1 if hasattr(item.module, "tf") or hasattr(item.module, "run_script") else 2
