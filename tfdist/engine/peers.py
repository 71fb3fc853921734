"""What the workers of a synchronous job make sure of before and while they train together.

Every worker runs its own Python. If one of them was given other data, other weights or another
decision to stop, stock training either trains different models side by side or dies in a
collective with a message about tensor shapes. `Peers` compares what matters at the points where
that is cheap, and either makes it equal from the chief or refuses it in one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster import current
from tfdist.cluster import rendezvous
from tfdist.cluster.group import Group
from tfdist.engine import accumulation
from tfdist.engine import allreduce
from tfdist.engine import exchange
from tfdist.engine.replicas import is_several_workers
from tfdist.engine.replicas import wide_enough
from tfdist.errors import DisagreementError
from tfdist.errors import UnsupportedError

log = logging.getLogger("absl")

_calls = itertools.count(1)
_broken_off = False  # Whether a call of this process has ended in the middle of a step.


class Peers:
    """The other workers, in one call of fit, evaluate or predict.

    Alone (one process) every method is a cheap identity.

    Args:
        strategy: The strategy of the model.
        call: What is being done, for messages: "fit", "evaluate" and so on.
    """

    def __init__(self, strategy: Any, call: str):
        self.strategy = strategy
        self.group = _group_for(strategy)
        self._patience = rendezvous.patience_from(os.environ)
        self.name = f"{call} #{next(_calls)}" if self.group else call

    @property
    def is_chief(self) -> bool:
        return self.group is None or self.group.cluster.is_chief

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Marks work that cannot outlive another worker (see `Group.together`)."""
        global _broken_off
        if self.group is None:
            yield
            return
        with self.group.together(self.name):
            try:
                yield
            except BaseException:
                _broken_off = True
                raise

    def start_afresh(self) -> None:
        """Forgets what a step that was broken off on any worker has left under way."""
        global _broken_off
        if self.group is not None and self.any("whether a step was broken off", _broken_off):
            _broken_off = False
            exchange.begin()
            allreduce.begin(self.strategy)
            accumulation.begin()

    def same(self, what: str, facts: Mapping[str, Any], fixes: Mapping[str, str]) -> None:
        """Refuses to go on if any of `facts` is not the same on every worker.

        Args:
            what: What is compared, for messages about who is still missing.
            facts: Name to a value that JSON can hold.
            fixes: Name to what to do if that one differs.

        Raises:
            DisagreementError: The same message on every worker, with both values.
        """
        if self.group is None:
            return
        everyone = self._gather(what, dict(facts))
        for key in facts:
            values = [each.get(key) for each in everyone]
            if any(value != values[0] for value in values):
                raise DisagreementError(
                    f"{key} to be the same on every worker before {self.name}",
                    self._listing(values),
                    fixes.get(key, f"pass the same {key} on every worker"),
                )

    def chiefs(self, what: str, value: Any) -> Any:
        """Returns the chief's value; says so where it replaces another."""
        if self.group is None:
            return value
        values = self._gather(what, value)
        chief = values[self.group.chief_rank]
        if any(each != chief for each in values):
            log.warning(
                "%s differs between workers (%s); all go on with the chief's",
                what,
                self._listing(values),
            )
        return chief

    def note(self, what: str, value: Any, consequence: str) -> None:
        """Warns on every worker if `value` is not the same on all."""
        if self.group is not None:
            values = self._gather(what, value)
            if any(each != values[0] for each in values):
                log.warning(
                    "%s differs between workers (%s): %s", what, self._listing(values), consequence
                )

    def any(self, what: str, flag: bool) -> bool:
        """Returns whether `flag` is set on any worker."""
        return flag if self.group is None else any(self._gather(what, bool(flag)))

    def any_of(self, what: str, *flags: bool) -> list[bool]:
        """Returns, for each of `flags`, whether it is set on any worker; one message in all."""
        if self.group is None:
            return list(flags)
        everyone = self._gather(what, [bool(flag) for flag in flags])
        return [any(each) for each in zip(*everyone, strict=True)]

    def any_in_step(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any worker; for every step, so as fast as may be."""
        if self.group is None:
            return flag
        return any(stop for [stop] in exchange.exchange("the end of a step", 1).gather([int(flag)]))

    def gather(self, what: str, value: Any) -> list[Any]:
        """Returns what each worker says, in the order of workers; anything that JSON can hold."""
        return [value] if self.group is None else self._gather(what, value)

    def of_chief(self, what: str, value: Any) -> Any:
        """Returns what the chief says; what others say does not matter."""
        if self.group is None:
            return value
        said = self._gather(what, value if self.is_chief else None)
        return said[self.group.chief_rank]

    def mean(self, what: str, logs: Mapping[str, Any], weight: float) -> dict[str, Any]:
        """Returns the mean over workers of numbers in `logs`; what is no number is the chief's.

        Args:
            what: What the logs are, for messages.
            logs: Numbers, arrays, text, or dicts of these.
            weight: This worker's weight in the mean.
        """
        if self.group is None:
            return dict(logs)
        everyone = self._gather(what, [weight, _listed(logs)])
        weights = [weight for weight, _ in everyone]
        merged: dict[str, Any] = _merge([logs for _, logs in everyone], weights)
        return merged

    def equalize(self, variables: Iterable[Any]) -> None:
        """Makes the variables the same on every worker, from the chief's values.

        Args:
            variables: Keras variables, in the same order on every worker.
        """
        if self.group is None:
            return
        variables = list(variables)
        digests = [_digest(variable) for variable in variables]
        everyone = self._gather("the weights it starts from", digests)
        if any(len(each) != len(digests) for each in everyone):
            raise DisagreementError(
                f"the same model on every worker before {self.name}",
                self._listing([f"{len(each)} variables" for each in everyone]),
                "build the same model on every worker",
            )
        chief = everyone[self.group.chief_rank]
        differing = [
            index
            for index in range(len(digests))
            if any(each[index] != chief[index] for each in everyone)
        ]
        if not differing:
            return
        paths = ", ".join(variables[i].path for i in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        log.warning(
            "workers start from different values of %s%s; all go on with the chief's", paths, more
        )
        for index in differing:
            _take_chiefs(self.strategy, variables[index])

    def _gather(self, what: str, value: Any) -> list[Any]:
        assert self.group is not None
        return self.group.all_gather(f"{self.name}: {what}", value, self._patience)

    def _listing(self, values: list[Any]) -> str:
        assert self.group is not None
        return ", ".join(
            f"{_short(value)} on {task}"
            for task, value in zip(self.group.tasks, values, strict=True)
        )


def _group_for(strategy: Any) -> Group | None:
    if not is_several_workers(strategy):
        return None
    group = current.group()
    if group is None:
        raise UnsupportedError(
            "tfdist to be active before the MultiWorkerMirroredStrategy is built",
            "a strategy that was built without its start barrier",
            "build it with tfdist.strategy(), call tfdist.activate() above the line that builds "
            "it, or start the script with `tfdist run`",
        )
    return group


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _listed(value: Any) -> Any:
    """Returns `value` as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _listed(each) for key, each in value.items()}
    array = np.asarray(value)
    return array.tolist() if np.issubdtype(array.dtype, np.number) else str(value)


