"""Which faults a drill knows, and after how many steps each one strikes.

| fault | is |
|---|---|
| `kill-worker` | SIGKILL to the last worker |
| `kill-chief` | SIGKILL to the task that coordinates and writes commits |
| `kill-all` | SIGKILL to all tasks at once |
| `sigterm` | SIGTERM to the last worker, as a machine that is to be taken away |
| `sigstop` | SIGSTOP to the last worker; SIGCONT after 10 s, unless it has been killed by then |
| `damage` | SIGKILL to all tasks, and a byte of the newest commit is turned over |
| `full-disk` | no room is left where commits go; later there is, and the chief is killed |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.errors import ConfigError

FAULTS = {
    "kill-worker": "SIGKILL to the last worker",
    "kill-chief": "SIGKILL to the chief",
    "kill-all": "SIGKILL to all tasks",
    "sigterm": "SIGTERM to the last worker",
    "sigstop": "SIGSTOP to the last worker, SIGCONT later",
    "damage": "SIGKILL to all tasks, then a byte of the newest commit turned over",
    "full-disk": "no room for commits; then room again, and SIGKILL to the chief",
}
#: The second half of `full-disk`.
FREE_DISK = "free-disk"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that was asked for.

    Attributes:
        kind: One of `FAULTS`.
        step: Number of steps after which it is to strike, or None to have it chosen.
    """

    kind: str
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class Strike:
    """Something that is done to a run.

    Attributes:
        kind: One of `FAULTS`, or `FREE_DISK`.
        step: Number of steps, over all calls of `fit`, after which it is done.
    """

    kind: str
    step: int


def parse(text: str) -> tuple[Fault, ...]:
    """Returns the faults that a command line names.

    Args:
        text: Names with commas between them, each with "@STEP" or without.

    Raises:
        ConfigError: One of them is not known.

    Example:
        >>> parse("kill-worker,damage@30")
        (Fault(kind='kill-worker', step=None), Fault(kind='damage', step=30))
    """
    found = []
    for word in text.split(","):
        kind, at, step = word.strip().partition("@")
        if kind not in FAULTS or (at and not (step.isdigit() and int(step) > 0)):
            raise ConfigError(
                f"--faults to be some of {', '.join(FAULTS)}, each with @STEP or without",
                repr(word.strip()),
                "write for example --faults kill-worker,kill-chief@30",
            )
        found.append(Fault(kind, int(step) if at else None))
    return tuple(found)


def plan(faults: Sequence[Fault], steps: int, interval: int) -> tuple[Strike, ...]:
    """Returns when to strike, in the order of the steps.

    Faults without a step are spread evenly over the run.

    Args:
        faults: What was asked for.
        steps: Steps of the undisturbed run, over all calls of `fit`.
        interval: Steps between two commits.

    Raises:
        ConfigError: There are not enough steps, or a step is beyond them.
    """
    if steps <= len(faults):
        raise ConfigError(
            f"training of more than {len(faults)} steps, so that {len(faults)} faults can strike",
            f"{steps} steps",
            "ask for fewer --faults, or have the script train longer",
        )
    late = [fault for fault in faults if fault.step is not None and fault.step >= steps]
    if late:
        raise ConfigError(
            f"faults to strike before training ends, after {steps} steps",
            f"{late[0].kind}@{late[0].step}",
            f"name a step below {steps}",
        )
    width = steps / (len(faults) + 1)
    strikes = []
    for number, fault in enumerate(faults, start=1):
        step = fault.step or max(1, round(number * width))
        strikes.append(Strike(fault.kind, step))
        if fault.kind == "full-disk":
            # Long enough for a commit to fail and for the next one to say so, and before the next
            # fault.
            lasts = max(1, min(max(2 * interval, 2), int(width) - 1))
            strikes.append(Strike(FREE_DISK, min(step + lasts, steps - 1)))
    return tuple(sorted(strikes, key=lambda strike: strike.step))
