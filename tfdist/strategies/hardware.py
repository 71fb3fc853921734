"""Accelerators of this machine, counted without importing TensorFlow.

The driver lists its devices in files, and `CUDA_VISIBLE_DEVICES` hides some of them from programs.
TensorFlow may still see fewer: it needs the CUDA libraries too.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE = re.compile(r"nvidia[0-9]+")
_NUMBER = re.compile(r"[0-9]{1,4}")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The accelerators that a process may use.

    Attributes:
        accelerators: How many.
        kind: What they are: "gpu", or "cpu" where there is none.
    """

    accelerators: int = 0
    kind: str = "cpu"


def detect_hardware(
    environ: Mapping[str, str] | None = None,
    proc: str | os.PathLike[str] = "/proc",
    dev: str | os.PathLike[str] = "/dev",
) -> Hardware:
    """Counts the NVIDIA GPUs that programs started with `environ` may use.

    Args:
        environ: Environment variables; `os.environ` by default.
        proc: Where the proc file system is mounted.
        dev: Where device files are.

    Returns:
        The accelerators of this machine.
    """
    variables = os.environ if environ is None else environ
    installed = _entries(Path(proc) / "driver" / "nvidia" / "gpus")
    devices = [name for name in _entries(Path(dev)) if _DEVICE.fullmatch(name)]
    # A container sees all GPUs of its host in /proc, and in /dev only those it was given.
    present = min(len(devices), len(installed)) if devices and installed else len(devices)
    visible = _visible(variables.get("CUDA_VISIBLE_DEVICES"), present)
    return Hardware(visible, "gpu") if visible else Hardware()


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _visible(value: str | None, present: int) -> int:
    """Returns how many of `present` GPUs remain, by CUDA's rules.

    CUDA reads the list up to the first entry that is no device, and takes a list with an entry
    twice for an empty one.
    """
    if value is None:
        return present
    seen: list[str] = []
    for entry in (item.strip() for item in value.split(",")):
        named = entry.upper().startswith(("GPU-", "MIG-"))
        if not named and not (_NUMBER.fullmatch(entry) and int(entry) < present):
            break
        key = entry if named else str(int(entry))
        if key in seen:
            return 0
        seen.append(key)
    parts = sum(entry.upper().startswith("MIG-") for entry in seen)
    if parts:  # CUDA gives a process one part of a partitioned GPU, however many are listed.
        return 1 if present else 0
    return min(len(seen), present)
