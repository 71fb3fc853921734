"""Rules of the service and its machines, checked before anything is billed.

    for warning in check(spec):
        print(warning)

The client library checks almost nothing, and the service finds out when machines are up. What the
rules know about the service is in `tfdist/vertex/facts.yaml`.
"""

from __future__ import annotations

import datetime
import functools

from tfdist.vertex.checks import accelerators
from tfdist.vertex.checks import images
from tfdist.vertex.checks import machines
from tfdist.vertex.checks import names
from tfdist.vertex.checks import pools
from tfdist.vertex.checks import program
from tfdist.vertex.checks import reduction
from tfdist.vertex.checks import resources
from tfdist.vertex.checks import scheduling
from tfdist.vertex.checks import surroundings
from tfdist.vertex.checks import tpus
from tfdist.vertex.checks.finding import Finding as Finding
from tfdist.vertex.checks.finding import JobError as JobError
from tfdist.vertex.checks.rules import RULES as RULES
from tfdist.vertex.checks.rules import Job
from tfdist.vertex.checks.rules import Rule
from tfdist.vertex.facts import facts
from tfdist.vertex.spec import JobSpec

#: Imported for their rules, in the order in which findings are shown.
MODULES = (
    pools,
    names,
    resources,
    surroundings,
    images,
    program,
    machines,
    accelerators,
    tpus,
    reduction,
    scheduling,
)


def check(spec: JobSpec, *, today: datetime.date | None = None) -> tuple[Finding, ...]:
    """Checks a job against every rule. Nothing is sent anywhere.

    Args:
        spec: The job.
        today: The day on which it would start; prebuilt images and accelerators have an end.

    Returns:
        Doubts, which are no reason to refuse it.

    Raises:
        JobError: The job breaks rules. All of them are listed, each with its name and what to do.
    """
    job = Job(spec, facts(), today or datetime.date.today())
    found = [finding for each in _in_order() for finding in each.findings(job)]
    problems = [finding for finding in found if finding.is_error]
    if problems:
        raise JobError(problems)
    return tuple(found)


@functools.cache
def _in_order() -> tuple[Rule, ...]:
    places = {module.__name__: place for place, module in enumerate(MODULES)}
    return tuple(sorted(RULES.values(), key=lambda each: places[each.function.__module__]))
