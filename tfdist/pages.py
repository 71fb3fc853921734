"""Keeping the memory of large tensors for the next step instead of giving it back.

TensorFlow allocates every tensor anew with malloc, and glibc maps a large one from the system and
unmaps it afterwards: each step pays for zeroing all those pages again. Measured for dense layers of
1024, 4096, 4096 and 10 units on one core of a busy machine: 33,000 page faults and 107 ms of system
time in each step before, 1,100 faults and 5 ms after; CPU time 470 ms before, 340 ms after.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1
#: With more threads than this, taking turns at one heap may cost more than the pages.
_MOST_CORES = 8


def keep() -> bool:
    """Makes malloc use one heap that never shrinks; to be called before TensorFlow loads.

    The process then stays as large as it has ever been (20% larger in the measured case), and
    threads that allocate more than 1 KB at the same time take turns. So it is for processes with
    few cores, unless `TFDIST_KEEP_PAGES` is 1; 0 leaves malloc alone. Threads that have allocated
    before keep their heaps: called after `import tensorflow` it gains nothing (measured).

    Returns:
        Whether the C library took it: False without glibc.
    """
    asked = os.environ.get("TFDIST_KEEP_PAGES", "").strip()
    if asked == "0" or (asked != "1" and _cores() > _MOST_CORES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # Without the first, large tensors of TensorFlow's threads would be mapped all the same.
    options = [(_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER)]
    return all(mallopt(option, value) == 1 for option, value in options)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
