"""Rules of how machines are got: flex-start, Spot, reservations, persistent resources, times."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfdist.errors import ConfigError
from tfdist.vertex.checks import tpus
from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.duration import seconds
from tfdist.vertex.duration import shown
from tfdist.vertex.spec import REDUCTION_SERVER
from tfdist.vertex.spec import Reservation

_RESERVATION = re.compile(r"projects/[^/]+/zones/([a-z]+(?:-[a-z]+)+[0-9]+)-[a-z]/reservations/.+")
_PERSISTENT = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")


@rule("timeout")
def timeout(job: Job) -> Findings:
    """The timeout is a length of time above zero."""
    given = job.spec.scheduling.timeout
    if given is None:
        return
    try:
        length = seconds(given)
    except ConfigError as error:
        yield problem(error.expected, f"scheduling.timeout={given!r}", error.fix or "")
        return
    if length < 1:
        yield problem(
            "a timeout above zero",
            f"scheduling.timeout={given!r}",
            "leave it out for the service's 7 days, or write for example 36h",
        )


@rule("max-wait")
def max_wait(job: Job) -> Findings:
    """The longest wait is a length of time, and for flex-start."""
    scheduling = job.spec.scheduling
    if scheduling.max_wait is None:
        return
    try:
        length = seconds(scheduling.max_wait)
    except ConfigError as error:
        yield problem(
            error.expected, f"scheduling.max_wait={scheduling.max_wait!r}", error.fix or ""
        )
        return
    if length < 0:
        yield problem(
            "a wait of zero (for ever) or more",
            f"scheduling.max_wait={scheduling.max_wait!r}",
            "write for example 2h",
        )
    if scheduling.strategy != "flex_start":
        yield doubt(
            "max_wait with the strategy flex_start; nothing else waits",
            f"max_wait with {scheduling.strategy}",
            "leave it out, or set vertex.scheduling.strategy to flex_start",
        )


@rule("flex-start-accelerator")
def flex_start_accelerator(job: Job) -> Findings:
    """Flex-start has certain GPUs only."""
    if job.spec.scheduling.strategy != "flex_start":
        return
    known = job.facts.accelerators
    able = ", ".join(each.name for each in known.values() if each.flex_start)
    for role, pool in job.spec.pools:
        given = pool.accelerator.type if pool.accelerator else None
        if role == REDUCTION_SERVER:
            continue  # Has no place in such a job at all.
        if given is None or (given in known and not known[given].flex_start):
            yield problem(
                f"one of {able} in every pool, for flex_start",
                f"{given or 'no accelerator'} in {role}",
                "choose such a machine, or another vertex.scheduling.strategy",
            )


@rule("flex-start-one-machine")
def flex_start_one_machine(job: Job) -> Findings:
    """Flex-start wants the same machine in all pools."""
    if job.spec.scheduling.strategy != "flex_start":
        return
    kinds: dict[str, list[str]] = {}
    for role, pool in job.spec.pools:
        if role == REDUCTION_SERVER:
            continue
        given = pool.accelerator
        kind = f"{pool.machine_type} with {given.count} x {given.type}" if given else ""
        kinds.setdefault(kind or pool.machine_type, []).append(role)
    if len(kinds) > 1:
        yield problem(
            "the same machine type and accelerator in all pools, for flex_start",
            "; ".join(f"{kind} in {', '.join(names)}" for kind, names in kinds.items()),
            "give all pools the same machine, or choose another vertex.scheduling.strategy",
        )


@rule("flex-start-days")
def flex_start_days(job: Job) -> Findings:
    """A flex-start job runs for 7 days at most."""
    scheduling = job.spec.scheduling
    longest = job.facts.raw["flex_start"]["longest"]
    if scheduling.strategy != "flex_start" or scheduling.timeout is None:
        return
    try:
        length = seconds(scheduling.timeout)
    except ConfigError:
        return
    if length > longest:
        yield problem(
            f"a timeout of at most {shown(longest)} for flex_start",
            f"scheduling.timeout={scheduling.timeout!r}",
            "shorten it; a job that is started again goes on from its last backup",
        )


@rule("spot-tpu-slice")
def spot_tpu_slice(job: Job) -> Findings:
    """Spot has no TPU slices over several machines."""
    if job.spec.scheduling.strategy != "spot":
        return
    for role, pool in job.spec.pools:
        if tpus.is_tpu(job, pool) and tpus.machines(job, pool) > 1:
            yield problem(
                "a TPU on one machine with the strategy spot",
                f"{pool.tpu_topology or pool.machine_type} in {role}",
                "choose a smaller topology, or vertex.scheduling.strategy standard",
            )


@rule("spot-progress")
def spot_progress(job: Job) -> Findings:
    """A Spot job keeps its progress where it survives."""
    if job.spec.scheduling.strategy == "spot" and not job.spec.base_output_directory:
        yield doubt(
            "base_output_directory with spot: machines are taken back at any time, and the job "
            f"is started again up to {job.facts.raw['restarts']['spot']} times",
            "none",
            "set vertex.base_output_directory to gs://BUCKET/PATH",
        )


def _reservations(job: Job) -> Iterator[tuple[str, Reservation]]:
    """Yields where a reservation is written, and the reservation."""
    if job.spec.reservation:
        yield "vertex.reservation", job.spec.reservation
    for role, pool in job.spec.pools:
        if pool.reservation:
            yield f"vertex.pools.{role}.reservation", pool.reservation


@rule("reservation-name")
def reservation_name(job: Job) -> Findings:
    """A specific reservation is named, in a zone of the region."""
    for where, reservation in _reservations(job):
        if reservation.affinity != "specific":
            if reservation.name is not None:
                yield problem(
                    "a name for affinity: specific only",
                    f"{where}: affinity {reservation.affinity!r} with a name",
                    f"set {where}.affinity to specific, or leave the name out",
                )
            continue
        match = _RESERVATION.fullmatch(reservation.name or "")
        if match is None:
            yield problem(
                "the resource name of a reservation",
                f"{where}.name={reservation.name!r}",
                "write projects/PROJECT/zones/ZONE/reservations/NAME",
            )
        elif match[1] != job.spec.region:
            yield problem(
                f"a reservation in a zone of {job.spec.region}, the region of the job",
                f"one in {match[1]}",
                "name one of that region, or move the job",
            )


@rule("reservation-strategy")
def reservation_strategy(job: Job) -> Findings:
    """Machines of a reservation are not got in another way."""
    strategy = job.spec.scheduling.strategy
    for where, reservation in _reservations(job):
        if reservation.affinity == "none":
            continue
        shown_affinity = f"{where}.affinity: {reservation.affinity}"
        if strategy == "flex_start":
            yield problem(
                "no reservation with flex_start, which gets machines of its own",
                shown_affinity,
                f"leave {where} out, or set vertex.scheduling.strategy to standard",
            )
        elif strategy == "spot":
            yield (problem if reservation.affinity == "specific" else doubt)(
                "no reservation with spot: Spot machines never come from one",
                shown_affinity,
                f"leave {where} out, or set vertex.scheduling.strategy to standard",
            )
        if job.spec.persistent_resource:
            yield problem(
                "no reservation on a persistent resource, which has its machines",
                shown_affinity,
                f"leave {where} or vertex.persistent_resource out",
            )


@rule("persistent-resource")
def persistent_resource(job: Job) -> Findings:
    """The persistent resource is its id."""
    given = job.spec.persistent_resource
    if given is None or _PERSISTENT.fullmatch(given):
        return
    fix = "write the id that it was created with"
    if _PERSISTENT.fullmatch(given.rpartition("/")[2]):
        fix = f"write {given.rpartition('/')[2]}"
    yield problem("the id of a persistent resource", f"persistent_resource={given!r}", fix)


@rule("persistent-resource-strategy")
def persistent_resource_strategy(job: Job) -> Findings:
    """A persistent resource has its machines already."""
    spec = job.spec
    if spec.persistent_resource is None:
        return
    if spec.scheduling.strategy != "standard":
        yield doubt(
            "the strategy standard on a persistent resource, whose machines are there already",
            f"scheduling.strategy: {spec.scheduling.strategy}",
            "leave vertex.scheduling.strategy out",
        )
    if any(tpus.is_tpu(job, pool) for _, pool in spec.pools):
        yield doubt(
            "machines with processors or GPUs on a persistent resource",
            "TPUs",
            "check that the resource has them",
        )
