"""Rules of machine types and their disks."""

from __future__ import annotations

import difflib
import re

from tfdist.vertex.checks.rules import Findings
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import doubt
from tfdist.vertex.checks.rules import problem
from tfdist.vertex.checks.rules import rule
from tfdist.vertex.facts import Facts

_TYPE = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
#: How alike two words are where one of them is the other with a slip.
_SLIP = 0.75


@rule("machine-type")
def machine_type(job: Job) -> Findings:
    """The machine type is one that training has."""
    known = _types(job.facts)
    for role, pool in job.spec.pools:
        given = pool.machine_type
        if given in known:
            continue
        where = f"{role}.machine_type={given!r}"
        close = difflib.get_close_matches(given.strip().lower(), known, n=1, cutoff=0.6)
        nearest = f"did you mean {close[0]}" if close else "for example n1-standard-8"
        if not _TYPE.fullmatch(given) or _is_slip(given, known):
            yield problem("a machine type", where, nearest)
        else:
            yield doubt(
                f"a machine type that training had on {job.facts.as_of}",
                where,
                f"check that the service has it ({nearest}?)" if close else "check that it exists",
            )


def _types(facts: Facts) -> set[str]:
    tpus = facts.tpus.values()
    return {
        *facts.machines,
        *(kind for generation in tpus for kind in generation.types),
        *(kind for generation in tpus for kind in generation.topologies),
    }


def _is_slip(given: str, known: set[str]) -> bool:
    """Whether a word of a machine type is a misspelt one, and not that of a new machine."""
    words = {word for kind in known for word in kind.split("-") if word.isalpha()}
    return any(
        word.isalpha() and word not in words and difflib.get_close_matches(word, words, 1, _SLIP)
        for word in given.split("-")
    )


@rule("disk")
def disk(job: Job) -> Findings:
    """The boot disk has a type and a size that the service has."""
    types, (smallest, largest) = job.facts.limits["disk_types"], job.facts.limits["disk_gb"]
    for role, pool in job.spec.pools:
        given = pool.disk
        if given.type is not None and given.type not in types:
            close = difflib.get_close_matches(given.type, types, n=1)
            yield problem(
                f"a boot disk of type {', '.join(types)}",
                f"{role}.disk.type={given.type!r}",
                f"did you mean {close[0]}" if close else "leave it out",
            )
        if not smallest <= given.size_gb <= largest:
            yield problem(
                f"a boot disk of {smallest} to {largest} GB",
                f"{role}.disk.size_gb={given.size_gb}",
                f"set vertex.pools.{role}.disk.size_gb to {smallest} or more",
            )
        machine = job.facts.machine(pool.machine_type)
        hyperdisk = machine is not None and machine.default_disk.startswith("hyperdisk")
        if machine and hyperdisk and given.type in types and given.type != machine.default_disk:
            yield doubt(
                f"{machine.default_disk} on {machine.type}",
                f"{role}.disk.type={given.type!r}",
                f"leave vertex.pools.{role}.disk.type out",
            )
