"""Python runs this first in every process of a test's cluster: they start in half the time.

Most of what a process does in these tests is to import TensorFlow.
"""

from __future__ import annotations

import gc
import sys

# Keras imports these where they are installed, a third of its time, and uses them for their own
# data alone. tfdist needs neither: without them a process has what `pip install tfdist[cpu]` gives.
for name in ("pandas", "sklearn"):
    sys.modules[name] = None  # type: ignore[assignment]

# An import makes objects that stay: looking for garbage among them is another tenth of the time.
gc.set_threshold(20_000)
