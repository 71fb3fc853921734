"""Values of the chief for every other worker, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engine.peers import Peers

#: Bytes that travel in one message.
_PACKET = 32 * 2**20


def arrays(
    peers: Peers,
    specs: Iterable[tuple[str, tuple[int, ...], np.dtype]],
    read: Callable[[str], np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the chief's arrays on every worker; all of them iterate to the end.

    Args:
        peers: The workers; alone, arrays are read and yielded.
        specs: Name, shape and dtype of each, the same on every worker.
        read: Returns an array by its name; called on the chief alone.
    """
    if peers.group is None:
        for name, _, _ in specs:
            yield name, read(name)
        return
    packet: list[tuple[str, tuple[int, ...], np.dtype]] = []
    size = 0
    for spec in specs:
        packet.append(spec)
        size += _bytes(spec)
        if size >= _PACKET:
            yield from _packet(peers, packet, read)
            packet, size = [], 0
    yield from _packet(peers, packet, read)


def _packet(
    peers: Peers,
    specs: list[tuple[str, tuple[int, ...], np.dtype]],
    read: Callable[[str], np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    sizes = [-(-_bytes(spec) // 8) * 8 for spec in specs]
    # Whole numbers add up without loss where floats would not (-0.0, denormals, NaN).
    buffer = np.zeros(sum(sizes), np.uint8)
    if peers.is_chief:
        offset = 0
        for (name, _, _), size in zip(specs, sizes, strict=True):
            value = np.ascontiguousarray(read(name))
            buffer[offset : offset + value.nbytes] = value.reshape(-1).view(np.uint8)
            offset += size
    words = buffer.view(np.int64)
    step = _PACKET // 8
    for begin in range(0, words.size, step):
        words[begin : begin + step] = _sum(peers, words[begin : begin + step])
    offset = 0
    for (name, shape, dtype), size in zip(specs, sizes, strict=True):
        exact = _bytes((name, shape, dtype))
        yield name, buffer[offset : offset + exact].view(dtype).reshape(shape)
        offset += size


def _sum(peers: Peers, words: np.ndarray) -> np.ndarray:
    """Returns the chief's words: a sum in which all others put in zero."""
    nothing = np.zeros_like(words)

    def mine(context: Any) -> Any:
        first_here = context.replica_id_in_sync_group % len(devices) == 0
        return tf.constant(words if peers.is_chief and first_here else nothing)

    devices = peers.strategy.extended.worker_devices
    values = peers.strategy.experimental_distribute_values_from_function(mine)
    total: np.ndarray = peers.strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None).numpy()
    return total


def _bytes(spec: tuple[str, tuple[int, ...], np.dtype]) -> int:
    _, shape, dtype = spec
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
