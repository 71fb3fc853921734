"""Data that any number of workers read together, and what `fit` takes of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tfdist.data.order import Order
from tfdist.data.parts import IndexedPart
from tfdist.data.parts import Maps
from tfdist.data.parts import Place
from tfdist.data.parts import describe
from tfdist.data.parts import pad
from tfdist.data.policy import Facts
from tfdist.data.policy import Policy
from tfdist.data.policy import choose
from tfdist.data.remote import RemotePart
from tfdist.data.service import Service
from tfdist.data.shipped import IndexedShipment
from tfdist.data.shipped import Shipment
from tfdist.data.shipped import StreamShipment
from tfdist.data.shipped import why_not
from tfdist.data.streams import StreamPart
from tfdist.data.world import drawn_seed
from tfdist.data.world import workers_here
from tfdist.errors import ConfigError

log = logging.getLogger("absl")

REMAINDERS = ("pad", "partial", "drop")
#: Examples that a shuffle buffer holds unless told otherwise.
BUFFER = 10_000


class Padded(NamedTuple):
    """A batch of a fixed number of examples, some of which may be there to fill it only.

    Attributes:
        data: Structure of tensors, as the source gives it.
        mask: Bool [rows]: False for an example that is there to fill the batch.
    """

    data: Any
    mask: Any


class Sharded:
    """Examples in global batches, each of which the workers of a job read together.

    `tfdist.data.shard` makes it; `fit`, `evaluate` and `predict` take it under every strategy.

    Iterating over it yields this process's part of each global batch of one pass: of the worker
    that this process is, or all of it where there is one worker. With `remainder="pad"` these are
    `Padded`, pairs of the data and a mask; else the data. Each iteration is the next pass.

    Args:
        source: A source of `tfdist.data.indexed` or `tfdist.data.sources`.
        maps: What is done to a worker's examples.
        batch_size: Examples of a global batch.
        shuffle, seed, policy, remainder, buffer: As for `shard`.
        service: The processes that make the batches, or None.
    """

    def __init__(
        self,
        source: Any,
        maps: Maps,
        *,
        batch_size: int,
        shuffle: bool | str = False,
        seed: int | None = None,
        policy: str = "auto",
        remainder: str = "pad",
        buffer: int = BUFFER,
        service: Service | None = None,
    ):
        self._source = source
        self._maps = maps
        self.global_batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.remainder = remainder
        self._wanted = policy
        self._buffer = buffer
        self.service = service
        self._next = 0
        self._whole: Any = None

    @property
    def facts(self) -> Facts:
        """What is known of the source."""
        facts: Facts = self._source.facts
        return facts

    @property
    def num_examples(self) -> int | None:
        """Examples of a pass, or None where that is not known."""
        return self.facts.examples

    @property
    def num_batches(self) -> int | None:
        """Global batches of a pass, or None where that is not known."""
        examples = self.facts.examples
        if examples is None:
            return None
        size = self.global_batch_size
        return examples // size if self.remainder == "drop" else -(-examples // size)

    @property
    def element_spec(self) -> Any:
        """Structure of `tf.TypeSpec` of one global batch, without the mask."""
        rows: int | None = self.global_batch_size
        if self.remainder == "partial":
            examples = self.facts.examples
            rows = rows if examples is not None and examples % self.global_batch_size == 0 else None
        return with_rows(self.whole().spec, rows)

    @property
    def policy(self) -> str:
        """The name of the policy in this process's cluster: "example", "file" or "given"."""
        return self.policy_for(workers_here()[0]).name

    @property
    def reasons(self) -> list[str]:
        """Why the data is split as it is in this process's cluster."""
        return list(self.policy_for(workers_here()[0]).reasons)

    def policy_for(self, workers: int) -> Policy:
        """Returns how the data is split over a number of workers."""
        return choose(self.facts, workers, self._wanted)

    def mapped(self, function: Callable[..., Any]) -> Sharded:
        """Returns the same data with `function` applied to the batches that a worker has."""
        return self._with(maps=self._maps._replace(batch=(*self._maps.batch, function)))

    def in_order(self) -> Sharded:
        """Returns the same examples in the order of the source, none left out at the end."""
        kept = "partial" if self.remainder == "drop" else self.remainder
        return self._with(shuffle=False, remainder=kept)

    def _with(self, **changes: Any) -> Sharded:
        given = {
            "maps": self._maps,
            "batch_size": self.global_batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "policy": self._wanted,
            "remainder": self.remainder,
            "buffer": self._buffer,
            "service": self.service,
        }
        return Sharded(self._source, **{**given, **changes})

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this data, and the order of it, from others; fit for JSON."""
        return {
            "kind": self.facts.kind,
            **self._source.fingerprint(),
            "spec": describe(self.whole().spec),
            "global_batch_size": self.global_batch_size,
            "shuffle": self.shuffle,
            "remainder": "drop" if self.remainder == "drop" else "keep",
        }

    @functools.cached_property
    def why_no_service(self) -> str:
        """Why the batches are made here although others were to make them, or ""."""
        shipment = self._made(Place(*workers_here()), 0)[1]
        near = self.service is not None and self.service.is_near
        why = why_not(self.facts.kind, shipment, near)
        if why:
            log.warning("data service: not used: %s", why)
        return why

    def part(self, place: Place, seed: int) -> Any:
        """Returns one worker's part: an `IndexedPart`, a `StreamPart` or a `RemotePart`.

        Args:
            place: Which.
            seed: What the orders are drawn from, the same on all workers.
        """
        part, shipment = self._made(place, seed)
        if self.service is None or self.why_no_service:
            return part
        return RemotePart(part, shipment, self.service, place.worker)

    def _made(self, place: Place, seed: int) -> tuple[Any, Shipment]:
        """Returns one worker's part for this process, and for others."""
        policy = self.policy_for(place.workers)
        drop = self.remainder == "drop"
        facts, source = self.facts, self._source
        if facts.is_indexed and policy.name == "example":
            order = Order(
                source.length,
                self.global_batch_size,
                shuffle=self.shuffle,
                seed=seed if self.shuffle else None,
                drop=drop,
            )
            part = IndexedPart(source, order, place, self._maps)
            return part, IndexedShipment(source, order, place, self._maps)
        is_whole = policy.name == "example"
        lengths = None if policy.examples is None else list(policy.examples)
        if is_whole and facts.examples is not None:
            lengths = [facts.examples]

        def stream(examples: Callable[..., tf.data.Dataset]) -> StreamPart:
            return StreamPart(
                lambda epoch: examples(epoch, place, policy, seed if self.shuffle else None),
                place,
                self._maps,
                batch_size=self.global_batch_size,
                is_whole=is_whole,
                lengths=lengths,
                drop=drop,
                shuffle=self._buffer if self.shuffle else None,
                seed=seed,
            )

        here = there = stream(source.examples)
        if self.service is not None and hasattr(source, "examples_in_graph"):
            there = stream(source.examples_in_graph)
        # Another process might read a user's own dataset in another order.
        return here, StreamShipment(there, is_whole=facts.kind != "records")

    def whole(self) -> Any:
        """Returns all of the data as the part of one worker with one replica."""
        if self._whole is None:
            # What the data looks like does not depend on the seed.
            self._whole = self._made(Place(), 0)[0]
        return self._whole

    def __iter__(self) -> Iterator[Any]:
        workers, worker = workers_here()
        epoch = self._next
        self._next += 1
        return self.batches(workers, worker, epoch)

    def batches(self, workers: int = 1, worker: int = 0, epoch: int = 0) -> Iterator[Any]:
        """Yields the batches of one worker in one pass, in the form of iterating over this.

        Args:
            workers: Number of workers.
            worker: Number of this one, from 0.
            epoch: Number of the pass, from 0.
        """
        place = Place(workers, worker)
        part = self.part(place, self._own_seed())
        full = -(-self.global_batch_size // workers)
        for element in part.iterator(epoch):
            data = element[0] if part.is_tagged else element
            if self.remainder == "pad":
                yield Padded(*pad(data, full))
            else:
                yield data

    def to_dataset(self) -> tf.data.Dataset:
        """Returns `(x, y, sample_weight)` batches of one shape, for what takes `tf.data` only.

        An example that is there to fill a batch has the weight 0, others 1, or their own: weighted
        metrics leave it out. Keras's mean loss of such a batch divides by all of its rows, and
        metrics without weights (`compile(metrics=...)`) count them, so the numbers differ a little
        from those of the engine's `fit`, which cuts such rows off and needs no weights. It is for
        TPUs, whose shapes must not change (not tried on one). Each iteration is the next pass, all
        of it: not this worker's part.

        Raises:
            ConfigError: Examples are no `x`, `(x, y)` or `(x, y, sample_weight)` of dense tensors.
        """
        spec = with_rows(self.whole().spec, self.global_batch_size)
        named = spec if type(spec) is tuple else (spec,)
        if len(named) > 3 or not all(
            isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(spec)
        ):
            raise ConfigError(
                "x, (x, y) or (x, y, sample_weight) of dense tensors", f"{self.whole().spec}"
            )
        x, y, weight = [*named, None, None][:3]
        weights = tf.TensorSpec([self.global_batch_size], tf.float32)

        def batches() -> Iterator[Any]:
            epoch = self._next
            self._next += 1
            place = Place()
            part = self.part(place, self._own_seed())
            for data in part.iterator(epoch):
                data, mask = pad(data, self.global_batch_size)
                parts: tuple[Any, ...] = data if type(spec) is tuple else (data,)
                own = tf.cast(mask, tf.float32)
                if weight is not None:
                    own *= tf.cast(tf.reshape(parts[2], [-1]), tf.float32)
                yield (*parts[:2], own) if y is not None else (parts[0], (), own)

        signature = (x, y if y is not None else (), weights)
        dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
        if self.num_batches is not None:
            # Of a length that it does not know Keras says that the data ran out.
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.num_batches))
        return dataset.prefetch(2)

    def _own_seed(self) -> int:
        if self.seed is None:
            # From now on it is this data's: every pass from one seed.
            self.seed = drawn_seed() if self.shuffle else 0
        return self.seed


def with_rows(spec: Any, rows: int | None) -> Any:
    """Returns the spec of batches of `rows` examples."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)
        return leaf

    return tf.nest.map_structure(one, spec)
