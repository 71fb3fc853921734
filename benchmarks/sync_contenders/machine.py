"""How busy the machine is with other things."""

from __future__ import annotations

import os
import pathlib
import platform
import time


def idle_share(seconds: float = 1.0) -> float:
    """Returns the share of all cores' time that was idle, over `seconds` from now."""
    idle, total = _ticks()
    time.sleep(seconds)
    later_idle, later_total = _ticks()
    return (later_idle - idle) / max(1, later_total - total)


def load() -> float:
    """Returns the load average over the last minute."""
    return os.getloadavg()[0]


def cpu() -> str:
    """Returns what the processor calls itself."""
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _ticks() -> tuple[int, int]:
    with open("/proc/stat", encoding="ascii") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    # user nice system idle iowait irq softirq steal: time stolen by other guests is not idle.
    return fields[3] + fields[4], sum(fields)
