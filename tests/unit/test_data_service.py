"""Batches that other processes make are the same ones, and none of these processes is needed."""

from __future__ import annotations

import itertools
import os
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import is_alive
from tfdist import data
from tfdist.data import lease
from tfdist.data import remote
from tfdist.data import service
from tfdist.data import shared
from tfdist.data import shipped
from tfdist.data.lease import Lease
from tfdist.data.order import Order
from tfdist.data.parts import Place
from tfdist.data.service import Service
from tfdist.data.service import service_of
from tfdist.data.shipped import IndexedShipment
from tfdist.data.shipped import Maps
from tfdist.engine.inputs import Feed
from tfdist.errors import ConfigError
from tfdist.errors import PeerLostError
from tfdist.errors import UnsupportedError

ROWS = 103
ORDER = {"global_batch_size": 16, "shuffle": True, "seed": 3}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def ends():
    yield
    pids = [child.process.pid for child in service._children.values()]
    remote._close_all()
    service._end_children()
    assert not any(map(is_alive, pids))


def write(folder, counts, compression=None):
    """Writes files of numbers as text, and returns a pattern of them."""
    number = 0
    for index, count in enumerate(counts):
        path = str(folder / f"{index}{compression}.tfrecord")
        with tf.io.TFRecordWriter(path, compression) as file:
            for _ in range(count):
                file.write(str(number).encode())
                number += 1
    return str(folder / f"*{compression}.tfrecord")


def parse(record):
    return tf.strings.to_number(record, tf.int64)


def pair(number):
    return 2 * number, tf.cast(number, tf.float32) / 3


def all_of_them(x, y):
    return x + tf.reduce_sum(x), y


def parts(context):
    rows = tf.data.Dataset.range(ROWS)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id)


def slow(number):
    random = tf.random.stateless_uniform([60, 60], [1, 2])
    for _ in range(5):
        random = tf.linalg.matmul(random, random) / 60
    return number + tf.cast(0 * tf.reduce_sum(random), number.dtype)


def batches(sharded, epoch, batch=0, place=None, part=None):
    part = part or sharded.part(place or Place(), 3)
    found = part.iterator(epoch, batch)
    return [tf.nest.map_structure(lambda x: x.numpy().tolist(), each) for each in found]


SOURCES = {
    "arrays": lambda folder, **o: data.shard(
        (np.arange(ROWS)), map=pair, map_batch=all_of_them, **ORDER, **o
    ),
    "in order": lambda folder, **o: data.shard(
        {"a": np.arange(ROWS), "b": np.ones([ROWS, 2])}, global_batch_size=16, **o
    ),
    "runs": lambda folder, **o: data.shard(np.arange(ROWS), **{**ORDER, "shuffle": "batch"}, **o),
    "dropped": lambda folder, **o: data.shard(
        np.arange(ROWS), map=pair, remainder="drop", **ORDER, **o
    ),
    "ragged": lambda folder, **o: data.shard(tf.ragged.range(tf.range(1, 40)), **ORDER, **o),
    "records": lambda folder, **o: data.shard(
        write(folder, [40, 0, 63]), parse=parse, map=pair, **ORDER, **o
    ),
    "by file": lambda folder, **o: data.shard(
        write(folder, [40, 50, 13]), map_batch=parse, policy="file", **ORDER, **o
    ),
    "compressed": lambda folder, **o: data.shard(
        write(folder, [40, 0, 63], "GZIP"), parse=parse, **ORDER, **o
    ),
    "dataset": lambda folder, **o: data.shard(tf.data.Dataset.range(ROWS), map=pair, **ORDER, **o),
    "function": lambda folder, **o: data.shard(parts, map=pair, **ORDER, **o),
}


#: Others differ from these in little.
SELDOM = ("dropped", "in order", "function")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SELDOM)) for k in SOURCES]
)
def test_batches_are_the_same_as_without(kind, tmp_path):
    here = SOURCES[kind](tmp_path)
    there = SOURCES[kind](tmp_path, service=2)
    assert there.why_no_service == ""
    place = Place(2, 1)
    mine, theirs = here.part(place, 3), there.part(place, 3)
    for epoch in range(2):
        expected = [
            tf.nest.map_structure(lambda x: x.numpy().tolist(), each)
            for each in mine.iterator(epoch)
        ]
        assert len(expected) > 2 or kind == "ragged"
        assert str(batches(there, epoch, part=theirs)) == str(expected)
    # In the middle of a pass.
    assert str(batches(there, 1, 2, place)) == str(expected[2:])


