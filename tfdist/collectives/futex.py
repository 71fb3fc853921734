"""Sleeping until another process changes a word of shared memory: the Linux system call futex."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Any

_SYS_FUTEX = 202  # On x86_64.
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def wait(address: int, value: int, seconds: float) -> None:
    """Sleeps while the 32-bit word at `address` is `value`, at most `seconds`, without the GIL.

    It may also return early, for no reason.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscalls()[0](_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(limit), 0, 0)


def wake(address: int) -> None:
    """Wakes all who sleep on the word at `address`."""
    _syscalls()[1](_SYS_FUTEX, address, _WAKE, _EVERYBODY, None, 0, 0)


def problem() -> str:
    """Why `wait` and `wake` cannot be used here, or ""."""
    word = ctypes.c_uint32(0)
    try:
        if _syscalls()[1](_SYS_FUTEX, ctypes.addressof(word), _WAKE, 1, None, 0, 0) == 0:
            return ""
        return f"futex: {os.strerror(ctypes.get_errno() or errno.ENOSYS)}"
    except (OSError, AttributeError) as error:
        return f"futex: {error}"


@functools.cache
def _syscalls() -> tuple[Any, Any]:
    """Returns `syscall` for calls that may sleep, and for those that never do and keep the GIL."""
    found = []
    for library in (ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)):
        function = library.syscall
        function.restype = ctypes.c_long
        function.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_long,
        ]
        found.append(function)
    return found[0], found[1]
