"""Which strategy suits a cluster: a pure function from facts to a name and its reasons.

    >>> from tfdist.cluster import detect
    >>> choose(detect({})).name
    'default'

| the cluster | the strategy |
|---|---|
| an evaluator | default, or mirrored with several accelerators: it joins nobody |
| parameter servers | parameter_server |
| several workers | multi_worker |
| a TPU | tpu |
| one worker, several accelerators or `replicas` above 1 | mirrored |
| anything else | default |

A name overrides the table where it can work. A name that would train several models, or wait for
ever, is refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist.cluster.topology import Cluster
from tfdist.errors import StrategyError
from tfdist.strategies.hardware import Hardware

DEFAULT = "default"
MIRRORED = "mirrored"
MULTI_WORKER = "multi_worker"
PARAMETER_SERVER = "parameter_server"
TPU = "tpu"

NAMES = (DEFAULT, MIRRORED, MULTI_WORKER, PARAMETER_SERVER, TPU)

#: The variable that names the strategy where no argument does.
VARIABLE = "TFDIST_STRATEGY"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy and why.

    Attributes:
        name: One of `NAMES`, or the name of a plug-in.
        reasons: Why it was chosen, one sentence each.
        warnings: What looks wrong without being an error, one sentence each.
    """

    name: str
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def requested(environ: Mapping[str, str]) -> str | None:
    """Returns the strategy that `TFDIST_STRATEGY` names, None where it is not set."""
    return environ.get(VARIABLE, "").strip() or None


def choose(
    cluster: Cluster,
    hardware: Hardware | None = None,
    name: str | None = None,
    replicas: int | None = None,
    known: Sequence[str] = NAMES,
) -> Choice:
    """Chooses the strategy of this process.

    Args:
        cluster: Where the process is.
        hardware: Accelerators that were found on this machine, or None where nobody looked.
        name: The strategy that the user asks for, or None to let the table decide.
        replicas: Local replicas that the user asks for, on CPU too.
        known: Names that exist, plug-ins included. A plug-in is never refused.

    Returns:
        The name, the reasons, and warnings.

    Raises:
        StrategyError: `name` or `replicas` cannot work in this cluster.
    """
    accelerators, warnings = _accelerators(cluster, hardware)
    if replicas is not None and (
        isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1
    ):
        raise StrategyError(
            "replicas to be a whole number, 1 or more", f"replicas={replicas!r}", "correct replicas"
        )
    if name is None:
        chosen, reason = _table(cluster, accelerators, replicas)
        reasons: tuple[str, ...] = (reason,)
    else:
        chosen = _known(name, known)
        reasons = (f"{chosen} was asked for by name.",)
        if cluster.is_evaluator and chosen in (MULTI_WORKER, PARAMETER_SERVER):
            _refuse_impossible(cluster, chosen)
            # One script serves every task of a job, so that the name reaches the evaluator too.
            asked = chosen
            chosen, reason = _table(cluster, accelerators, replicas)
            reasons = (f"{asked} was asked for by name, for the tasks that train.", reason)
        else:
            _refuse_impossible(cluster, chosen)
            if chosen == MULTI_WORKER and cluster.num_workers == 1:
                reasons += ("The cluster has one worker: multi_worker runs without peers.",)
    if replicas is not None and replicas > 1 and chosen in NAMES and chosen != MIRRORED:
        raise StrategyError(
            f"replicas only with the strategy {MIRRORED}",
            f"replicas={replicas} with {chosen} ({reasons[-1].rstrip('.')})",
            "leave replicas out",
        )
    return Choice(chosen, reasons, warnings)