def test_the_order_of_many_examples_is_the_same_in_a_graph():
    order = Order(200_003, 70_000, shuffle=True, seed=5)

    class Indices:
        def in_graph(self, vectors, rows, near):
            return vectors

    shipment = IndexedShipment(Indices(), order, Place(3, 1), Maps())
    found = list(shipment.dataset(4, 1, 0, 1, True).take(3))
    begin = 23_334  # 70,000 in three parts.
    expected = [order.indices(4, 1)[begin : begin + 23_333]]
    expected += [order.indices(4, 2)[20_001:40_002], order.indices(5, 0)[begin : begin + 23_333]]
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_position_is_the_same_with_and_without(kind):
    source = np.arange(ROWS) if kind == "arrays" else tf.data.Dataset.range(ROWS)
    feeds = [
        Feed(tf.distribute.get_strategy(), data.shard(source, service=given, **ORDER))
        for given in (None, 2)
    ]

    def read(reading, steps=None):
        return [np.ravel(b.unpacked(None)).tolist() for b in itertools.islice(reading, steps)]

    for begun, other in (feeds, feeds[::-1]):
        reading = begun.epoch()
        read(reading, 3)
        position = begun.position()
        rest = read(reading)
        assert len(rest) == 4
        other.restore(position)
        assert read(other.epoch(3)) == rest


def test_a_late_batch_is_reached_as_fast_as_an_early_one():
    sharded = data.shard(np.zeros(16_000_016, np.int8), service=1, **ORDER)
    part = sharded.part(Place(), 3)

    def seconds(batch):
        begin = time.perf_counter()
        next(part.iterator(0, batch))
        return time.perf_counter() - begin

    seconds(0)
    early, late = (min(seconds(batch) for _ in range(2)) for batch in (10, 1_000_000))
    assert late < 3 * early + 0.3


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_killed_process_is_done_without_and_comes_back(kind):
    source = np.arange(803) if kind == "arrays" else tf.data.Dataset.range(803)
    sharded = data.shard(source, map=slow, service=2, **ORDER)
    expected = [batches(data.shard(source, map=slow, **ORDER), epoch) for epoch in range(3)]
    part = sharded.part(Place(), 3)
    reading = part.iterator(0)
    found = [next(reading).numpy().tolist() for _ in range(7)]
    [victim, *_] = [each.pid for each in part._stream.leases]
    os.kill(victim, signal.SIGKILL)
    found += [each.numpy().tolist() for each in reading]
    assert found == expected[0]
    assert victim not in [each.pid for each in part._stream.leases]
    assert batches(sharded, 1, part=part) == expected[1]
    if kind == "arrays":
        for given in Service(children=2).leases(all_of_them=True):
            given.close()
        assert batches(sharded, 2, part=part) == expected[2]
        assert len(part._stream.leases) == 2


