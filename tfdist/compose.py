"""Puts the rooms together: where am I, how do I run, and the engine under it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING
from typing import Any

from tfdist import logs
from tfdist import tuning
from tfdist.cluster.detect import detect
from tfdist.cluster.topology import Cluster
from tfdist.errors import ConfigError
from tfdist.strategies import registry
from tfdist.strategies.choose import choose

if TYPE_CHECKING:
    from tfdist.strategies.communication import CommunicationOptions

log = logging.getLogger("absl")


def strategy(
    name: str | None = None,
    *,
    replicas: int | None = None,
    communication: CommunicationOptions | None = None,
    cluster: Cluster | None = None,
    rendezvous_timeout: float | None = None,
) -> Any:
    """Returns the `tf.distribute.Strategy` for this process, and activates the engine.

    In a cluster it first waits at the start barrier for every other task. In a worker or
    parameter-server process of a parameter-server cluster it serves, and ends the process with
    code 0 when the coordinator is done. In an evaluator, `fit` evaluates every checkpoint that the
    others write, and nothing is saved. Call it before the first TensorFlow operation.

    Args:
        name: "default", "mirrored", "multi_worker", "parameter_server", "tpu" or the name of a
            plug-in. None reads `TFDIST_STRATEGY`, then chooses from the cluster and the hardware.
        replicas: Local replicas. More than one without accelerators splits the CPU into as many
            logical devices.
        communication: How gradients travel; None reads `TFDIST_*`.
        cluster: The cluster; None detects it from the environment.
        rendezvous_timeout: Seconds until the start barrier fails; None reads
            `TFDIST_RENDEZVOUS_TIMEOUT`, default 300.

    Raises:
        ClusterError: The environment describes no possible cluster.
        StrategyError: The strategy asked for cannot run here.
        RendezvousError: Tasks were missing at the deadline.

    Example:
        >>> strategy = tfdist.strategy("mirrored", replicas=2)
        >>> strategy.num_replicas_in_sync
        2
    """
    from tfdist.strategies.hardware import detect_hardware

    cluster = detect(os.environ) if cluster is None else cluster
    logs.install(cluster)
    asked = name or os.environ.get("TFDIST_STRATEGY", "").strip() or None
    choice = choose(
        cluster, detect_hardware(), name=asked, replicas=replicas, known=registry.names()
    )
    for warning in (*cluster.warnings, *choice.warnings):
        log.warning("%s", warning)
    log.info("%s: strategy %s. %s", cluster.task, choice.name, " ".join(choice.reasons))
    if communication is not None and choice.name != "multi_worker":
        log.warning("communication options are for several workers; %s has none", choice.name)
    options = registry.Options(
        replicas=replicas, communication=communication, rendezvous_timeout=rendezvous_timeout
    )
    if choice.name == "multi_worker":
        tuning.tune()
    # The barrier in the builder comes before the import of Keras: who is missing is known sooner.
    built = registry.builder(choice.name)(cluster, options)
    activate()
    if cluster.is_evaluator:
        from tfdist.engine import role
        from tfdist.state.follow import follow

        log.info("%s: fit evaluates the checkpoints of those who train", cluster.task)
        role.answer_fit_with(follow)
    return built


def seed(value: int) -> None:
    """Seeds whatever draws random numbers: Python, NumPy, TensorFlow and Keras.

    Every worker calls it with the same value, before it builds the model and the data. Initial
    weights and the order of examples are then those of one device. What layers draw in a step
    (dropout, noise, augmentation) differs between replicas, is the same in every run on as many
    replicas, and is the one place where N replicas are not one device: the first replica draws what
    one device would, the others draw other numbers for their parts of the batch.

    Args:
        value: From 0 to 2**32 - 1.

    Raises:
        ConfigError: `value` is no such number.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise ConfigError("a seed from 0 to 4294967295", repr(value))
    activate()
    import keras

    keras.utils.set_random_seed(value)


def activate() -> None:
    """Puts the engine into Keras, for scripts that build their strategy themselves.

    Raises:
        UnsupportedError: This version of Keras was not tested with tfdist.
    """
    from tfdist.engine import activate as engine

    engine.activate()


def deactivate() -> None:
    """Takes the engine out of Keras again."""
    from tfdist.engine import activate as engine

    engine.deactivate()
