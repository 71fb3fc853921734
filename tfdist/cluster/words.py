"""What a task says to its user about the others, and to the others about itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import DisagreementError
from tfdist.errors import PeerLostError


def name_of(cluster: Cluster, task: Task) -> str:
    """Returns how to call `task`: with its address, where that is known."""
    address = cluster.address(task)
    return f"{task} ({address})" if address else str(task)


def disagreement(places: list[list[Any]]) -> DisagreementError:
    """Returns the error for tasks that are not at the same point of the program.

    Args:
        places: Type, index and point of each task that waits or has ended, as the hub tells it.
    """
    seen = ", ".join(
        f"{Task(kind, index)} " + (f"at {place!r}" if place else "has ended")
        for kind, index, place in places
    )
    return DisagreementError(
        "every worker to be at the same point of the program",
        seen,
        "call fit, evaluate, predict and the like on every worker, in the same order and the "
        "same number of times",
    )


def lost_peer(
    cluster: Cluster, work: str, lost: Mapping[Task, str], left: Mapping[Task, str | None]
) -> PeerLostError:
    """Returns the error for work that needed a task which is not there any more.

    Args:
        cluster: The cluster.
        work: The work.
        lost: Tasks that died or stopped answering, with what was seen.
        left: Tasks that have ended, with what went wrong there or None.
    """
    if lost:
        what = "; ".join(f"{name_of(cluster, task)} is gone: {why}" for task, why in lost.items())
    else:
        what = "; ".join(
            f"{name_of(cluster, task)} " + (f"failed: {why}" if why else "has ended")
            for task, why in left.items()
        )
    return PeerLostError(
        f"every task of the cluster to stay until the end of {work}",
        what,
        "look at the end of that task's log, then start the job again "
        "(`tfdist run --max-restarts` does it for you)",
    )


def uncaught() -> str | None:
    """Returns the error that is ending this process, in one line, or None."""
    error = getattr(sys, "last_value", None)
    return None if error is None or hasattr(sys, "ps1") else in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """Returns the kind of an error and the beginning of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"
