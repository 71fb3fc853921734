"""The data: examples that a seed makes, and the batches they come in."""

from __future__ import annotations

from cells.world import np
from cells.world import tf

EVEN = [12] * 10
LAST1 = [12] * 9 + [1]
STARVED = [12, 1, 1, 2, 1, 12, 1, 2, 5, 1]
SHAPES = {"even": EVEN, "last1": LAST1, "starved": STARVED}


def regression(rows, seed=0, columns=4):
    r = np.random.RandomState(seed)
    x = r.randn(rows, columns).astype("float32")
    w = np.linspace(1.0, -2.0, columns)[:, None]
    y = (np.tanh(x @ w) + 0.3 * r.randn(rows, 1)).astype("float32")
    return x, y


def binary(rows, seed=0, columns=4):
    x, y = regression(rows, seed, columns)
    return x, (y > 0).astype("float32")


def classes(rows, seed=0, columns=4, count=3):
    x, y = regression(rows, seed, columns)
    return x, np.clip(np.floor((y[:, 0] + 1.0) / 2.0 * count), 0, count - 1).astype("int32")


def one_hot(rows):
    x, y = classes(rows)
    return x, np.eye(3, dtype="float32")[y]


def batches(sizes, *arrays):
    """A dataset of known length with batches of these sizes, of one element spec."""
    arrays = arrays if len(arrays) > 1 else arrays[0]
    data, begin = None, 0
    while sizes:
        size = sizes[0]
        count = next((i for i, s in enumerate(sizes) if s != size), len(sizes))
        rows = slice(begin, begin + size * count)
        part = tf.data.Dataset.from_tensor_slices(
            tf.nest.map_structure(lambda a, rows=rows: a[rows], arrays)
        ).batch(size)
        data = part if data is None else data.concatenate(part)
        begin, sizes = begin + size * count, sizes[count:]
    return data
