"""The rules: small pure functions, each with a name, registered by a decorator.

The docstring of a rule is what it demands. It yields problems and doubts:

    @rule("one-primary")
    def one_primary(job: Job) -> Findings:
        if job.spec.pools.chief.replicas != 1:
            yield problem("one chief", "3", "set replicas to 1")

To add one, write it in the module of its subject; nothing else changes but docs/vertex.md.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from collections.abc import Iterator

from tfdist.vertex.checks.finding import Finding
from tfdist.vertex.facts import Facts
from tfdist.vertex.spec import JobSpec


@dataclasses.dataclass(frozen=True)
class Job:
    """What a rule looks at.

    Attributes:
        spec: The job.
        facts: What is known about the service.
        today: The day on which the job would start.
    """

    spec: JobSpec
    facts: Facts
    today: datetime.date


Findings = Iterator[Finding]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule by its name.

    Attributes:
        name: Words joined by dashes.
        summary: What it demands, one sentence.
        function: Yields what is wrong with a job.
    """

    name: str
    summary: str
    function: Callable[[Job], Findings]

    def findings(self, job: Job) -> Findings:
        """Yields what is wrong with a job, under the name of the rule."""
        for finding in self.function(job):
            yield dataclasses.replace(finding, rule=self.name)


#: Every rule, in the order in which they were defined.
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Callable[[Job], Findings]], Rule]:
    """Registers the decorated function as a rule."""

    def register(function: Callable[[Job], Findings]) -> Rule:
        made = Rule(name, (function.__doc__ or "").strip(), function)
        RULES[name] = made
        return made

    return register


def problem(expected: str, received: str, fix: str) -> Finding:
    """Returns a finding that refuses the job."""
    return Finding("", expected, received, fix)


def doubt(expected: str, received: str, fix: str) -> Finding:
    """Returns a finding that lets the job pass."""
    return Finding("", expected, received, fix, is_error=False)


def plural(count: int, word: str) -> str:
    """Returns a count with its noun."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
