"""Plain values (numbers, text, containers, arrays) as JSON and arrays, and back.

What is saved of a training must be readable without running anything, so nothing else is taken:
no objects of classes, no functions, no pickles. Floats keep their bits.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import tensorflow as tf

_SHORT = 2**12  # Bytes that may be text in JSON.
_TAG = "~"  # Key of a JSON object that stands for something else than a dict.


class NotPlainError(Exception):
    """A value that cannot be saved without executing something to read it."""


def encode(value: Any, arrays: dict[str, np.ndarray] | None = None, name: str = "") -> Any:
    """Returns `value` as JSON can hold it.

    Args:
        value: None, bool, int, float, str, bytes, NumPy numbers and arrays, tensors, and lists,
            tuples, sets and dicts of these.
        arrays: Where arrays, not copied, and long bytes are put, under names that begin with
            `name`; None keeps them within.
        name: See `arrays`.

    Raises:
        NotPlainError: There is something else in it.
    """
    if value is None or isinstance(value, (bool, str)) and not isinstance(value, np.generic):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "of": repr(value)}
    if isinstance(value, bytes) and arrays is not None and len(value) > _SHORT:
        return {_TAG: "long bytes", **_array(np.frombuffer(value, np.uint8), arrays, name)}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return {_TAG: "number", **_array(np.asarray(value), None, name)}
    if isinstance(value, np.ndarray):
        return {_TAG: "array", **_array(value, arrays, name)}
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return {_TAG: "tensor", **_array(np.array(value.numpy()), arrays, name)}
    if type(value) in (list, tuple, set, frozenset):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        found = [encode(each, arrays, f"{name}/{index}") for index, each in enumerate(items)]
        return found if type(value) is list else {_TAG: type(value).__name__, "of": found}
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        if type(value) is dict and all(type(k) is str for k in value) and _TAG not in value:
            return {k: encode(each, arrays, f"{name}/{k}") for k, each in value.items()}
        if type(value).__name__ not in ("dict", "OrderedDict"):
            raise NotPlainError(f"a {type(value).__name__}")
        pairs = [
            [encode(k), encode(each, arrays, f"{name}/{index}")]
            for index, (k, each) in enumerate(value.items())
        ]
        return {_TAG: "dict", "of": pairs}
    raise NotPlainError(f"a {type(value).__name__}")


def decode(value: Any, arrays: Any = None) -> Any:
    """Returns what `encode` was given.

    Args:
        value: What it has returned.
        arrays: Mapping of name to array.
    """
    if isinstance(value, list):
        return [decode(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(each, arrays) for key, each in value.items()}
    kind = value[_TAG]
    if kind in ("number", "array", "tensor", "long bytes"):
        array = _array_of(value, arrays)
        if kind == "long bytes":
            return array.tobytes()
        if kind == "number":
            return array[()]
        return tf.constant(array) if kind == "tensor" else array
    inner = value["of"]
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "dict":
        return {decode(k, arrays): decode(each, arrays) for k, each in inner}
    return _KINDS[kind](decode(inner, arrays))


_KINDS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _array(value: np.ndarray, arrays: dict[str, np.ndarray] | None, name: str) -> dict[str, Any]:
    if value.dtype.hasobject:
        raise NotPlainError("an array of objects")
    if arrays is not None:
        arrays[name] = value
        return {"name": name}
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data}


def _array_of(value: dict[str, Any], arrays: Any) -> np.ndarray:
    if "name" in value:
        return np.array(arrays[value["name"]])
    data = base64.b64decode(value["data"])
    return np.frombuffer(data, dtype_of(value["dtype"])).reshape(value["shape"]).copy()


def dtype_name(dtype: np.dtype) -> str:
    """Returns a name that `dtype_of` knows."""
    return dtype.name if dtype.kind == "V" else dtype.str  # ml_dtypes are of kind V.


def dtype_of(name: str) -> np.dtype:
    """Returns the NumPy dtype of a name, those of TensorFlow's small floats among them."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(tf.as_dtype(name).as_numpy_dtype)
