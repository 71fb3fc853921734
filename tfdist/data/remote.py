"""One worker's part of the data, made by the processes of a `Service`.

Batch after batch is taken from one process after the other, each of which makes every n-th. So the
order is that of this process alone, and where it is lost the place is known: those that are left
make the batches from there on.

None of the modes of `tf.data` service for several workers does that: dynamic sharding loses the
order and, with a worker, its examples; without sharding each worker makes all batches.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import execute

from tfdist.data.lease import Lease
from tfdist.data.parts import without_tuning
from tfdist.data.service import Service
from tfdist.data.shipped import Shipment
from tfdist.errors import TfdistError

log = logging.getLogger("absl")

#: Batches that are kept ready here, of each process.
_READY = 2
#: From an error of TensorFlow to the end of the connection, where the one is because of the other.
_SAME_REASON_SECONDS = 3.0
#: After so long without a batch it is said whose is missing.
_PATIENCE_SECONDS = 30.0


class RemotePart:
    """A part that other processes make.

    Args:
        part: The same part, for this process.
        shipment: The part for others.
        service: The processes.
        worker: Number of this worker.

    Attributes:
        batches, spec, is_tagged: As of `part`.
        seeks: Whether `iterator` begins at any batch.
    """

    seeks = True

    def __init__(self, part: Any, shipment: Shipment, service: Service, worker: int):
        self._part = part
        self._shipment = shipment
        self._service = service
        self._worker = worker
        self.batches = part.batches
        self.spec = part.spec
        self.is_tagged = part.is_tagged
        self._stream: _Stream | None = None
        self._has_begun = False
        self._is_local = False

    def rows(self, batch: int) -> Any:
        """Returns the examples that each replica of each worker has of a batch, if known."""
        return self._part.rows(batch)

    def split(self, rows: int) -> Any:
        """Returns the examples of each replica here, where this worker has `rows` of a batch."""
        return self._part.split(rows)

    def is_full(self, rows: list[list[int]]) -> bool:
        """Whether every worker has all the rows of a full batch."""
        return bool(self._part.is_full(rows))

    @property
    def drop(self) -> Any:
        """Whether the last batch is left out if it is not full."""
        return self._part.drop

    def begin(self, passes: int) -> None:
        """Brings the shuffles of what is read here, not there, to where passes have brought them.

        Other processes read no dataset that shuffles anew by itself.
        """
        if not self._part.seeks:
            self._part.begin(passes)

    def iterator(self, epoch: int, batch: int = 0) -> Iterator[Any]:
        """Returns an iterator over the batches of which this worker has any example.

        The one before it cannot go on.

        Args:
            epoch: Number of the pass.
            batch: Number of the batch to begin with.
        """
        if self._is_local:
            return self._here(epoch, batch)
        return self._there(epoch, batch)

    def _here(self, epoch: int, batch: int) -> Iterator[Any]:
        found: Iterator[Any] = self._part.iterator(epoch, batch)
        if batch and not self._part.seeks:
            log.info("reading %d batches again to find the place of pass %d", batch, epoch + 1)
            for _ in range(batch):
                next(found, None)
        return found

    def _there(self, epoch: int, batch: int) -> Iterator[Any]:
        last = self._shipment.batches
        while last is None or batch < last:
            try:
                stream = self._stream_at(epoch, batch)
            except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
                if isinstance(error, TfdistError):
                    raise
                # What cannot be sent can be done here, with the same result.
                self._is_local = True
                log.warning("data service: not used; the pipeline cannot be sent: %s", error)
                yield from self._here(epoch, batch)
                return
            try:
                element = stream.next()
            except tf.errors.OutOfRangeError:
                return
            except _Lost as error:
                self._note(error, epoch, batch)
                continue
            batch += 1
            yield element

    def _stream_at(self, epoch: int, batch: int) -> _Stream:
        """Returns a stream whose next batch is that one."""
        while True:
            stream = self._stream
            if stream is not None and stream.is_at(epoch, batch) and not stream.is_closed:
                if batch or len(stream.leases) == stream.wanted:
                    return stream
                # A pass begins: those that were lost may be back.
                leases = self._service.leases(all_of_them=False)
                if len(leases) <= len(stream.leases):
                    _give_back(leases)
                    return stream
            else:
                leases = self._service.leases(all_of_them=not self._has_begun)
            if stream is not None:
                stream.close()
            self._has_begun = True
            wanted = self._service.size
            if self._shipment.is_whole:
                wanted = 1
                kept = leases.pop(self._worker % len(leases))
                _give_back(leases)
                leases = [kept]
            try:
                self._stream = _Stream(self._shipment, epoch, batch, leases, wanted)
                return self._stream
            except _Lost as error:
                self._note(error, epoch, batch)
            finally:
                if self._stream is stream:
                    _give_back(leases)

    def _note(self, error: _Lost, epoch: int, batch: int) -> None:
        where = f"batch {batch + 1} of pass {epoch + 1}"
        log.warning("data service: %s is lost; going on with %s", error, where)
        if self._stream is not None:
            self._stream.close()


class _Lost(Exception):
    """A process is lost."""


class _Stream:
    """Batches from one of a pass on, from several processes in turn.

    Args:
        shipment: What they make.
        epoch: Number of the pass.
        batch: Number of the batch in it.
        leases: The processes.
        wanted: How many there would be if all were there.

    Raises:
        _Lost: One of them is gone.
    """

    def __init__(
        self, shipment: Shipment, epoch: int, batch: int, leases: list[Lease], wanted: int
    ):
        self.leases = leases
        self.wanted = wanted
        self.is_closed = False
        self._per_pass = shipment.batches
        self._passes = shipment.passes
        self._epoch, self._batch = epoch, batch
        self._taken = 0
        self._readers: list[_Reader] = []
        try:
            for number, lease in enumerate(leases):
                dataset = shipment.dataset(epoch, batch, number, len(leases), lease.is_near)
                self._readers.append(_Reader(lease, dataset))
        except BaseException:
            self.close()
            raise
        _open.add(self)

    def is_at(self, epoch: int, batch: int) -> bool:
        """Whether that batch is the next one."""
        number = self._batch + self._taken
        if self._per_pass is None:
            return (epoch, batch) == (self._epoch, number)
        passes, within = divmod(number, self._per_pass)
        return passes < self._passes and (epoch, batch) == (self._epoch + passes, within)

    def next(self) -> Any:
        """Returns the next batch.

        Raises:
            _Lost: The process that makes it is gone.
        """
        element = self._readers[self._taken % len(self._readers)].next()
        self._taken += 1
        return element

    def close(self) -> None:
        """Gives back all that is held there."""
        self.is_closed = True
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.close()
        _give_back(self.leases)

    def __del__(self) -> None:
        self.close()


_open: weakref.WeakSet[_Stream] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # While those at the other end are there and TensorFlow is: it waits for answers.
    for stream in list(_open):
        stream.close()


class _Reader:
    """Reads what one process makes.

    Args:
        lease: The process.
        dataset: What it is to make.

    Raises:
        _Lost: It is gone.
    """

    def __init__(self, lease: Lease, dataset: tf.data.Dataset):
        self._lease = lease
        self._cancellation = cancellation.CancellationManager()
        self._asked_at: float | None = None
        self._told_at = 0.0
        lease.when_lost(self._cancellation.start_cancel)
        self._iterator: Any = _while_there(lease, lambda: _begun(dataset, lease.dispatcher))
        lease.on_beat = self._tell_if_slow

    def next(self) -> Any:
        """Returns the next batch."""
        iterator = self._iterator
        types, shapes = iterator._flat_output_types, iterator._flat_output_shapes
        self._asked_at = self._told_at = time.monotonic()
        try:
            # As `next(iterator)`, but it can be told to give up.
            flat = execute.execute_with_cancellation(
                "IteratorGetNext",
                len(types),
                [iterator._iterator_resource],
                ("output_types", types, "output_shapes", shapes),
                context.context(),
                self._cancellation,
            )
        except tf.errors.OutOfRangeError:
            raise
        except tf.errors.OpError as error:
            if _is_gone(self._lease, error):
                raise _Lost(_name(self._lease)) from None
            raise
        finally:
            self._asked_at = None
        return structure.from_compatible_tensor_list(iterator._element_spec, flat)

    def close(self) -> None:
        """Gives up."""
        self._lease.on_beat = None
        iterator, self._iterator = self._iterator, None
        if self._lease.lost:
            # TensorFlow says good-bye to who cannot answer, and may wait for that.
            held = [iterator]
            threading.Thread(target=held.clear, name="tfdist-data-service", daemon=True).start()

    def _tell_if_slow(self) -> None:
        asked_at, now = self._asked_at, time.monotonic()
        if asked_at is not None and now - self._told_at > _PATIENCE_SECONDS:
            self._told_at = now
            log.warning(
                "data service: %s has worked for %.0f s on the next batch",
                _name(self._lease),
                now - asked_at,
            )


def _begun(dataset: tf.data.Dataset, dispatcher: str) -> Any:
    """Sends a pipeline to a process, and returns an iterator over what it makes."""
    service = tf.data.experimental.service
    leaves = tf.nest.flatten(dataset.element_spec)
    # TensorFlow takes a single tensor of this kind for a compressed batch.
    is_mistaken = len(leaves) == 1 and not isinstance(leaves[0], tf.TensorSpec)
    sent = dataset.apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF,
            service=f"grpc://{dispatcher}",
            # To pack and unpack takes the processors' time, which is what is short.
            compression="AUTO" if is_mistaken else None,
        )
    )
    options = tf.data.Options()
    options.deterministic = True
    return iter(without_tuning(sent.prefetch(_READY).with_options(options)))


def _while_there(lease: Lease, call: Any) -> Any:
    """Returns what `call` does, which waits for ever for a process that is gone."""
    done = threading.Event()
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:  # noqa: BLE001  raised below
            found.append((None, error))
        done.set()

    threading.Thread(target=run, name="tfdist-data-service", daemon=True).start()
    while not done.wait(0.2):
        if lease.lost:
            raise _Lost(_name(lease))
    [(value, error)] = found
    if isinstance(error, tf.errors.OpError) and _is_gone(lease, error):
        raise _Lost(_name(lease)) from None
    if error is not None:
        raise error
    return value


def _is_gone(lease: Lease, error: tf.errors.OpError) -> bool:
    """Whether an error of TensorFlow means that the process is gone."""
    if isinstance(error, (tf.errors.CancelledError, tf.errors.UnavailableError)):
        deadline = time.monotonic() + _SAME_REASON_SECONDS
        while not lease.lost and time.monotonic() < deadline:
            time.sleep(0.01)
    return bool(lease.lost)


def _name(lease: Lease) -> str:
    why = f" ({lease.lost})" if lease.lost else ""
    return f"process {lease.pid} at {lease.address}{why}"


def _give_back(leases: list[Lease]) -> None:
    for lease in leases:
        lease.close()
