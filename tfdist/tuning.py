"""Settings of a process that trains on CPU, made before TensorFlow loads.

Memory. TensorFlow allocates every tensor anew with malloc, and glibc maps a large one from the
system and unmaps it afterwards: each step pays for zeroing all those pages again. Measured for
dense layers of 1024, 4096, 4096 and 10 units on one core of a busy machine: 33,000 page faults and
107 ms of system time in each step before, 1,100 faults and 5 ms after; CPU time 470 ms before,
340 ms after.

Kernels. TensorFlow leaves oneDNN's kernels off on x86 processors without AVX-512 VNNI or the like,
and runs those of Eigen that were compiled for AVX, without FMA. With oneDNN a small ResNet took
340 to 400 ms of CPU time a step instead of 510 to 580 (AMD EPYC).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1
#: With more threads than this, taking turns at one heap may cost more than the pages.
_MOST_CORES = 8


def tune() -> None:
    """Makes the settings, unless TensorFlow is loaded or the environment has made them."""
    if "tensorflow" in sys.modules:
        return
    keep_pages()
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def keep_pages() -> bool:
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
