"""The all-reduce through shared memory, between real processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from multiprocessing import Pipe
from multiprocessing.connection import wait

import numpy as np
import pytest

from tests.support.harness import ROOT
from tfdist.collectives import ITEM_BYTES
from tfdist.collectives import Bucket
from tfdist.collectives import connect
from tfdist.collectives.layout import lay_out
from tfdist.errors import ConfigError

#: What every rank starts with: `rank`, `size`, `names`, `all_gather`, `join`, `expect`.
HEAD = textwrap.dedent(
    """
    import functools, gc, json, os, signal, sys, time
    from multiprocessing.connection import Connection
    import numpy as np
    from tfdist import collectives
    from tfdist.collectives import Bucket
    from tfdist.errors import TfdistError

    rank, size = int(sys.argv[1]), int(sys.argv[2])
    names = [f"worker {each}" for each in range(size)]
    hub = Connection(int(sys.argv[3]))

    def all_gather(value):
        hub.send(json.dumps(value))
        return json.loads(hub.recv())

    def check():
        if hub.poll():
            raise TfdistError("everybody to live", hub.recv())

    def join(*buckets, **options):
        options = {"check": check, "timeout_seconds": 30, **options}
        reduce, reason = collectives.connect(rank, names, all_gather, buckets, **options)
        assert reduce is not None, reason
        return reduce

    @functools.cache
    def base(bucket, rank):
        random = np.random.default_rng(rank)
        if bucket.dtype.startswith("int"):
            return [random.integers(-1000, 1000, shape).astype(bucket.dtype)
                    for shape in bucket.shapes]
        return [(random.standard_normal(shape) * 10.0 ** random.integers(-3, 4))
                .astype(bucket.dtype) for shape in bucket.shapes]

    @functools.cache
    def base_sums(bucket):
        sums = base(bucket, 0)
        for each in range(1, size):
            sums = [a + b for a, b in zip(sums, base(bucket, each))]
        return sums

    # Other seeds turn the numbers and scale them exactly, and with them their sums: for each seed
    # to draw its own would take most of the time of these tests.
    def turned(arrays, seed):
        return [np.roll(array, 7 * seed + 1) * array.dtype.type(2 ** (seed % 5))
                for array in arrays]

    def draw(seed, bucket, rank):
        return turned(base(bucket, rank), int(seed))

    def expect(seed, bucket):
        return turned(base_sums(bucket), int(seed))

    def same(got, wanted):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), (a, b)

    def done(value=None):
        print(json.dumps(value), flush=True)
    """
)


#: Seconds after which the processes of a test are killed, which fails it.
DEADLINE = 60


def run(source, size, codes=None):
    """Runs `source` in `size` processes; returns what each rank gave to `done`, last.

    Each must end with its code in `codes`, or with any if that is None; without `codes` with 0.
    """
    processes, hub = [], []
    late = threading.Timer(DEADLINE, lambda: [process.kill() for process in processes])
    late.start()
    try:
        for rank in range(size):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-c", HEAD + textwrap.dedent(source)]
                process = subprocess.Popen(
                    [*command, str(rank), str(size), str(theirs.fileno())],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
                )
            processes.append(process)
            hub.append(ours)
        threading.Thread(target=gather, args=[hub], daemon=True).start()
        outputs = [process.communicate() for process in processes]
    finally:
        late.cancel()
        for process in processes:
            process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        if codes is None or codes[rank] is not None:
            assert process.returncode == (codes[rank] if codes else 0), (rank, errors)
    return [json.loads(out.splitlines()[-1]) if out else None for out, _ in outputs]


def gather(hub):
    """Sends every rank what all of them have sent, until one has ended."""
    values = {}
    while True:
        for connection in wait(hub):
            try:
                values[connection] = json.loads(connection.recv())
            except (EOFError, OSError):
                for other in set(hub) - {connection}:
                    with contextlib.suppress(OSError):
                        other.send("a rank has ended")
                return
        if len(values) == len(hub):
            gathered = json.dumps([values.pop(each) for each in hub])
            for connection in hub:
                with contextlib.suppress(OSError):  # The next round finds out who has ended.
                    connection.send(gathered)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_those_of_numpy_in_the_order_of_ranks_bit_for_bit(size):
    source = """
    buckets = [
        Bucket("float32", ((3, 5), (), (0, 4), (1237,), (2,))),          # small
        Bucket("float64", ((3, 5), (), (1,), (100,))),
        Bucket("float32", ((100_003,), (17,), (0,), (301, 7), (1,))),    # one chunk
        Bucket("int32", ((90_001,), (3,))),
        Bucket("int64", ((90_001,), (3,))),
        Bucket("float64", ((90_001,), (3,))),
        Bucket("float32", ((1_300_001,), (999, 999), (5,))),             # several chunks
        Bucket("int64", ()),
        Bucket("float32", ((0, 3),)),
    ]
    reduce = join(*buckets)
    for step in range(3):
        for key, bucket in enumerate(buckets):
            reduce.submit(key, draw(10 * step + key, bucket, rank))
        for key, bucket in enumerate(buckets):
            same(reduce.wait(key), expect(10 * step + key, bucket))
        for key, bucket in enumerate(buckets):
            same(reduce.reduce(key, draw(step + key, bucket, rank)), expect(step + key, bucket))
    done("right")
    """
    assert run(source, size) == ["right"] * size


@pytest.mark.parametrize("size", [2, 3])
def test_two_hundred_random_steps(size):
    source = """
    layout = np.random.default_rng(1)
    buckets = []
    for _ in range(5):
        shapes = [tuple(int(n) for n in layout.integers(0, 40, layout.integers(0, 4)))
                  for _ in range(layout.integers(1, 8))]
        shapes.append((int(layout.integers(0, 40_000)),))
        buckets.append(Bucket("float32", tuple(shapes)))
    reduce = join(*buckets)
    held = []
    for step in range(200):
        order = np.random.default_rng(step).permutation(5)
        jitter = np.random.default_rng([step, rank])
        for key in order:
            reduce.submit(int(key), draw(step * 5 + key, buckets[key], rank))
            if jitter.random() < 0.05:
                time.sleep(jitter.random() * 0.003)
        for key in order:
            wanted = expect(step * 5 + key, buckets[key])
            got = reduce.wait(int(key))
            same(got, wanted)
            if jitter.random() < 0.2:          # Each rank holds other ones.
                held.append((got, wanted))
        while len(held) > 6:
            held.pop(int(jitter.integers(len(held))))
        for got, wanted in held:
            same(got, wanted)
    done("right")
    """
    assert run(source, size) == ["right"] * size


def test_a_held_result_keeps_its_value_whatever_part_of_it_is_held():
    source = """
    bucket = Bucket("float32", ((300_000,), (40, 25)))
    reduce = join(bucket)
    held = []
    for step in range(12):
        got = reduce.reduce(0, draw(step, bucket, rank))
        same(got, expect(step, bucket))
        assert not any(array.flags.writeable for array in got)
        assert all(array.ctypes.data % 64 == 0 for array in got)
        if rank == step % 2 and step < 4:
            a, b = expect(step, bucket)
            held.append([(got[0][-7:], a[-7:]), (got[1].T[::2], b.T[::2]),
                         (np.asarray(memoryview(got[1])), b)][step % 3])
        del got
        for part, wanted in held:
            assert (part == wanted).all(), step
    used = reduce._used(0)
    held.clear()
    done([used, reduce._used(0)])
    """
    ranks = run(source, 2)
    assert ranks[0][0] | ranks[1][0] == 3  # The fallback was in use.
    assert [used for _, used in ranks] == [0, 0]


def test_results_are_the_same_shared_memory_until_someone_holds_one():
    source = """
    reduce = join(Bucket("float32", ((300_000,),)))
    where = []
    for step in range(6):
        got = reduce.reduce(0, [np.ones(300_000, np.float32)])
        where.append(got[0].ctypes.data)
        if step == 2 and rank == 1:
            held = got
        del got
    done([where.index(each) for each in where])
    """
    assert run(source, 2) == [[0, 0, 0, 3, 3, 3]] * 2


@pytest.mark.parametrize("length", [10, 3_000_000])
@pytest.mark.parametrize("threaded", [False, True])
def test_the_death_of_a_peer_ends_the_wait_of_the_others(length, threaded):
    source = f"""
    reduce = join(Bucket("float32", (({length},),)), timeout_seconds=None)
    ones = [np.ones({length}, np.float32)]
    reduce.reduce(0, ones)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        if {threaded}:
            reduce.submit(0, ones)
            reduce.wait(0)
        else:
            reduce.reduce(0, ones)
    except TfdistError as error:
        again = None
        try:
            reduce.submit(0, ones)
        except TfdistError as same:
            again = same
        done([time.monotonic() - started, str(error), again is error])
    """
    results = run(source, 3, codes=[0, None, 0])
    for rank in (0, 2):
        seconds, message, again = results[rank]
        assert seconds < 2.3
        assert "a rank has ended" in message
        assert again


@pytest.mark.parametrize(
    ("options", "what", "variable"),
    [
        ({}, "the sum of gradients", "TFDIST_TIMEOUT_SECONDS"),
        (
            {"what": "rows of the next batch", "variable": "TFDIST_AGREEMENT_TIMEOUT"},
            "rows of the next batch",
            "TFDIST_AGREEMENT_TIMEOUT",
        ),
    ],
)
def test_a_peer_that_does_not_come_is_named(options, what, variable):
    source = f"""
    reduce = join(Bucket("float32", ((10,),)), timeout_seconds=0.4, **{options})
    if rank == 0:
        try:
            reduce.reduce(0, [np.ones(10, np.float32)])
        except TfdistError as error:
            done([type(error).__name__, str(error)])
    all_gather("end")
    if rank == 1:
        done()
    """
    kind, message = run(source, 2)[0]
    assert kind == "PeerLostError"
    assert message.startswith(f"Expected {what} within 0.4 s. Received: nothing from worker 1.")
    assert f"allow more time with {variable}" in message


def test_ranks_that_sum_different_buckets_learn_it():
    source = """
    reduce = join(Bucket("float32", ((10,),)), Bucket("float32", ((10,),)))
    try:
        reduce.reduce(rank, [np.ones(10, np.float32)])
    except TfdistError as error:
        done([type(error).__name__, str(error)])
    """
    for kind, message in run(source, 2):
        assert kind == "DisagreementError"
        assert "of the sum of gradients" in message and "sums bucket" in message


def test_ranks_with_different_buckets_cannot_connect():
    source = """
    try:
        join(Bucket("float32", ((10 + rank,),)), what="rows of the next batch")
    except TfdistError as error:
        done([type(error).__name__, str(error)])
    """
    for kind, message in run(source, 2):
        assert kind == "DisagreementError"
        assert "the same shapes and types in rows of the next batch" in message


def test_all_ranks_learn_that_memory_cannot_be_shared():
    source = """
    import mmap
    from tfdist.collectives import memory
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")
    reasons = []
    for module, name, sabotage in [
        (memory, "_problem", lambda: "needs Linux"),
        (memory, "_host", lambda rank: "elsewhere"),
        (os, "open", fail),
        (os, "pread", lambda *args: b"another process"),
        (os, "posix_fallocate", fail),
        (mmap, "mmap", fail),
    ]:
        keep = getattr(module, name)
        if rank == 1:
            setattr(module, name, sabotage)
        result = collectives.connect(rank, names, all_gather, [Bucket("float32", ((10,),))])
        setattr(module, name, keep)
        assert result[0] is None
        reasons.append(result[1])
    join(Bucket("float32", ((10,),)))
    done(reasons)
    """
    first, second, third = run(source, 3)
    assert first == second == third
    parts = [
        "rank 1: needs Linux",
        "different hosts",
        "rank 1: cannot attach",
        "is not rank 0",
        "rank 1: cannot attach: [Errno 28]",
        "rank 1: cannot attach: [Errno 28]",
    ]
    for reason, part in zip(first, parts, strict=True):
        assert part in reason


def test_rank_0_without_memory():
    source = """
    if rank == 0:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    done(collectives.connect(rank, names, all_gather, [Bucket("float32", ((10_000_000,),))])[1])
    """
    first, second = run(source, 2)
    assert first == second
    assert first.startswith("rank 0: cannot make ")


def test_reset_after_ranks_gave_up_at_different_points():
    source = """
    small, large = Bucket("float32", ((10,),)), Bucket("float32", ((700_000,), (5,)))
    reduce = join(small, large)
    (held,) = reduce.reduce(0, draw(1, small, rank))
    kept, _ = reduce.reduce(1, draw(2, large, rank))
    for round in range(5):
        reduce.submit(0, draw(3, small, rank))
        if rank == 0:
            reduce.submit(1, draw(4, large, rank))    # The others never do.
            reduce.submit(0, draw(5, small, rank))
        started = time.monotonic()
        reduce.reset()
        assert time.monotonic() - started < 3
        for step in range(3):
            reduce.submit(0, draw(6 + step, small, rank))
            reduce.submit(1, draw(7 + step, large, rank))
            same(reduce.wait(1), expect(7 + step, large))
            same(reduce.wait(0), expect(6 + step, small))
        same([held], expect(1, small))
        assert (kept == expect(2, large)[0]).all()
    done("right")
    """
    assert run(source, 3) == ["right"] * 3


def test_a_result_nobody_waited_for_is_replaced():
    source = """
    bucket = Bucket("float32", ((700_000,),))
    reduce = join(bucket)
    for step in range(4):
        reduce.submit(0, draw(step, bucket, rank))
    same(reduce.wait(0), expect(3, bucket))
    try:
        reduce.wait(0)
    except TfdistError as error:
        done(str(error))
    """
    for message in run(source, 2):
        assert message.startswith("Expected bucket 0 to be submitted")


def test_a_larger_layout_later_leaves_earlier_results_alone():
    source = """
    results = []
    for length in (10, 100_000, 3_000_000):
        bucket = Bucket("float64", ((length,), (7,)))
        reduce = join(bucket)
        results.append((reduce.reduce(0, draw(length, bucket, rank)), expect(length, bucket)))
        del reduce
        gc.collect()
    for got, wanted in results:
        same(got, wanted)
    done("right")
    """
    assert run(source, 2) == ["right"] * 2


def test_one_that_nobody_refers_to_is_gone_at_once_but_for_results_in_use():
    source = """
    gc.disable()

    def have():
        shared = open("/proc/self/status").read().split("RssShmem:")[1].split()[0]
        maps = open("/proc/self/maps").read().count("memfd:tfdist")
        threads = len(os.listdir("/proc/self/task"))
        return [int(shared) >> 10, maps, len(os.listdir("/proc/self/fd")), threads]

    def settle(wanted):
        deadline = time.monotonic() + 5
        while have() != wanted and time.monotonic() < deadline:
            time.sleep(0.01)           # The thread needs a moment.
        assert have() == wanted, (have(), wanted)

    bucket = Bucket("float32", ((3_000_000,), (7,)))
    before = have()
    for step in range(3):
        reduce = join(bucket)
        same(reduce.reduce(0, draw(9, bucket, rank)), expect(9, bucket))
        reduce.submit(0, draw(step, bucket, rank))
        got = reduce.wait(0)
        used = have()
        assert used[0] >= before[0] + 12 and used[3] == before[3] + 1, (before, used)
        del reduce
        settle([*used[:3], before[3]])
        same(got, expect(step, bucket))
        all_gather("looked")           # Who writes would be seen by all.
        same(got, expect(step, bucket))
        del got
        settle(before)
    done("right")
    """
    assert run(source, 2) == ["right"] * 2


def test_what_was_submitted_is_summed_although_its_rank_lets_go_of_the_rest():
    source = """
    bucket = Bucket("float32", ((700_000,),))
    reduce = join(bucket)
    if rank == 0:
        time.sleep(0.3)
    reduce.submit(0, draw(1, bucket, rank))
    if rank == 0:
        same(reduce.wait(0), expect(1, bucket))
    del reduce
    all_gather("right")
    done("memfd:tfdist" in open("/proc/self/maps").read())
    """
    assert run(source, 2)[1] is False


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_parts_of_all_owners_make_up_the_bucket(ranks, dtype):
    random = np.random.default_rng(ranks)
    shapes = tuple((int(n),) for n in random.integers(0, 300_000, 20))
    layout = lay_out([Bucket(dtype, shapes), Bucket(dtype, ((5,),))], ranks)
    plan = layout.buckets[0]
    seen = [np.zeros(shape, int) for shape in shapes]
    for chunk in range(plan.chunks):
        for owner in range(ranks):
            for piece in plan.pieces(*plan.part(chunk, owner)):
                assert piece.at == plan.starts[piece.array] + piece.start
                seen[piece.array][piece.start : piece.stop] += 1
    assert all((each == 1).all() for each in seen)
    provided = sorted(part for rank in range(ranks) for part in layout.ranges(rank))
    end = 0
    for offset, size in provided:
        assert offset - end < 4096  # Nothing but the gap up to the next page.
        end = offset + size
    assert layout.nbytes - end < 4096


@pytest.mark.parametrize(
    "arrays",
    [
        [np.zeros(3, np.float32)],
        [np.zeros(2, np.float64), np.zeros((), np.float64)],
        [np.zeros(2, np.float32)],
    ],
)
def test_arrays_that_do_not_fit_the_bucket_are_refused(arrays):
    bucket = Bucket("float32", ((2,), ()))
    reduce, reason = connect(0, ["worker 0"], lambda value: [value], [bucket])
    assert reduce is not None, reason
    with pytest.raises(ConfigError, match="in bucket 0"):
        reduce.submit(0, arrays)


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16"])
def test_unknown_types_are_refused(dtype):
    assert dtype not in ITEM_BYTES
    with pytest.raises(ConfigError, match=f"the sum of gradients to be .* {dtype}"):
        connect(0, ["a", "b"], lambda value: [value, value], [Bucket(dtype, ())])
