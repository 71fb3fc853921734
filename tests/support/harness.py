"""Real clusters for tests: start N tasks with a deadline, watch, kill, collect results.

    run = run_script(SOURCE, workers=2, tmp_path=tmp_path)
    assert run.code == 0, run.output
    assert run.result("worker 0") == run.result("worker 1")

`start_script` gives a live handle instead. A job that outlives its deadline is killed, and the
test fails with the last lines of every task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
#: On the path of a process, it starts faster and finds neither pandas nor scikit-learn.
LEAN = ROOT / "tests" / "support" / "lean"
#: As the console script, the launcher does not have the current directory on its import path.
CLI = (
    sys.executable,
    "-c",
    "import sys; del sys.path[0]; from tfdist.cli.main import main; sys.exit(main())",
)

_STARTED = re.compile(r"^tfdist run: (\w+ \d+) is process (\d+)(?: at (\S+))?$")
_SHOWN_LINES = 40


@dataclasses.dataclass(frozen=True)
class Run:
    """A job that has ended.

    Attributes:
        code: Exit code of the launcher; -n where signal n ended the launcher itself.
        output: Everything on its standard output and error, in the order of arrival.
        out_dir: Where scripts wrote their reports.
        seconds: How long it took.
    """

    code: int
    output: str
    out_dir: Path
    seconds: float

    @property
    def tasks(self) -> list[str]:
        """The tasks that were started, for example ["worker 0", "worker 1"]."""
        return list(dict.fromkeys(task for task, _, _ in _started(self.output)))

    def lines(self, task: str = "worker 0") -> list[str]:
        """Returns what `task` printed, without its prefix."""
        return _lines_of(self.output, task)

    def result(self, task: str = "worker 0") -> Any:
        """Returns what `task` gave to `report(...)`."""
        path = self.out_dir / f"{task.replace(' ', '-')}.json"
        assert path.exists(), f"{task} reported nothing.\n{describe(self.output)}"
        return json.loads(path.read_text(encoding="utf-8"))


class Job:
    """A running launcher.

    Attributes:
        pid: Process id of the launcher.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, out_dir: Path):
        self._out_dir = out_dir
        self._began = time.monotonic()
        self._popen = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *unused: object) -> None:
        self.destroy()

    @property
    def output(self) -> str:
        """What has been printed so far, in whole lines."""
        with self._changed:
            return "".join(self._lines)

    def task_pid(self, task: str) -> int:
        """Returns the process id of the latest start of `task`."""
        pids = [pid for name, pid, _ in _started(self.output) if name == task]
        assert pids, f"{task} has not been started.\n{describe(self.output)}"
        return pids[-1]

    def children(self) -> list[psutil.Process]:
        """Returns the live processes below the launcher: the tasks and what they started."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
            return [p for p in found if p.is_running() and not _is_guard(p)]
        except psutil.NoSuchProcess:
            return []

    def wait_for_line(self, text: str, timeout: float = 60.0) -> str:
        """Waits for a line that contains `text` and returns it."""
        found: list[str] = []
        seen = 0

        def look() -> bool:
            nonlocal seen
            found.extend(line for line in self._lines[seen:] if text in line)
            seen = len(self._lines)
            return bool(found) or self._ended

        with self._changed:
            self._changed.wait_for(look, timeout)
        if not found:
            self._fail(f"no line with {text!r} within {timeout:g} s")
        return found[0].rstrip("\n")

    def kill(self, task: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process of `task` alone."""
        os.kill(self.task_pid(task), number)

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher alone."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 180.0) -> Run:
        """Waits for the launcher to end; kills everything and fails at the deadline."""
        try:
            code = self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self._fail(f"not ended within {timeout:g} s")
        seconds = time.monotonic() - self._began
        self._reader.join(5.0)  # a leftover may hold the pipe open; what it prints is not awaited
        return Run(code, self.output, self._out_dir, seconds)

    def destroy(self) -> None:
        """Kills the launcher and everything below it."""
        below = self.children()
        self._popen.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._changed:
                self._lines.append(line.decode("utf-8", "replace"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _fail(self, reason: str) -> Any:
        self.destroy()
        raise AssertionError(f"{reason}\n{describe(self.output)}")


def start_script(
    source_or_path: str | Path | None,
    *,
    tmp_path: Path,
    workers: int | None = 2,
    args: Sequence[str] = (),
    launcher_args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
) -> Job:
    """Starts a script under `tfdist run` and returns at once.

    Args:
        source_or_path: Source text of the script, its path, or None to name the program in `args`.
        tmp_path: Working directory of the job; reports and a script given as text go there.
        workers: Number of workers, or None to leave the option out.
        args: The script's own arguments.
        launcher_args: More options for `tfdist run`.
        env: Variables to set, or to remove where the value is None.
    """
    program: list[str] = []
    if isinstance(source_or_path, str):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source_or_path), encoding="utf-8")
        program = [str(path)]
    elif source_or_path is not None:
        program = [str(source_or_path)]
    out_dir = tmp_path / "reports"
    out_dir.mkdir(exist_ok=True)
    count = [] if workers is None else ["--workers", str(workers)]
    command = [*CLI, "run", *count, *launcher_args, *program, *args]
    return Job(command, _environment(out_dir, env or {}), tmp_path, out_dir)


def run_script(
    source_or_path: str | Path | None,
    *,
    tmp_path: Path,
    workers: int | None = 2,
    args: Sequence[str] = (),
    launcher_args: Sequence[str] = (),
    timeout: float = 180.0,
    env: Mapping[str, str | None] | None = None,
) -> Run:
    """Runs a script under `tfdist run` to its end. Arguments as for `start_script`.

    Raises:
        AssertionError: It has not ended after `timeout` seconds.
    """
    with start_script(
        source_or_path,
        tmp_path=tmp_path,
        workers=workers,
        args=args,
        launcher_args=launcher_args,
        env=env,
    ) as job:
        return job.wait(timeout)


def eventually(condition: Callable[[], bool], timeout: float) -> bool:
    """Returns whether `condition` comes true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    """Returns whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe(output: str) -> str:
    """Returns the last lines of every task and of the launcher, for a failing test's message."""
    tasks = list(dict.fromkeys(task for task, _, _ in _started(output)))
    blocks = [(task, _lines_of(output, task)) for task in tasks]
    own = [line for line in output.splitlines() if not line.startswith("[")]
    blocks.append(("launcher", own))
    return "\n".join(
        f"--- {name}, last lines\n" + "\n".join(lines[-_SHOWN_LINES:]) for name, lines in blocks
    )


def _started(output: str) -> list[tuple[str, int, str]]:
    matches = (_STARTED.match(line) for line in output.splitlines())
    return [(m[1], int(m[2]), m[3] or "") for m in matches if m]


def _lines_of(output: str, task: str) -> list[str]:
    lines = output.splitlines()
    if {name for name, _, _ in _started(output)} == {task}:  # one task alone has no prefix
        return [line for line in lines if not line.startswith("tfdist run: ")]
    prefix = f"[{task}] "
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def _is_guard(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("guard.py") for word in process.cmdline())
    except psutil.NoSuchProcess:
        return True  # ended meanwhile: not alive either


def _environment(out_dir: Path, changes: Mapping[str, str | None]) -> dict[str, str]:
    env = dict(os.environ)
    for name in ("TF_CONFIG", "CLUSTER_SPEC", "NO_COLOR"):
        env.pop(name, None)
    paths = [str(LEAN), str(ROOT), str(ROOT / "tests" / "support"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["TFDIST_TEST_OUT"] = str(out_dir)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env
