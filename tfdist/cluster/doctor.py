"""Preflight of the task it runs in: every check has its own deadline, and none imports TensorFlow.

TensorFlow waits without a word for a name that does not resolve, a port behind a firewall or a
proxy in between. Each check here looks at one such thing and says what it saw and what to do:

    >>> for check in examine(detect(), os.environ, timeout=5.0):
    ...     print(check.status, check.name, check.detail, check.fix)

Where every task runs it with `meet=True`, the tasks meet at the start barrier and then try the
port of each other while all of them listen: what the job will need, before there is a job.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdist.cluster import rendezvous
from tfdist.cluster.checks import Check
from tfdist.cluster.checks import Job
from tfdist.cluster.checks import collect
from tfdist.cluster.checks import in_thread
from tfdist.cluster.checks import some
from tfdist.cluster.checks import start
from tfdist.cluster.group import Group
from tfdist.cluster.machine_checks import OUTPUT_VARIABLES
from tfdist.cluster.machine_checks import check_keras
from tfdist.cluster.machine_checks import check_output
from tfdist.cluster.machine_checks import check_shm
from tfdist.cluster.machine_checks import check_space
from tfdist.cluster.machine_checks import check_versions
from tfdist.cluster.machine_checks import is_remote
from tfdist.cluster.machine_checks import outputs_from
from tfdist.cluster.machine_checks import versions_text
from tfdist.cluster.network_checks import REACH_FIX
from tfdist.cluster.network_checks import Resolved
from tfdist.cluster.network_checks import check_names
from tfdist.cluster.network_checks import check_peers
from tfdist.cluster.network_checks import check_port
from tfdist.cluster.network_checks import check_proxies
from tfdist.cluster.network_checks import hosts_of
from tfdist.cluster.network_checks import peers_of
from tfdist.cluster.network_checks import probe
from tfdist.cluster.network_checks import resolve
from tfdist.cluster.network_checks import targets_of
from tfdist.cluster.topology import Cluster
from tfdist.cluster.topology import Task
from tfdist.errors import TfdistError

DEFAULT_TIMEOUT = 10.0

#: What the barrier may need beyond its own deadline: its last attempt to connect takes 5 s.
_BARRIER_SLACK = 8.0


def examine(
    cluster: Cluster,
    environ: Mapping[str, str],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    output_dirs: Sequence[str] = (),
    meet: bool = False,
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
) -> list[Check]:
    """Runs every check and returns them in the order in which they are shown.

    Args:
        cluster: The cluster, as this task sees it.
        environ: Environment variables.
        timeout: Seconds that each check may take. All of it takes a few times as long at most.
        output_dirs: Directories that the job will write to; those of Vertex AI are added.
        meet: Meet the other tasks, which must all do the same at the same time.
        statvfs: Tells about a file system, as `os.statvfs` does.
    """
    began = time.monotonic()
    folders = list(dict.fromkeys([*output_dirs, *outputs_from(environ)]))
    local = start(_local_jobs(cluster, environ, folders, statvfs))
    port = check_port(cluster)
    joining = None
    everybody = bool(peers_of(cluster)) and all(map(cluster.address, cluster.tasks))
    if meet and everybody and port.status == "ok":
        job = f"doctor {rendezvous.job_name(environ)}"  # never to be taken for the real job
        joining = _join(cluster, timeout, job)
    names = resolve(hosts_of(cluster), timeout)
    checks = [check_cluster(cluster), check_names(cluster, names), port]
    if joining is not None:
        checks += _meet(cluster, names, joining, timeout)
    else:
        checks.append(check_peers(cluster, probe(targets_of(cluster, names), timeout), timeout))
        if meet:
            why = "its own port is not free" if port.status == "failed" else "it meets no other"
            checks.append(Check("rendezvous", "skipped", f"this task was not there: {why}"))
    return checks + collect(local, timeout, began)


def _local_jobs(
    cluster: Cluster,
    environ: Mapping[str, str],
    folders: Sequence[str],
    statvfs: Callable[[str], os.statvfs_result],
) -> Iterator[Job]:
    yield Job("versions", "packages", lambda: check_versions(rendezvous.versions()))
    stuck = "look whether its file system answers (`df`); a network file system may be down"
    for folder in folders:
        yield Job("output", folder, functools.partial(check_output, folder), stuck)
        if not is_remote(folder):
            yield Job("space", folder, functools.partial(check_space, folder, statvfs), stuck)
    if not folders:
        why = f"no --output-dir, and none of {', '.join(OUTPUT_VARIABLES)} is set"
        yield Job("output", "", lambda: Check("output", "skipped", why))
    yield Job("shm", "/dev/shm", lambda: check_shm(statvfs))
    yield Job("proxy", "proxies", lambda: check_proxies(hosts_of(cluster), environ))
    yield Job("keras", "TF_USE_LEGACY_KERAS", lambda: check_keras(environ))


def check_cluster(cluster: Cluster) -> Check:
    """Says which environment won, and what was tolerated in it.

    Args:
        cluster: The cluster.
    """
    detail = " ".join([f"{cluster.task} ({cluster.environment}).", cluster.source]).strip()
    if cluster.warnings:
        return Check("cluster", "warning", " ".join([detail, *cluster.warnings]))
    return Check("cluster", "ok", detail)


def _join(cluster: Cluster, timeout: float, job: str) -> concurrent.futures.Future[Group]:
    return in_thread(
        lambda: rendezvous.join(cluster, timeout, job),
        too_late=lambda group: group.leave("tfdist doctor did not wait longer"),
    )


def _meet(
    cluster: Cluster,
    names: Mapping[str, Resolved],
    joining: concurrent.futures.Future[Group],
    timeout: float,
) -> list[Check]:
    """Meets the others, then lets every task try the port of every other while all listen."""
    concurrent.futures.wait([joining], timeout + _BARRIER_SLACK)
    problem = None
    if joining.cancel():
        problem = Check("rendezvous", "failed", f"no end within {timeout:g} s", "try again")
    elif error := joining.exception():
        if not isinstance(error, (TfdistError, UnicodeError)):  # a name that cannot be encoded
            raise error
        fix = getattr(error, "fix", "")
        if isinstance(error, TimeoutError):
            fix = "run `tfdist doctor --rendezvous` in every task at once, or raise --timeout"
        problem = Check("rendezvous", "failed", getattr(error, "received", str(error)), fix)
    if problem:
        seen = probe(targets_of(cluster, names), timeout)
        return [check_peers(cluster, seen, timeout), problem]
    group = joining.result()
    try:
        peers = _try_each_other(cluster, names, group, timeout)
    except BaseException as error:
        group.leave(type(error).__name__)  # With a reason, it does not wait for the others.
        raise
    leaving = in_thread(group.leave)
    concurrent.futures.wait([leaving], timeout)
    if not leaving.done():
        group.leave("tfdist doctor did not wait longer")
    return [peers, check_group(group.tasks, group.facts)]


def check_group(tasks: Sequence[Task], facts: Sequence[Mapping[str, Any]]) -> Check:
    """Says who came to the barrier; it lets nobody through whose versions differ.

    Args:
        tasks: The tasks.
        facts: What each of them said of itself: "host" and "versions".
    """
    came = [f"{task} on {fact.get('host')}" for task, fact in zip(tasks, facts, strict=True)]
    versions = facts[0].get("versions") or {}
    return Check("rendezvous", "ok", f"{some(came)}, all with {versions_text(versions)}")


def _try_each_other(
    cluster: Cluster, names: Mapping[str, Resolved], group: Group, timeout: float
) -> Check:
    with contextlib.ExitStack() as stack:
        own = ""
        try:
            try:
                stack.enter_context(rendezvous.listen(cluster))
            except TfdistError as error:
                own = str(error.received)
            group.all_gather("listening", None, timeout + _BARRIER_SLACK)
            seen = probe(targets_of(cluster, names), timeout)
            mine = {
                "own": own,
                "seen": [[t.type, t.index, *outcome] for t, outcome in seen.items()],
            }
            reports = group.all_gather("tried every port", mine, 2 * timeout + _BARRIER_SLACK)
        except TfdistError as error:  # A task was lost, or is somewhere else.
            return Check("peers", "failed", error.received or str(error), error.fix or "")
    return check_reports(cluster, dict(zip(group.tasks, reports, strict=True)))


def check_reports(cluster: Cluster, reports: Mapping[Task, Mapping[str, Any]]) -> Check:
    """Checks that every task reached every other while all of them listened.

    Args:
        cluster: The cluster.
        reports: Task to "own" (why it could not listen, or "") and "seen" (lists of type, index,
            reach and the system's words).
    """
    bad: list[str] = []
    fixes: list[str] = []
    for task, report in reports.items():
        if report["own"]:
            bad.append(f"{task} cannot listen on {cluster.address(task)} ({report['own']})")
        for kind, index, reach, why in report["seen"]:
            if reach == "connected":
                continue
            other = Task(kind, index)
            why = f"{reach}: {why}" if why else "its name does not resolve"
            bad.append(f"{task} cannot reach {other} at {cluster.address(other)} ({why})")
            fixes.append(
                "that task listens, so look whether its address leads to another machine here, or "
                "a firewall rejects the connection"
                if reach == "refused"
                else REACH_FIX[reach]
            )
    if bad:
        return Check("peers", "failed", "; ".join(bad), "; ".join(dict.fromkeys(fixes)))
    return Check("peers", "ok", f"all {len(reports)} tasks reach each other")