def _table(cluster: Cluster, accelerators: int, replicas: int | None) -> tuple[str, str]:
    local = _local(accelerators, replicas)
    if cluster.is_evaluator:
        return local[0], f"An evaluator never joins the tasks that train. {local[1]}"
    servers = len(cluster.addresses.get("ps", ()))
    if servers:
        return PARAMETER_SERVER, f"The cluster has parameter servers: {servers}."
    if cluster.tpu and (not cluster.addresses or cluster.num_workers == 1):
        return TPU, f"The environment names a TPU: {cluster.tpu}."
    if cluster.num_workers > 1:
        return (
            MULTI_WORKER,
            f"The cluster has {cluster.num_workers} workers and no parameter server.",
        )
    return local


def _local(accelerators: int, replicas: int | None) -> tuple[str, str]:
    if replicas is not None and replicas > 1:
        return MIRRORED, f"One process, and {replicas} replicas were asked for."
    if accelerators > 1 and replicas is None:
        return MIRRORED, f"One process with {accelerators} accelerators."
    if accelerators == 1:
        return DEFAULT, "One process with one accelerator."
    return DEFAULT, "One process on one device."


def _accelerators(cluster: Cluster, hardware: Hardware | None) -> tuple[int, tuple[str, ...]]:
    """Returns how many accelerators to count on, and warnings where promise and machine differ."""
    promised = cluster.accelerators or 0
    found = promised if hardware is None else hardware.accelerators
    if not found and promised:
        missing = (
            f"The environment promises accelerators ({promised}), and none is visible here: check "
            "the driver, CUDA_VISIBLE_DEVICES and that the image holds the CUDA libraries."
        )
        return promised, (missing,)
    if found < promised:
        return found, (
            f"The environment promises {promised} accelerators, and {found} of them are visible.",
        )
    return found, ()


def _known(name: str, known: Sequence[str]) -> str:
    plain = name.strip().lower().replace("-", "_")
    for candidate in (name, plain):
        if candidate in known:
            return candidate
    import difflib  # Only here: most names are right.

    squeezed = plain.replace("_", "").removesuffix("strategy")
    by_word = {item.replace("_", ""): item for item in known}
    close = difflib.get_close_matches(squeezed, by_word, n=1, cutoff=0.6)
    raise StrategyError(
        f"the name of a strategy, one of {', '.join(known)}",
        f"{name!r}",
        f"did you mean {by_word[close[0]]}" if close else "use one of these names",
    )


def _refuse_impossible(cluster: Cluster, name: str) -> None:
    """Raises where `name` cannot do what it says in this cluster."""
    servers = cluster.has_parameter_servers
    workers = cluster.num_workers
    roles = f"a cluster of {', '.join(cluster.roles)}" if cluster.roles else "one process"
    if name == PARAMETER_SERVER and not servers:
        raise StrategyError(
            "parameter servers (ps) in the cluster for the strategy parameter_server",
            roles,
            "add ps tasks, for example tfdist run --workers 2 --ps 1, or use multi_worker",
        )
    if name == TPU and not cluster.tpu:
        raise StrategyError(
            "a TPU in the environment for the strategy tpu",
            "none of TPU_NAME, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_WORKER_HOSTNAMES",
            "set TPU_NAME to the name of the TPU, or to local on a TPU machine",
        )
    if name == MULTI_WORKER and servers:
        raise StrategyError(
            "a cluster without parameter servers for the strategy multi_worker, which would wait "
            "for ever for them to train",
            roles,
            "use parameter_server, or start the job without ps tasks",
        )
    if name in (DEFAULT, MIRRORED) and not cluster.is_evaluator and (servers or workers > 1):
        right = PARAMETER_SERVER if servers else TPU if cluster.tpu else MULTI_WORKER
        tasks = f"{workers} worker{'s' if workers > 1 else ''}"
        raise StrategyError(
            f"a cluster of one process for the strategy {name}, because each process would train "
            "a model of its own",
            f"a cluster of {tasks}{' and parameter servers' if servers else ''}",
            f"use {right}, or start one process",
        )
    if name == TPU and (servers or (cluster.addresses and workers > 1)):
        raise StrategyError(
            "one process for the strategy tpu", roles, "start one process for the TPU"
        )
