"""Memory that the ranks of one host share, and the agreement on whether they can.

Rank 0 makes it (`memfd_create`), the others open it through /proc. It has no name, so that nothing
is left behind however a job ends, and it is no part of /dev/shm, which is 64 MB in a container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import platform
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from tfdist.collectives import futex
from tfdist.collectives.layout import Layout
from tfdist.errors import DisagreementError

_NONCE_BYTES = 16

#: Gathers a value that JSON can hold from every rank, in the order of ranks.
AllGather = Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Place:
    """The shared memory as one rank sees it.

    Attributes:
        memory: The memory.
        layout: Its layout.
        rank: This rank.
        names: How to call each rank in messages.
    """

    memory: mmap.mmap
    layout: Layout
    rank: int
    names: Sequence[str]


def share(
    rank: int, layout: Layout, all_gather: AllGather, what: str
) -> tuple[mmap.mmap | None, str]:
    """Makes the memory of `layout`; every rank calls it at the same point.

    Args:
        rank: This rank.
        layout: The layout.
        all_gather: Gathers a value from every rank.
        what: What the memory is for, in messages.

    Returns:
        The memory and "", or None and why it cannot be shared. All ranks get the same answer.

    Raises:
        DisagreementError: The ranks came with different layouts.
    """
    fact: dict[str, Any] = {"layout": layout.digest, "problem": _problem()}
    with contextlib.ExitStack() as stack:
        memory: mmap.mmap | None = None
        if not fact["problem"]:
            fact["host"] = _host(rank)
            if rank == 0:
                try:
                    fd = os.memfd_create("tfdist", os.MFD_CLOEXEC)
                    stack.callback(os.close, fd)
                    os.ftruncate(fd, layout.nbytes)
                    memory = _map(fd, rank, layout)
                    nonce = os.urandom(_NONCE_BYTES)
                    memory[:_NONCE_BYTES] = nonce
                    fact |= {"pid": os.getpid(), "fd": fd, "nonce": nonce.hex()}
                except OSError as error:
                    fact["problem"] = f"cannot make {layout.nbytes >> 20} MB: {error}"
        facts = all_gather(fact)
        if len({each["layout"] for each in facts}) > 1:
            raise DisagreementError(
                f"the same shapes and types in {what} on every worker",
                f"layouts {[each['layout'] for each in facts]}",
                "build the same model and run the same script on every worker",
            )
        reason = _first([each["problem"] for each in facts])
        if not reason and len({each["host"] for each in facts}) > 1:
            reason = "the workers are on different hosts, or in different containers"
        if reason:
            return None, reason
        problem = ""
        if rank != 0:
            try:
                memory = _attach(facts[0], rank, layout)
            except OSError as error:
                problem = f"cannot attach: {error}"
        reason = _first(all_gather(problem))
    return (None, reason) if reason else (memory, "")


def _attach(fact: dict[str, Any], rank: int, layout: Layout) -> mmap.mmap:
    fd = os.open(f"/proc/{fact['pid']}/fd/{fact['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, _NONCE_BYTES, 0).hex() != fact["nonce"]:
            raise OSError(f"process {fact['pid']} is not rank 0")
        return _map(fd, rank, layout)
    finally:
        os.close(fd)


def _map(fd: int, rank: int, layout: Layout) -> mmap.mmap:
    # Without this, a host that is out of memory would end the process (SIGBUS) at a later write.
    for offset, size in layout.ranges(rank):
        os.posix_fallocate(fd, offset, size)
    return mmap.mmap(fd, layout.nbytes)


def _problem() -> str:
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"needs Linux with memfd_create, not {sys.platform}"
    if platform.machine() != "x86_64":
        # Counters are plain stores: other processors may show them before the data.
        return f"needs x86_64, not {platform.machine()}"
    return futex.problem()


def _host(rank: int) -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        return f"unknown to rank {rank}: {error}"  # Equal to nobody's.


def _first(problems: list[str]) -> str:
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
