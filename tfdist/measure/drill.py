"""The drill: a job in peace, the same job with faults, and whether it ends the same."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import EXIT_USAGE
from tfdist.errors import ConfigError
from tfdist.errors import TfdistError
from tfdist.measure import evidence as evidences
from tfdist.measure import faults as fault_kinds
from tfdist.measure import injector as injectors
from tfdist.measure.evidence import Check
from tfdist.measure.evidence import Evidence
from tfdist.measure.faults import Fault
from tfdist.measure.faults import Strike
from tfdist.measure.injector import Injector
from tfdist.measure.injector import Struck
from tfdist.measure.notes import COMMITS
from tfdist.measure.notes import PLAN
from tfdist.measure.runs import Job
from tfdist.measure.runs import Run

#: Launches beyond one for every strike: what a strike brings down may come down twice.
_MORE_RESTARTS = 3
_RUNS = ("peace", "faults", "peace-again")
_LEAST_DISK = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Resumption:
    """A start of the job that went on where an earlier one had been.

    Attributes:
        time: Seconds since 1970.
        fit: Number of the call of `fit`, from 1.
        step: Steps that were done, over all calls of `fit`.
        lost: Steps that had been done beyond these.
    """

    time: float
    fit: int
    step: int
    lost: int


@dataclasses.dataclass(frozen=True)
class Result:
    """What a drill has found.

    Attributes:
        job: What was run.
        peace: The run in peace.
        faulty: The run with faults.
        struck: What was done to it.
        skipped: Faults that could not be made here, and why.
        resumptions: Where it went on.
        checks: The comparisons.
        reasons: What explains a difference.
        rows: Rows trained on in each epoch, in peace and with faults.
    """

    job: Job
    peace: Run
    faulty: Run
    struck: tuple[Struck, ...]
    skipped: dict[str, str]
    resumptions: tuple[Resumption, ...]
    checks: tuple[Check, ...]
    reasons: tuple[str, ...]
    rows: tuple[tuple[str, int, int], ...]

    @property
    def is_exact(self) -> bool:
        """Whether recovery was exact."""
        return all(check.ok for check in self.checks if check.counts)


def drill(
    job: Job, faults: Sequence[Fault], folder: Path, say: Callable[[str], None] = print
) -> Result:
    """Runs a job in peace and with faults, and compares.

    Args:
        job: What to run.
        faults: What to do to it.
        folder: Where what the runs leave behind goes; runs of an earlier drill are removed.
        say: Shows a line about the progress.

    Raises:
        ConfigError: The script has no `BackupAndRestore`, or the faults do not fit its length.
        TfdistError: It fails in peace.
    """
    folder = folder.resolve()
    for name in _RUNS:
        _clear(folder / name)
    say("the job runs in peace")
    peace = Run(job, folder / "peace")
    peace.go(0)
    check_peace(peace)
    wanted = evidences.gather(peace.folder, peace.notes)
    steps = max((n["progress"] for n in peace.notes if n["kind"] == "step"), default=0)
    say(f"in peace it took {peace.end - peace.begin:.1f} s for {steps} steps")
    interval = _interval(peace, steps)
    faulty = Run(job, folder / "faults")
    with contextlib.ExitStack() as stack:
        kept, skipped = _possible(faults, faulty, _bytes(peace.folder / COMMITS), stack)
        for kind, reason in skipped.items():
            say(f"{kind} is left out: {reason}")
        strikes = fault_kinds.plan(kept, steps, interval)
        say("the job runs with faults: " + ", ".join(f"{s.kind} at step {s.step}" for s in strikes))
        (faulty.folder / PLAN).write_text(json.dumps([s.step for s in strikes]))
        injector = Injector(strikes, _step_seconds(peace))
        faulty.go(len(strikes) + _MORE_RESTARTS, injector)
        for struck in injector.struck:
            say(f"step {struck.step}: {struck.detail}")
        say(f"with faults it took {faulty.end - faulty.begin:.1f} s")
    found = evidences.gather(faulty.folder, faulty.notes)
    checks = [_ended(faulty), _all_struck(strikes, injector.struck)]
    checks += evidences.compare(wanted, found)
    differs = [check for check in checks[2:] if check.counts and not check.ok]
    reasons: list[str] = []
    if differs:
        again = None
        if found.fits:
            say("results differ: the job runs in peace again, to see whether it repeats itself")
            second = Run(job, folder / "peace-again")
            second.go(0)
            again = evidences.gather(second.folder, second.notes) if second.code == 0 else None
        reasons = evidences.why(wanted, found, again, differs)
    if wanted.is_asynchronous:
        reasons.append(
            "Workers do not wait for each other: weights and history come out differently every "
            "time, and are shown only. Steps, updates and examples decide."
        )
    for name in _RUNS:
        shutil.rmtree(folder / name / COMMITS, ignore_errors=True)
    return Result(
        job,
        peace,
        faulty,
        tuple(injector.struck),
        skipped,
        _resumptions(faulty),
        tuple(checks),
        tuple(reasons),
        _rows(wanted, found),
    )


def _clear(folder: Path) -> None:
    """Removes what an earlier drill has left of a run."""
    if (folder / COMMITS).is_mount():  # It was killed.
        injectors.unmount(folder / COMMITS)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(
            "--out to be a directory whose earlier drill can be removed",
            f"{str(folder)!r} ({error.strerror})",
            "name another directory",
        ) from error


def check_peace(run: Run) -> None:
    """Makes sure that a run in peace is one to compare with.

    Args:
        run: It has ended.

    Raises:
        ConfigError: Its script has no `BackupAndRestore`.
        TfdistError: It has failed, or was ended at its deadline.
    """
    if run.code is None:
        raise TfdistError(
            f"the job to end within {run.job.timeout:g} s in peace",
            f"it still ran; its last lines:\n{run.tail()}",
            "raise --timeout, or have the script train less",
        )
    if run.code:
        error = TfdistError(
            "the job to end with 0 in peace", f"exit code {run.code}; its last lines:\n{run.tail()}"
        )
        error.exit_code = EXIT_USAGE if run.code == EXIT_USAGE else error.exit_code
        raise error
    fits = [note for note in run.notes if note["kind"] == "fit"]
    if not any(note["has_backup"] for note in fits):
        raise ConfigError(
            "a script whose fit has a tfdist.callbacks.BackupAndRestore: without one, nothing "
            "survives",
            "fit without it" if fits else "no call of fit",
            "write model.fit(..., callbacks=[tfdist.callbacks.BackupAndRestore('backup', "
            "save_every=100)])",
        )


def _possible(
    faults: Sequence[Fault], run: Run, size: int, stack: contextlib.ExitStack
) -> tuple[list[Fault], dict[str, str]]:
    """Returns the faults that can be made here, and why the others cannot."""
    skipped: dict[str, str] = {}
    kinds = [fault.kind for fault in faults]
    if "full-disk" in kinds:
        try:
            stack.enter_context(injectors.small_disk(run.folder, max(_LEAST_DISK, 8 * size)))
        except OSError as error:
            skipped["full-disk"] = f"it needs the right to mount a file system ({error})"
    kept = [fault for fault in faults if fault.kind not in skipped]
    if not kept:
        raise ConfigError(
            "a fault that can be made here",
            "; ".join(f"{kind}: {reason}" for kind, reason in skipped.items()),
            "name other --faults, or run as root",
        )
    return kept, skipped


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _interval(run: Run, steps: int) -> int:
    """Returns the steps between two commits, as far as they were seen."""
    seen = sorted({step for _, step, _ in run.commits})
    apart = [b - a for a, b in zip(seen, seen[1:], strict=False)]
    return min(apart) if apart else max(1, steps // 4)


def _step_seconds(run: Run) -> float:
    times = [note["time"] for note in run.notes if note["kind"] == "step"]
    apart = [b - a for a, b in zip(times, times[1:], strict=False)]
    return statistics.median(apart) if apart else 0.0


def _ended(run: Run) -> Check:
    if run.code is None:
        detail = f"it still ran after {run.job.timeout:g} s: raise --timeout"
        return Check("the job came to its end", False, detail)
    starts = max((start.incarnation for start in run.starts), default=0)
    return Check(
        "the job came to its end",
        run.code == 0,
        f"exit code {run.code} after {starts} restart{'' if starts == 1 else 's'}",
    )


def _all_struck(strikes: Sequence[Strike], struck: Sequence[Struck]) -> Check:
    hit = sum(each.has_hit for each in struck)
    detail = f"{hit} of {len(strikes)}"
    if hit < len(strikes):
        detail += ": the job had ended before, or was not there to be hit"
    return Check("all faults struck", hit == len(strikes), detail)


def _resumptions(run: Run) -> tuple[Resumption, ...]:
    found = []
    farthest = 0
    opened: set[tuple[int, str]] = set()
    for note in sorted(run.notes, key=lambda each: float(each["time"])):
        if note["kind"] == "step":
            farthest = max(farthest, note["progress"])
        elif note["kind"] == "open" and note["is_chief"] and note["incarnation"] > 0:
            start = (note["incarnation"], note["task"])
            if start not in opened and not note["is_over"]:
                opened.add(start)
                at = note["progress"]
                found.append(Resumption(note["time"], note["fit"], at, max(0, farthest - at)))
    return tuple(found)


def _rows(wanted: Evidence, found: Evidence) -> tuple[tuple[str, int, int], ...]:
    mine, theirs = evidences.rows_by_epoch(wanted), evidences.rows_by_epoch(found)
    return tuple(
        (f"fit {fit}, epoch {epoch + 1}", mine.get((fit, epoch), 0), theirs.get((fit, epoch), 0))
        for fit, epoch in sorted({**mine, **theirs})
    )


def as_json(result: Result) -> dict[str, Any]:
    """Returns what `report.json` holds and `tfdist drill --json` prints.

    Args:
        result: Of a drill.
    """
    job, peace, faulty = result.job, result.peace, result.faulty
    return {
        "exact": result.is_exact,
        "checks": [dataclasses.asdict(check) for check in result.checks],
        "reasons": list(result.reasons),
        "job": {**dataclasses.asdict(job), "args": list(job.args)},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(peace.begin)),
        "seconds": {
            "peace": round(peace.end - peace.begin, 3),
            "faults": round(faulty.end - faulty.begin, 3),
        },
        "exit_codes": {"peace": peace.code, "faults": faulty.code},
        "faults": [
            {**dataclasses.asdict(each), "time": round(each.time - faulty.begin, 3)}
            for each in result.struck
        ],
        "skipped": result.skipped,
        "resumptions": [
            {**dataclasses.asdict(each), "time": round(each.time - faulty.begin, 3)}
            for each in result.resumptions
        ],
        "steps_lost": sum(each.lost for each in result.resumptions),
        "rows": [
            {"where": where, "peace": mine, "faults": theirs} for where, mine, theirs in result.rows
        ],
        "starts": [
            {
                "task": start.task,
                "incarnation": start.incarnation,
                "begin": round(start.begin - faulty.begin, 3),
                "end": None if start.end is None else round(start.end - faulty.begin, 3),
            }
            for start in faulty.starts
        ],
        "commits": [
            {"time": round(at - faulty.begin, 3), "step": step} for at, step, _ in faulty.commits
        ],
        "launcher": [[round(at - faulty.begin, 3), text] for at, text in faulty.said],
    }
