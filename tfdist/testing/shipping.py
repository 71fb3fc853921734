"""Sends functions of a test to the processes that call them.

Functions travel by value (cloudpickle), so they may be lambdas, closures, and functions of a test
module, of `__main__` or of a notebook; what they use of their own module travels with them, and
the module is not imported again. Everything else is imported by name, on this process's path. A
function whose module holds what cannot travel (a lock, a strategy) is imported by name, too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError


def dumps(value: Any, functions: Iterable[Any]) -> bytes:
    """Returns `value` as bytes for `pickle.loads` in another process.

    Args:
        value: What to send.
        functions: The callables in it whose own modules travel with them.

    Raises:
        UnsupportedError: cloudpickle is not installed.
        ConfigError: Something in `value` cannot be sent.
    """
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedError(
            "the package cloudpickle, which sends model_fn and dataset_fn to other processes",
            "no such package",
            "pip install cloudpickle",
        ) from error
    try:
        with _by_value(cloudpickle, _modules_of(functions)):
            return bytes(cloudpickle.dumps(value))
    except Exception as first:
        try:
            return bytes(cloudpickle.dumps(value))
        except Exception:
            raise ConfigError(
                "functions and arguments that can be sent to another process",
                f"{type(first).__name__}: {first}",
                "create what cannot be pickled (locks, strategies, open files) inside model_fn or "
                "dataset_fn",
            ) from first


@contextlib.contextmanager
def _by_value(cloudpickle: Any, modules: Iterable[types.ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ not in known]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_of(functions: Iterable[Any]) -> list[types.ModuleType]:
    found = {}
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        name = getattr(function, "__module__", None) or type(function).__module__
        module = sys.modules.get(name)
        if module is not None and name != "__main__" and not _is_installed(module):
            found[name] = module
    return list(found.values())


def _is_installed(module: types.ModuleType) -> bool:
    """Whether every interpreter of this environment finds the module under the same name."""
    path = getattr(module, "__file__", None) or ""
    if "site-packages" in path or "dist-packages" in path:
        return True
    return module.__name__.partition(".")[0] in (*sys.stdlib_module_names, "tfdist")
