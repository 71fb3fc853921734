"""The first code in every task: it runs the user's program as `python script.py ARGS` would.

Run as `python bootstrap.py LAUNCHER_PID script|module TARGET ARGS`. Before the program it ties the
process to the life of the launcher and installs the engine (unless `TFDIST_ENGINE=0`); after it, it
turns the way the program ended into an exit code:

| the program | exit code |
|---|---|
| ends, or calls `sys.exit(n)` | the same as under `python` |
| raises a `TfdistError` | the error's own, message without traceback |
| raises anything else | 1, traceback of the program's own frames |
| is interrupted (Ctrl-C) | 130, no traceback |
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import importlib.util
import io
import os
import signal
import sys
import threading
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 130
_PREEMPTED = 143


def main(argv: list[str]) -> None:
    """Runs the program; leaves by SystemExit or by returning.

    Args:
        argv: Process id of the launcher, "script" or "module", the target, its arguments.
    """
    launcher, kind, target, *args = argv
    _die_with(int(launcher))
    _import_engine()
    sys.argv[:] = [target, *args]
    try:
        if kind == "module":
            run_module(target)
        else:
            run_script(target)
    except SystemExit as error:
        if error.code not in (None, 0):
            sys.last_value = error  # as for other errors: it is looked up at the end
        raise
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BaseException as error:  # noqa: BLE001  the interpreter's own last resort catches all
        sys.exit(_report(error))


def end(code: object) -> NoReturn:
    """Ends the process with the exit code that belongs to the argument of `sys.exit`.

    TensorFlow, when it is taken down, talks to all the tasks that it was connected to, and waits
    for ever for some that are gone; or for a generator whose processes are gone, as after a
    preemption in the middle of an epoch. Where that can be, the process ends without it, after all
    that the interpreter would do before.
    """
    current = sys.modules.get("tfdist.cluster.current")
    group = current.group() if current is not None else None
    if code != _PREEMPTED and (group is None or not group.cannot_be_taken_down):
        sys.exit(code)  # type: ignore[arg-type]
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    _flush(sys.stdout)
    _flush(sys.stderr)
    os._exit((code or 0) & 0xFF)


def run_script(path: str) -> None:
    """Runs a file as `python path` does."""
    # CPython resolves links for the import path, but not for __file__.
    _insert_path(os.path.dirname(os.path.realpath(path)))
    main_module = _new_main(os.path.abspath(path))
    main_module.__loader__ = SourceFileLoader("__main__", path)
    with io.open_code(os.path.abspath(path)) as file:
        source = file.read()
    code = compile(source, os.path.abspath(path), "exec", dont_inherit=True)
    exec(code, vars(main_module))  # noqa: S102  the user's own program


def run_module(name: str) -> None:
    """Runs a module, or a package's `__main__`, as `python -m name` does."""
    _insert_path(os.getcwd())
    # As under python -m, while packages above the module are imported.
    target, sys.argv[0] = name, "-m"
    spec = importlib.util.find_spec(target)
    if spec is not None and spec.submodule_search_locations is not None:
        target = f"{name}.__main__"
        spec = importlib.util.find_spec(target)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {target}", name=target)
    code = spec.loader.get_code(target)  # type: ignore[attr-defined]
    if code is None:
        raise ImportError(f"No code object available for {target}", name=target)
    main_module = _new_main(spec.origin)
    main_module.__spec__ = spec
    main_module.__package__ = spec.parent
    main_module.__loader__ = spec.loader
    sys.argv[0] = spec.origin or name
    exec(code, vars(main_module))  # noqa: S102  the user's own program


def _new_main(file: str | None) -> types.ModuleType:
    # Not runpy: it takes the module out of sys.modules when the code has run, although threads,
    # atexit handlers and pickles of the program still look for it there.
    module = types.ModuleType("__main__")
    module.__file__ = file
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__cached__ = None  # type: ignore[attr-defined]
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    return module


def _insert_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _die_with(launcher: int) -> None:
    # The kernel kills this process when the launcher's main thread ends, however it ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)


def _import_engine() -> None:
    """Puts the launcher's own tfdist in place, and with it the engine's import hooks."""
    here = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == here:
        del sys.path[0]
    root = str(here.parents[1])
    installed = importlib.util.find_spec("tfdist") is not None
    sys.path.insert(0, root)
    try:
        from tfdist import tuning

        tuning.tune()  # Before TensorFlow, which scripts tend to import first.
        if os.environ.get("TFDIST_ENGINE") != "0":
            from tfdist.engine import hooks

            hooks.install()
        import tfdist.errors  # noqa: F401  so that the package is this one for the program too
    finally:
        sys.path.remove(root)
    if not installed:
        sys.path.append(root)


def _report(error: BaseException) -> int:
    """Prints an error as the interpreter would, and returns the exit code."""
    from tfdist.errors import TfdistError

    # As the interpreter does; what ends the process is looked up here by those who must report it.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if isinstance(error, TfdistError):
        _flush(sys.stdout)
        print(f"tfdist: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    _flush(sys.stdout)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except Exception:  # noqa: BLE001  a broken hook of the program must not hide the error
        sys.__excepthook__(type(error), error, trace)
    _flush(sys.stderr)
    return 1


def _flush(stream: object) -> None:
    # The program may have closed or replaced it.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()  # type: ignore[attr-defined]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        end(_INTERRUPTED)
    except SystemExit as error:
        end(error.code)
    end(0)
