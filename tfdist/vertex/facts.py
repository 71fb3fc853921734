"""What is known about the service, from `facts.yaml`: dated, with sources, not in code."""

from __future__ import annotations

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class ReductionServer:
    """The vendor's Reduction Server.

    Attributes:
        image: Its container image.
    """

    image: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything in `facts.yaml`."""

    reduction_server: ReductionServer


@functools.cache
def facts() -> Facts:
    """Returns the facts, read once."""
    return Facts(
        ReductionServer("us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest")
    )
