"""Strikes a run where it waits for it: kills, stops, damages, fills.

A training is held at the step of a strike (`recorder`). The injector lets it go on and strikes a
moment later, so that faults come in the middle of steps, of all-reduces and of commits.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path

from tfdist.measure import faults
from tfdist.measure.faults import Strike
from tfdist.measure.notes import COMMITS
from tfdist.measure.notes import strike_file
from tfdist.measure.runs import Run
from tfdist.measure.runs import commits_in
from tfdist.measure.runs import is_alive
from tfdist.state.fence import CommitName

#: How long a task is stopped.
STOP_SECONDS = 10.0
_MOST_DELAY = 0.5
_FILLER = "filler"
_POLL_SECONDS = 0.005
_CLONE_NEWNS = 0x00020000


@dataclasses.dataclass(frozen=True)
class Struck:
    """A strike that was made.

    Attributes:
        kind: See `Strike`.
        step: The step it was held at.
        time: When, in seconds since 1970.
        tasks: Whom it hit.
        detail: What was done, and what followed at once.
        has_hit: Whether it was there to be hit.
    """

    kind: str
    step: int
    time: float
    tasks: tuple[str, ...]
    detail: str
    has_hit: bool = True


class Injector:
    """Makes the strikes of a plan, one after the other.

    Args:
        strikes: The plan.
        step_seconds: How long a step takes in peace.

    Attributes:
        struck: What was done.
    """

    def __init__(self, strikes: Sequence[Strike], step_seconds: float):
        self.struck: list[Struck] = []
        self._strikes = tuple(strikes)
        self._step_seconds = step_seconds
        self._random = random.Random(len(self._strikes))

    def __call__(self, run: Run) -> None:
        """Strikes until the run is over; for `Run.go`."""
        for number, strike in enumerate(self._strikes):
            while not any(n["kind"] == "hold" and n["strike"] == number for n in list(run.notes)):
                if run.is_over:
                    return
                time.sleep(_POLL_SECONDS)
            self._strike(run, number, strike)

    def _strike(self, run: Run, number: int, strike: Strike) -> None:
        disk = run.folder / COMMITS
        if strike.kind == "full-disk":
            detail = f"{_fill(disk / _FILLER)} bytes taken"
            self._note(strike, (), detail)
            strike_file(run.folder, number).touch()
            return
        if strike.kind == faults.FREE_DISK:
            (disk / _FILLER).unlink(missing_ok=True)
        strike_file(run.folder, number).touch()
        time.sleep(min(self._random.uniform(0.0, 1.5) * self._step_seconds, _MOST_DELAY))
        targets = _targets(run, strike.kind)
        if strike.kind == "sigstop":
            self._stop(run, strike, targets)
            return
        number_ = signal.SIGTERM if strike.kind == "sigterm" else signal.SIGKILL
        at = time.time()
        hit = [task for task, pid in targets.items() if _send(pid, number_)]
        detail = f"{signal.Signals(number_).name} to {', '.join(hit) or 'nobody'}"
        if strike.kind == "damage":
            while any(is_alive(pid) for pid in targets.values()) and not run.is_over:
                time.sleep(_POLL_SECONDS)
            detail += f"; {_damage(disk)}"
        self._note(strike, tuple(hit), detail, at=at, has_hit=bool(hit))

    def _stop(self, run: Run, strike: Strike, targets: dict[str, int]) -> None:
        at = time.time()
        hit = [task for task, pid in targets.items() if _send(pid, signal.SIGSTOP)]
        pids = [targets[task] for task in hit]
        end = time.monotonic() + STOP_SECONDS
        while any(is_alive(p) for p in pids) and time.monotonic() < end and not run.is_over:
            time.sleep(_POLL_SECONDS)
        seconds = time.time() - at
        left = [pid for pid in pids if _send(pid, signal.SIGCONT)]
        after = "nobody had ended it: SIGCONT" if left else "it was killed by then"
        detail = f"SIGSTOP to {', '.join(hit) or 'nobody'}; after {seconds:.1f} s {after}"
        self._note(strike, tuple(hit), detail, at=at, has_hit=bool(hit))

    def _note(
        self,
        strike: Strike,
        tasks: tuple[str, ...],
        detail: str,
        *,
        at: float | None = None,
        has_hit: bool = True,
    ) -> None:
        when = time.time() if at is None else at
        self.struck.append(Struck(strike.kind, strike.step, when, tasks, detail, has_hit))


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Puts a file system of `size` bytes in memory where the commits of a run go.

    Only this thread, and what it starts from here on, sees it: when the last of these has ended,
    in whatever way, it is gone.

    Raises:
        OSError: This process may not mount.
    """
    disk = folder / COMMITS
    disk.mkdir(parents=True, exist_ok=True)
    with _own_mounts():
        _mount("-t", "tmpfs", "-o", f"size={size}", "tfdist-drill", str(disk))
        try:
            yield
        finally:
            unmount(disk)


@contextlib.contextmanager
def _own_mounts() -> Iterator[None]:
    """Gives this thread file systems of its own, as they are now, and the common ones at the end.

    Raises:
        OSError: It may not have them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        common = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
        stack.callback(os.close, common)
        here = os.open(".", os.O_RDONLY)
        stack.callback(os.close, here)
        if libc.unshare(_CLONE_NEWNS):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        try:
            _mount("--make-rprivate", "/")
            yield
        finally:
            # It fails while a thread that was started meanwhile runs on; that is no harm.
            libc.setns(common, _CLONE_NEWNS)
            os.fchdir(here)


def _mount(*arguments: str) -> None:
    done = subprocess.run(
        ["mount", *arguments], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.strip() or "mount failed")


def unmount(disk: Path) -> None:
    """Takes a small disk away."""
    # Lazily: whoever still looks at it does not keep it there.
    subprocess.run(["umount", "-l", str(disk)], capture_output=True, timeout=20, check=False)


def _targets(run: Run, kind: str) -> dict[str, int]:
    latest = {task: start.pid for task, start in run.latest().items()}
    workers = sorted(
        (task for task in latest if task.startswith("worker ")), key=lambda t: int(t.split()[1])
    )
    if kind in ("kill-all", "damage"):
        return latest
    if kind in ("kill-chief", faults.FREE_DISK):
        chief = "chief 0" if "chief 0" in latest else "worker 0"
        return {chief: latest[chief]}
    return {workers[-1]: latest[workers[-1]]}


def _send(pid: int, number: int) -> bool:
    if not is_alive(pid):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _damage(disk: Path) -> str:
    """Turns over a byte in the largest file of the newest commit; returns what it did."""
    commits = [(path, CommitName.parse(path.name)) for path in commits_in(disk)]
    known = [(name, path) for path, name in commits if name is not None]
    if not known:
        return "there was no commit yet to damage"
    # Of several calls of `fit`, the one under way.
    newest = max(known, key=lambda each: (each[1].stat().st_mtime, each[0]))[1]
    path = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    place = path.stat().st_size // 2
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0xFF]))
    return f"byte {place} of {newest.name}/{path.name} turned over"


def _fill(path: Path) -> int:
    """Writes until there is no room; returns how many bytes it took."""
    size = 0
    with open(path, "wb", buffering=0) as file:
        for block in (b"\0" * 65536, b"\0" * 4096):
            with contextlib.suppress(OSError):
                while True:
                    size += file.write(block)
    return size
