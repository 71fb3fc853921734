"""What a rule says about a job, and the error that lists it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that a job breaks, or a doubt about it.

    Attributes:
        rule: Name of the rule, as in docs/vertex.md.
        expected: What was expected, a phrase that follows "Expected".
        received: What the job says.
        fix: What to do, an imperative sentence without its full stop.
        is_error: Whether the job is refused; a doubt is shown only.
    """

    rule: str
    expected: str
    received: str
    fix: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.rule}: Expected {self.expected}. Received: {self.received}. Fix: {self.fix}."


class JobError(ConfigError):
    """A custom job breaks rules of the service.

    Args:
        findings: Every rule that is broken.

    Attributes:
        findings: The same.
    """

    def __init__(self, findings: Sequence[Finding]):
        self.findings = tuple(findings)
        if len(self.findings) == 1:
            (only,) = self.findings
            super().__init__(only.expected, only.received, only.fix)
        else:
            super().__init__(
                "a custom job that breaks no rule",
                f"{len(self.findings)} broken rules",
                "correct each as it says",
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that are broken, each once."""
        return tuple(dict.fromkeys(finding.rule for finding in self.findings))

    def __str__(self) -> str:
        if len(self.findings) == 1:
            return str(self.findings[0])
        return "\n".join([super().__str__(), *(f"  {finding}" for finding in self.findings)])
