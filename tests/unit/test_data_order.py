"""Which examples are in which batch: found from a few numbers, for any number of workers."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from tfdist.data import order
from tfdist.data.order import Order
from tfdist.data.policy import Facts
from tfdist.data.policy import choose
from tfdist.errors import ConfigError


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("length", [1, 7, 64, 103])
def test_every_example_is_in_one_batch_of_a_pass(length, shuffle):
    each = Order(length, 8, shuffle=shuffle, seed=1)
    for epoch in range(3):
        seen = np.concatenate([each.indices(epoch, b) for b in range(each.batches)])
        assert sorted(seen) == list(range(length))


def test_an_order_follows_from_seed_and_pass_alone():
    first, again = (Order(1000, 10, shuffle=True, seed=5) for _ in range(2))
    assert first.indices(7, 42).tolist() == again.indices(7, 42).tolist()
    assert first.indices(7, 42).tolist() != first.indices(8, 42).tolist()
    other = Order(1000, 10, shuffle=True, seed=6)
    assert first.indices(7, 42).tolist() != other.indices(7, 42).tolist()


def test_an_order_is_the_same_in_every_release():
    # A job that was saved by an earlier version goes on in the order that it had.
    assert order.permutation(8, 1, 0).tolist() == PERMUTATION
    assert order.scattered(np.arange(6), 10**9, 1, 0).tolist() == SCATTERED


PERMUTATION = [6, 2, 3, 7, 1, 4, 5, 0]
SCATTERED = [193416191, 709028193, 957907520, 153315425, 388371797, 425237122]


@pytest.mark.parametrize("count", [2, 3, 16, 17, 1000, 1 << 16, (1 << 16) + 1, 200_003])
def test_a_scattered_order_has_every_number_once(count):
    found = order.scattered(np.arange(count), count, 3, 1)
    assert np.array_equal(np.sort(found), np.arange(count))


def test_a_scattered_order_looks_like_chance():
    count = 200_003
    found = order.scattered(np.arange(count), count, 3, 1).astype(float)
    # Correlations of a random order have a standard deviation of 1 / sqrt(count) = 0.0022.
    assert abs(np.corrcoef(found, np.arange(count))[0, 1]) < 0.01
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.01
    # Of the first tenth about a tenth comes from each tenth: 2,000 with a deviation of 42.
    parts = np.bincount((found[: count // 10] * 10 // count).astype(int), minlength=10)
    assert np.abs(parts - count / 100).max() < 6 * 42


def test_a_late_batch_of_many_examples_is_found_as_fast_as_an_early_one():
    each = Order(100_000_000, 64, shuffle=True, seed=1)

    def seconds(batch):
        begin = time.perf_counter()
        each.indices(3, batch)
        return time.perf_counter() - begin

    assert min(seconds(1_000_000) for _ in range(5)) < 5 * max(seconds(10) for _ in range(5))
    assert seconds(1_500_000) < 0.05


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_the_parts_of_a_batch_lie_one_after_the_other(rows, workers, replicas):
    parts = [order.part(rows, workers, worker, replicas) for worker in range(workers)]
    counts = [count for _, each in parts for count in each]
    assert sum(counts) == rows
    assert max(counts) - min(counts) <= 1
    begins = [begin for begin, _ in parts]
    assert begins == [sum(counts[: w * replicas]) for w in range(workers)]


def test_files_are_given_out_so_that_workers_have_about_as_much():
    given = order.assign([10, 20, 3, 40, 28], 2)
    assert sorted(sum(given, [])) == [0, 1, 2, 3, 4]
    assert [sum([10, 20, 3, 40, 28][i] for i in each) for each in given] == [50, 51]


def test_shuffling_needs_a_seed():
    with pytest.raises(ConfigError, match="a seed"):
        Order(10, 2, shuffle=True)


EVEN, UNEVEN = (25, 25, 25, 25), (10, 20, 3, 0, 40, 28, 0)


@pytest.mark.parametrize(
    ("facts", "workers", "name", "reason"),
    [
        (Facts("arrays", 1003, is_indexed=True), 3, "example", "reads its own only"),
        (Facts("records", 100, True, EVEN, EVEN), 2, "example", "files are even, but"),
        (Facts("records", None, False, None, EVEN), 2, "file", "4 files of even sizes"),
        (Facts("records", 100, False, EVEN, EVEN), 4, "file", "4 files of even record counts"),
        (Facts("records", None, False, None, EVEN), 3, "example", "uneven"),
        (Facts("records", None, False, None, UNEVEN), 6, "example", "too few for 6 workers"),
        (Facts("records", None, False, None, (9,)), 2, "example", "too few for 2 workers"),
        (Facts("generator"), 2, "example", "every worker reads all of it"),
        (Facts("dataset_fn"), 2, "given", "examples of its own"),
    ],
)
def test_a_policy_says_why(facts, workers, name, reason):
    policy = choose(facts, workers)
    assert policy.name == name
    assert any(reason in each for each in policy.reasons), policy.reasons


def test_by_file_every_file_with_records_has_one_worker():
    policy = choose(Facts("records", 101, True, UNEVEN, UNEVEN), 3, "file")
    assert sorted(i for each in policy.files for i in each) == [0, 1, 2, 4, 5]
    assert sum(policy.examples) == 101
    assert min(policy.examples) > 0


def test_no_worker_is_left_without_a_file():
    with pytest.raises(ConfigError, match="5 of 7 files that are not empty"):
        choose(Facts("records", 101, True, UNEVEN, UNEVEN), 6, "file")


def test_what_is_pure_does_not_import_tensorflow():
    code = (
        "import sys, tfdist.data.order, tfdist.data.policy, tfdist.data.records, "
        "tfdist.data.world; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
