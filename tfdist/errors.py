"""Errors that a user can act on, all in one grammar.

Every message says what was expected, what was received, and what to do:

    >>> print(ClusterError("a port in each address", "'10.0.0.1'", "write host:port"))
    Expected a port in each address. Received: '10.0.0.1'. Fix: write host:port.

The command line prints the message alone, without a traceback, and exits with `exit_code`.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 143


class TfdistError(Exception):
    """Base of every error that tfdist raises on purpose.

    Args:
        expected: What was expected, a phrase that follows "Expected".
        received: What was received instead, or None where there is nothing to show.
        fix: What to do about it, an imperative sentence without its full stop.

    Attributes:
        exit_code: The exit code of a process that ends with this error.
    """

    exit_code = EXIT_FAILED

    def __init__(self, expected: str, received: str | None = None, fix: str | None = None):
        self.expected = expected
        self.received = received
        self.fix = fix
        parts = [f"Expected {expected.rstrip('.')}."]
        if received is not None:
            parts.append(f"Received: {received.rstrip('.')}.")
        if fix is not None:
            parts.append(f"Fix: {fix.rstrip('.')}.")
        super().__init__(" ".join(parts))


class ConfigError(TfdistError, ValueError):
    """A value written by the user (argument, flag, config file) cannot be right."""

    exit_code = EXIT_USAGE


class ClusterError(ConfigError):
    """The environment describes a cluster that cannot be right."""


class StrategyError(ConfigError):
    """The strategy asked for cannot run in this cluster or on this hardware."""


class UnsupportedError(ConfigError):
    """The installed TensorFlow, Keras or optional package cannot do what was asked."""


class StoreError(TfdistError, OSError):
    """What should survive cannot be written or read: no space, no permission, no such place."""


class StaleWriterError(StoreError):
    """A newer incarnation of this run writes here now, and this one no longer may."""


class DamagedCommitError(StoreError):
    """A commit is not as it was written."""


class RendezvousError(TfdistError, TimeoutError):
    """Tasks of the cluster did not all arrive before the deadline."""


class PeerLostError(TfdistError, ConnectionError):
    """Another task of the cluster died or stopped answering."""


class DisagreementError(TfdistError, RuntimeError):
    """Tasks that must do the same thing at the same time were about to do different things."""