@pytest.mark.slow
def test_a_process_that_is_stopped_is_done_without(monkeypatch):
    monkeypatch.setattr(lease, "SILENCE_SECONDS", 3.0)
    expected = batches(data.shard(np.arange(803), map=slow, **ORDER), 0)
    part = data.shard(np.arange(803), map=slow, service=2, **ORDER).part(Place(), 3)
    reading = part.iterator(0)
    found = [next(reading).numpy().tolist()]
    victim = part._stream.leases[0].pid
    os.kill(victim, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        found += [each.numpy().tolist() for each in reading]
        assert time.monotonic() - begin < 25
    finally:
        os.kill(victim, signal.SIGCONT)
    assert found == expected


def test_processes_that_are_gone_are_named(monkeypatch):
    monkeypatch.setenv("TFDIST_RENDEZVOUS_TIMEOUT", "1")
    sharded = data.shard(np.arange(ROWS), service="127.0.0.1:1,localhost:2", **ORDER)
    with pytest.raises(PeerLostError, match=r"127.0.0.1:1: .*refused.*; localhost:2: .*refused"):
        batches(sharded, 0)


def test_something_else_at_the_port_is_said_to_be_that():
    server = tf.data.experimental.service.DispatchServer()
    with pytest.raises((UnsupportedError, OSError)):
        Lease(server.target.rpartition("/")[2].replace("localhost", "127.0.0.1"))


def test_an_error_of_the_pipeline_is_the_users():
    def check(number):
        return tf.debugging.check_numerics(1.0 / tf.cast(number - 70, tf.float32), "is not finite")

    sharded = data.shard(np.arange(ROWS), global_batch_size=16, map=check, service=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not finite"):
        batches(sharded, 0)


def numbers():
    yield from range(ROWS)


def in_python(number):
    return tf.numpy_function(lambda x: x, [number], tf.int64)


def in_a_branch(number):
    return tf.cond(number > 3, lambda: tf.py_function(int, [number], tf.int64), lambda: number)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data.shard(list(range(ROWS)), service=2, **ORDER), "code of a sequence"),
        (lambda: data.shard(numbers, service=2, **ORDER), "code of a generator"),
        (lambda: data.shard(np.arange(ROWS), map=in_python, service=2, **ORDER), "numpy_function"),
        (lambda: data.shard(np.arange(ROWS), map=in_a_branch, service=2, **ORDER), "py_function"),
        (
            lambda: data.shard(
                tf.data.Dataset.range(ROWS).shuffle(9, seed=1), service=2, global_batch_size=16
            ),
            "pass shuffle=True",
        ),
        (
            lambda: data.shard(
                tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([])),
                service=2,
                **ORDER,
            ),
            "from_generator",
        ),
    ],
)
def test_what_only_this_process_can_do_is_done_here_and_said(make, message, capsys):
    sharded = make()
    assert message in sharded.why_no_service
    assert f"made here: {sharded.why_no_service}" in data.explain(sharded, 1)
    assert sum(len(each) for each in batches(sharded, 0)) == ROWS


def test_a_pipeline_that_cannot_be_sent_is_read_here():
    variable = tf.Variable(5, dtype=tf.int64)
    sharded = data.shard(np.arange(ROWS), map=lambda x: x + variable, service=2, **ORDER)
    seen = sum(batches(sharded, 0), [])
    assert sorted(seen) == list(range(5, ROWS + 5))


def test_the_argument_means_processes_of_the_launcher_of_ones_own_or_elsewhere():
    launched = {service.ADDRESSES: "127.0.0.1:7000,127.0.0.1:7001"}
    assert service_of(None, launched) is None
    assert service_of(False, launched) is None
    assert service_of(True, {}) == Service(children=1)
    assert service_of(3, {}) == Service(children=3)
    assert service_of(True, launched) == Service(("127.0.0.1:7000", "127.0.0.1:7001"))
    assert service_of("a:1, grpc://[::1]:2", launched) == Service(("a:1", "[::1]:2"))
    assert service_of(["a:1"], {}) == Service(("a:1",))
    for wrong in (0, -1, "a", "a:b", "a:1,a:1", 1.5, [], "", "a:0"):
        with pytest.raises(ConfigError, match=r"service=True|addresses"):
            service_of(wrong, {})


def test_explain_names_the_processes(capsys):
    text = data.explain(data.shard(np.arange(ROWS), service="a:1,b:2", **ORDER))
    assert "made by the data service: 2 processes (a:1, b:2)" in text


def test_large_arrays_are_not_sent_to_processes_of_this_host(monkeypatch):
    monkeypatch.setattr(shared, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(shipped, "_MOST_BYTES", 1 << 20)
    rows = np.random.RandomState(0).rand(ROWS, 5_000)
    elsewhere = data.shard(rows, service="other:1", **ORDER)
    assert "too large to be sent; write them to TFRecord files" in elsewhere.why_no_service
    sharded = data.shard(rows, service=2, **ORDER)
    assert batches(sharded, 0) == batches(data.shard(rows, **ORDER), 0)
    assert not sharded.why_no_service
