"""How gradients travel between replicas."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of the all-reduce.

    Attributes:
        timeout_seconds: A collective that takes longer fails instead of waiting for ever for a
            replica that is stuck. None waits.
    """

    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ConfigError("timeout_seconds above 0", repr(self.timeout_seconds))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> CommunicationOptions:
        """Reads `TFDIST_TIMEOUT_SECONDS`."""
        text = (os.environ if environ is None else environ).get("TFDIST_TIMEOUT_SECONDS", "")
        if not text.strip():
            return cls()
        try:
            return cls(timeout_seconds=float(text))
        except ValueError as error:
            raise ConfigError(
                "TFDIST_TIMEOUT_SECONDS to be a positive number of seconds", repr(text)
            ) from error

    def to_tensorflow(self) -> Any:
        """Returns the `tf.distribute.experimental.CommunicationOptions` that says the same."""
        import tensorflow as tf

        return tf.distribute.experimental.CommunicationOptions(timeout_seconds=self.timeout_seconds)
