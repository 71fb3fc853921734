"""Rules of accelerators and the machines that they go with."""

from __future__ import annotations

import datetime
import difflib

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.facts import GPU
from tfdist.vertex.facts import Machine
from tfdist.vertex.spec import Accelerator

#: More than any machine or slice has.
_MOST = 100_000
#: How long before its end an accelerator is worth a word.
_NOTICE = datetime.timedelta(days=365)


@rule("accelerator")
def accelerator(job: Job) -> Findings:
    """The accelerator is one of the service's, at least one in each machine."""
    known = job.facts.accelerators
    for role, pool in job.spec.pools:
        given = pool.accelerator
        if given is None:
            continue
        if given.type not in known:
            name = given.type.strip().upper().replace("-", "_")
            close = [name] if name in known else difflib.get_close_matches(name, known, 1, 0.4)
            close += [each for each in known if each.endswith(f"_{name}")]
            yield problem(
                "the service's name of an accelerator",
                f"{role}.accelerator.type={given.type!r}",
                f"did you mean {close[0]}" if close else f"one of {', '.join(known)}",
            )
        if not 1 <= given.count <= _MOST:
            yield problem(
                f"at least one accelerator in each machine, and at most {_MOST}",
                f"{role}.accelerator.count={given.count}",
                f"leave vertex.pools.{role}.accelerator out, or set its count",
            )


@rule("machine-accelerator")
def machine_accelerator(job: Job) -> Findings:
    """Accelerator, its number and the machine type go together."""
    for role, pool in job.spec.pools:
        machine = job.facts.machine(pool.machine_type)
        given = pool.accelerator
        known = job.facts.accelerators.get(given.type) if given else None
        if machine is None or (given is not None and (known is None or given.count < 1)):
            continue  # Other rules have said it, or nothing is known.
        if machine.brings is not None:
            yield from _brought(role, machine, given)
        elif given is not None and known is not None and known.kind == GPU:
            yield from _attached(job, role, machine, given)
        elif given is not None:
            yield problem(
                f"a TPU machine for {given.type}",
                f"{machine.type} in {role}",
                "name a machine such as ct5lp-hightpu-4t with its tpu_topology, or cloud-tpu",
            )


def _brought(role: str, machine: Machine, given: Accelerator | None) -> Findings:
    assert machine.brings is not None
    name, count = machine.brings
    if given is None or (given.type, given.count) != (name, count):
        received = f"{given.count} x {given.type}" if given else "no accelerator"
        yield problem(
            f"{count} x {name} on {machine.type}, which brings them",
            f"{received} in {role}",
            f"set vertex.pools.{role}.accelerator to {{type: {name}, count: {count}}}",
        )


def _attached(job: Job, role: str, machine: Machine, given: Accelerator) -> Findings:
    counts = machine.attach.get(given.type)
    if counts and given.count in counts:
        return
    received = f"{given.count} x {given.type} on {machine.type} in {role}"
    if counts:
        numbers = " or ".join(map(str, counts))
        yield problem(
            f"{numbers} of {given.type} on {machine.type}",
            received,
            f"set vertex.pools.{role}.accelerator.count to {numbers}",
        )
        return
    fits = [
        each.type
        for each in job.facts.machines.values()
        if given.count in each.attach.get(given.type, ())
        or each.brings == (given.type, given.count)
    ]
    if machine.attach:
        expected = f"an accelerator that goes with {machine.type}: {', '.join(machine.attach)}"
    else:
        expected = f"no accelerator on {machine.type}, to which none can be attached"
    yield problem(
        expected,
        received,
        f"set vertex.pools.{role}.machine_type to {', '.join(fits[:3])}"
        if fits
        else "choose another accelerator or number",
    )


@rule("accelerator-ended")
def accelerator_ended(job: Job) -> Findings:
    """The accelerator is still supported."""
    for role, pool in job.spec.pools:
        known = job.facts.accelerators.get(pool.accelerator.type) if pool.accelerator else None
        if known is None or known.ends is None:
            continue
        where = f"{known.name} in {role}"
        if job.today > known.ends:
            yield problem(
                "an accelerator that can still be had",
                f"{where}, which ended on {known.ends}",
                "use a newer one, for example NVIDIA_L4 on g2-standard-8",
            )
        elif job.today >= known.ends - _NOTICE:
            yield doubt(
                "an accelerator that stays",
                f"{where}, which ends on {known.ends}",
                "plan for a newer one, for example NVIDIA_L4 on g2-standard-8",
            )


@rule("accelerator-reservation")
def accelerator_reservation(job: Job) -> Findings:
    """What only reservations hold comes from one."""
    for role, pool in job.spec.pools:
        known = job.facts.accelerators.get(pool.accelerator.type) if pool.accelerator else None
        reservation = pool.reservation or job.spec.reservation
        taken = reservation is not None and reservation.affinity != "none"
        if known and known.reservation_only and not taken and not job.spec.persistent_resource:
            yield problem(
                f"a reservation for {known.name}, which is had from shared reservations only",
                f"none in {role}",
                "set vertex.reservation",
            )