def _merge(values: list[Any], weights: list[float]) -> Any:
    """Returns the mean of what all workers have in the same place; the first is the chief's."""
    first = values[0]
    if isinstance(first, dict):
        pairs = list(zip(values, weights, strict=True))
        merged = {}
        for key in first:
            having = [(v[key], w) for v, w in pairs if isinstance(v, dict) and key in v]
            merged[key] = _merge([v for v, _ in having], [w for _, w in having])
        return merged
    shapes = {np.shape(value) for value in values}
    if isinstance(first, str) or len(shapes) > 1 or not sum(weights):
        return first
    arrays = [np.asarray(value, np.float64) for value in values]
    mean = np.average(arrays, axis=0, weights=weights)
    return float(mean) if np.ndim(mean) == 0 else mean


def _digest(variable: Any) -> str:
    value = np.ascontiguousarray(variable.value.numpy())
    head = f"{variable.name} {value.dtype} {value.shape}".encode()
    if value.dtype == object:
        return hashlib.blake2b(head + repr(value.tolist()).encode(), digest_size=16).hexdigest()
    return hashlib.blake2b(head + value.tobytes(), digest_size=16).hexdigest()


def _take_chiefs(strategy: Any, variable: Any) -> None:
    """Assigns the chief's value everywhere: a sum in which all others put in zero."""
    value = variable.value.numpy()
    wide = value.astype(wide_enough(value.dtype))

    def mine(context: Any) -> Any:
        first = context.replica_id_in_sync_group == 0
        return tf.constant(wide if first else np.zeros_like(wide))

    parts = strategy.experimental_distribute_values_from_function(mine)
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
    with strategy.scope():
        variable.assign(tf.cast(total, value.dtype).numpy())
