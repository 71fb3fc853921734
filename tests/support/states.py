"""Training states to commit, and a comparison of all that is in them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tfdist.state.store import Snapshot


def sample(step: int = 12) -> Snapshot:
    """Returns a state with every kind of value."""
    generator = np.random.default_rng(step)
    arrays = {
        "layer/kernel:0": generator.normal(size=(7, 5)).astype("float32"),
        "half": generator.normal(size=9).astype("float16"),
        "brain": generator.normal(size=(3, 3)).astype(ml_dtypes.bfloat16),
        "eighth": generator.normal(size=4).astype(ml_dtypes.float8_e4m3fn),
        "quarter": np.arange(-4, 4).astype(ml_dtypes.int4),
        "complex": generator.normal(size=3) + 1j,
        "count": np.array(step, "int64"),
        "flags": np.array([True, False, True]),
        "empty": np.zeros((0, 4), "float64"),
        "words": np.array([[b"a", b"\x00tail\x00"], [b"", b"long" * 9]], object),
        "word": np.array(b"alone", object),
        "no-words": np.empty((2, 0), object),
        "turned": generator.normal(size=(4, 6)).T,
        "strided": np.arange(20)[::3],
        "big-endian": np.arange(5, dtype=">i4"),
    }
    facts = {
        "epoch": 1,
        "history": {"loss": [0.1, float("nan"), 1e-45]},
        "name": "Übung",
        "position": {"example": 2**60},
    }
    return Snapshot(step, facts, arrays, {"state": b"\x80bytes", "none": b""})


def assert_same(found: Snapshot, written: Snapshot) -> None:
    """Compares everything, NaN with NaN too."""
    assert found.step == written.step
    assert repr(found.facts) == repr(written.facts)
    assert found.blobs == written.blobs
    assert sorted(found.arrays) == sorted(written.arrays)
    for name, array in written.arrays.items():
        assert found.arrays[name].dtype == array.dtype.newbyteorder("="), name
        assert found.arrays[name].shape == array.shape, name
        assert found.arrays[name].tolist() == array.tolist(), name
