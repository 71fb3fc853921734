"""One run of the job under `tfdist run`, watched from outside, with a deadline.

Whatever happens, no process of it is left: the launcher dies with this process, and its guard kills
the tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.measure.notes import COMMITS
from tfdist.measure.notes import FOLDER
from tfdist.measure.notes import Reader
from tfdist.state.fence import CommitName

_ROOT = str(Path(__file__).resolve().parents[2])
_LAUNCHER = (
    "import sys; sys.path[0] = sys.argv.pop(1); from tfdist.cli.main import main; sys.exit(main())"
)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.01
_END_SECONDS = 30.0
#: Lines of the launcher, and of tasks about commits.
_TELLING = re.compile(
    r"tfdist run: (.*)"
    r"|(\[\w+ \d+\] )?.*?"
    r"(the commit \S+ is passed over.*|training goes on.*|a commit was skipped.*"
    r"|\d+ commits were skipped.*)"
)


@dataclasses.dataclass(frozen=True)
class Job:
    """What is run, twice.

    Attributes:
        script: Path of the user's script.
        args: Its arguments.
        workers: Number of workers.
        ps: Number of parameter servers.
        grace: Seconds that tasks get to end after a failure.
        timeout: Seconds that a run may take.
    """

    script: str
    args: tuple[str, ...] = ()
    workers: int = 1
    ps: int = 0
    grace: float = 20.0
    timeout: float = 600.0


@dataclasses.dataclass
class Start:
    """One process of a task.

    Attributes:
        task: For example "worker 0".
        incarnation: From 0.
        pid: Process id.
        begin: When it was first heard of, in seconds since 1970.
        end: When it was gone, or None.
    """

    task: str
    incarnation: int
    pid: int
    begin: float
    end: float | None = None


class Run:
    """One run of a job; what is known about it grows while it goes on.

    Args:
        job: What to run.
        folder: Where all of it is noted; it must not have been used before.

    Attributes:
        code: Exit code of the launcher, or None while it runs or where it was killed at the
            deadline.
        notes: All that tasks have noted.
        starts: Processes.
        commits: Time, step and directory of each commit that was seen on the disk.
        said: Time and text of what the launcher said, and tasks about commits.
        begin: Seconds since 1970.
        end: The same.
    """

    def __init__(self, job: Job, folder: Path):
        self.job = job
        self.folder = folder
        self.code: int | None = None
        self.notes: list[dict[str, Any]] = []
        self.starts: list[Start] = []
        self.commits: list[tuple[float, int, Path]] = []
        self.said: list[tuple[float, str]] = []
        self.begin = self.end = 0.0
        self._seen: set[str] = set()
        self._reader = Reader(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / COMMITS).mkdir(exist_ok=True)

    def go(self, restarts: int, act: Callable[[Run], None] | None = None) -> None:
        """Runs it to its end, or to the deadline.

        Args:
            restarts: How often the launcher may start it again.
            act: Runs beside it in a thread of its own, which must end when `code` is set or
                `is_over` returns True.
        """
        self.begin = time.time()
        with _launcher(self.job, self.folder, restarts) as process:
            reader = threading.Thread(target=self._read, args=[process], daemon=True)
            reader.start()
            actor = threading.Thread(target=act, args=[self], daemon=True) if act else None
            if actor is not None:
                actor.start()
            deadline = time.monotonic() + self.job.timeout
            while (code := process.poll()) is None and time.monotonic() < deadline:
                self.look()
                time.sleep(_POLL_SECONDS)
            self.code = code
            self.end = time.time()
        self.look()
        reader.join(2.0)
        if actor is not None:
            actor.join(2.0)

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens."""
        return self.end > 0.0

    def look(self) -> None:
        """Takes in what is new."""
        for line in self._reader.fresh():
            self.notes.append(line)
            if line["kind"] == "start":
                self.starts.append(
                    Start(line["task"], line["incarnation"], line["pid"], line["time"])
                )
        for start in self.starts:
            if start.end is None and not is_alive(start.pid):
                start.end = time.time()
        for path in commits_in(self.folder / COMMITS):
            name = CommitName.parse(path.name)
            if name is not None and str(path) not in self._seen:
                self._seen.add(str(path))
                self.commits.append((time.time(), name.step, path))

    def latest(self) -> dict[str, Start]:
        """Returns the newest process of every task."""
        return {start.task: start for start in sorted(self.starts, key=lambda each: each.begin)}

    def tail(self, lines: int = 15) -> str:
        """Returns the last lines that the job has printed."""
        with contextlib.suppress(OSError):
            text = (self.folder / "output.log").read_text("utf-8", "replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with open(self.folder / "output.log", "ab") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                match = _TELLING.match(line.decode("utf-8", "replace"))
                if match:
                    text = match[1] or f"{match[2] or ''}{match[3]}"
                    self.said.append((time.time(), text))


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False


def commits_in(folder: Path) -> list[Path]:
    """Returns the directories of commits below a folder, of all callbacks and calls of `fit`."""
    found = []
    for directory, names, _ in os.walk(folder):
        commits = [name for name in names if CommitName.parse(name) is not None]
        found += [Path(directory, name) for name in commits]
        names[:] = [n for n in names if n not in commits and not n.startswith(".")]
        if "result" in names:
            names.remove("result")
    return found


@contextlib.contextmanager
def _launcher(job: Job, folder: Path, restarts: int) -> Any:
    options = ["--workers", str(job.workers), "--ps", str(job.ps), "--grace", f"{job.grace:g}"]
    command = [sys.executable, "-c", _LAUNCHER, _ROOT, "run", *options]
    command += ["--max-restarts", str(restarts), "-m", "tfdist.measure.drilled"]
    process = subprocess.Popen(
        [*command, job.script, *job.args],
        env=_environment(os.environ, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # Its guard kills the tasks, stopped ones, too.
            process.kill()
        process.wait()
        _wait_for_tasks(folder)


def _environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {**environ, FOLDER: str(folder)}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_tasks(folder: Path) -> None:
    """Waits until no task is left; kills what the guard has not."""
    pids = [line["pid"] for line in Reader(folder).fresh() if line["kind"] == "start"]
    mark = f"\0{FOLDER}={folder}\0".encode()
    deadline = time.monotonic() + _END_SECONDS
    patience = time.monotonic() + 3.0
    while (left := [pid for pid in pids if _is_ours(pid, mark)]) and time.monotonic() < deadline:
        for pid in left if time.monotonic() > patience else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_ours(pid: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):
        if is_alive(pid):
            with open(f"/proc/{pid}/environ", "rb") as file:
                return mark in b"\0" + file.read()
    return False
