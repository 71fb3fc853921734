"""Activates the engine in a script that knows nothing of tfdist, at the moment it imports Keras.

`install` costs nothing until then: it imports neither TensorFlow nor Keras, so a script may still
set its environment variables first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from collections.abc import Sequence
from types import ModuleType


def _on_tensorflow() -> None:
    from tfdist.engine import seeds
    from tfdist.strategies import multi_worker

    multi_worker.guard()
    seeds.install()


def _on_keras() -> None:
    from tfdist.engine import activate

    activate.activate()


_ACTIONS: dict[str, Callable[[], None]] = {"tensorflow": _on_tensorflow, "keras": _on_keras}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the watched packages as everybody else does, and acts once they are imported."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _ACTIONS or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _ACTIONS[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, action: Callable[[], None]):
        self._inner = inner
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        # Data files and lazy sub-modules are looked up through the loader: give the real one back.
        if spec is not None:
            spec.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._action()


def install() -> None:
    """Watches for the import of TensorFlow and Keras; acts at once on what is imported already."""
    for name, action in _ACTIONS.items():
        if name in sys.modules:
            action()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def on_import(name: str, action: Callable[[], None]) -> None:
    """Has `action` called once the module `name` is imported; at once if it is. See `install`.

    Args:
        name: Dotted name of a module that is not watched yet.
        action: Called after its code has run.
    """
    _ACTIONS[name] = action
    if name in sys.modules:
        action()


def uninstall() -> None:
    """Stops watching. What has been activated stays (`tfdist.deactivate` takes it out)."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
