"""How gradients travel between replicas."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError

COMPRESSIONS = (None, "bfloat16", "float16")
TRANSPORTS = ("auto", "shared_memory", "tensorflow")


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of the all-reduce of gradients.

    Attributes:
        compression: "bfloat16" or "float16": float32 gradients travel between CPU workers in this
            type. None sends them as they are, and the sum is exact.
        bucket_bytes: Gradients travel in pieces of about so many bytes. None: what is fastest for
            the transport.
        timeout_seconds: A sum that takes longer fails instead of waiting for a replica that is
            stuck. None: in shared memory as long as for any agreement
            (`TFDIST_AGREEMENT_TIMEOUT`, half an hour); TensorFlow's collectives wait on.
        transport: How CPU workers meet. "auto" takes shared memory where all of them can, which
            is on one host, and TensorFlow's ring elsewhere. "shared_memory" insists on it,
            "tensorflow" never uses it.
    """

    compression: str | None = None
    bucket_bytes: int | None = None
    timeout_seconds: float | None = None
    transport: str = "auto"

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            raise ConfigError(f"compression to be one of {COMPRESSIONS}", repr(self.compression))
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport to be one of {TRANSPORTS}", repr(self.transport))
        if self.bucket_bytes is not None and not self.bucket_bytes > 0:
            raise ConfigError("bucket_bytes above 0", repr(self.bucket_bytes))
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ConfigError("timeout_seconds above 0", repr(self.timeout_seconds))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> CommunicationOptions:
        """Reads the options from variables such as `TFDIST_COMPRESSION`.

        Raises:
            ConfigError: One of them is not what its field can be.
        """
        environ = os.environ if environ is None else environ
        compression = environ.get("TFDIST_COMPRESSION", "").strip().lower()
        return cls(
            compression=None if compression in ("", "none") else compression,
            bucket_bytes=_number(environ, "TFDIST_BUCKET_BYTES", int, "whole number of bytes"),
            timeout_seconds=_number(environ, "TFDIST_TIMEOUT_SECONDS", float, "number of seconds"),
            transport=environ.get("TFDIST_TRANSPORT", "").strip().lower() or "auto",
        )

    def to_tensorflow(self) -> Any:
        """Returns the `tf.distribute.experimental.CommunicationOptions` that says the same."""
        import tensorflow as tf

        return tf.distribute.experimental.CommunicationOptions(timeout_seconds=self.timeout_seconds)


_options: weakref.WeakKeyDictionary[Any, CommunicationOptions] = weakref.WeakKeyDictionary()


def remember(strategy: Any, options: CommunicationOptions) -> None:
    """Keeps `options` for the gradients of models under `strategy`."""
    _options[strategy] = options


def options_of(strategy: Any) -> CommunicationOptions:
    """Returns the options that `strategy` was built with; those of the environment if none."""
    if strategy not in _options:
        _options[strategy] = CommunicationOptions.from_environ()
    return _options[strategy]


def _number(environ: Mapping[str, str], name: str, kind: Any, what: str) -> Any:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name} to be a positive {what}", repr(text)) from error
