"""Where the random generators of this process are: Python's, NumPy's and TensorFlow's.

Generators whose state is a variable are in the inventory. Not to be had is the state of stateful
TensorFlow operations (`tf.random.uniform` and the like in a compiled step), which the kernels keep.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from tensorflow.python.eager import context

from tfdist.engine import plain


def capture() -> Any:
    """Returns the states, fit for JSON."""
    eager = getattr(context.context(), "_rng", None)
    return plain.encode(
        {
            "python": _packed(random.getstate()),
            "numpy": np.random.get_state(legacy=False),
            "tensorflow": None if eager is None else _packed(eager.getstate()),
        }
    )


def restore(states: Any) -> None:
    """Puts the generators where they were."""
    found = plain.decode(states)
    random.setstate(_unpacked(found["python"]))
    np.random.set_state(found["numpy"])
    eager = getattr(context.context(), "_rng", None)
    if eager is not None and found["tensorflow"] is not None:
        eager.setstate(_unpacked(found["tensorflow"]))


def _packed(state: Any) -> Any:
    version, words, gauss = state
    return [version, np.array(words, np.uint32), gauss]


def _unpacked(state: Any) -> Any:
    version, words, gauss = state
    return version, tuple(map(int, words)), gauss
