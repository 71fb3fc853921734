"""A pass that some workers have begun is ended by others in the same global batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.data.parts import Place
from tfdist.data.parts import join
from tfdist.engine.inputs import Feed
from tfdist.engine.rest_of_pass import RestOfPass

BATCH, DONE, PASS = 10, 3, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    number = 0
    for index, rows in enumerate([25, 25, 25, 26]):
        path = str(folder / f"{index}.tfrecord")
        with tf.io.TFRecordWriter(path, "GZIP") as file:
            for _ in range(rows):
                file.write(str(number).encode())
                number += 1
    return folder


def files(folder, **options):
    return tfdist.data.shard(
        str(folder / "*.tfrecord"),
        global_batch_size=BATCH,
        parse=lambda record: tf.strings.to_number(record, tf.int64),
        shuffle=True,
        seed=3,
        **options,
    )


def function(folder, **options):
    def part(context):
        rows = tf.data.Dataset.range(101)
        mine = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return mine.shuffle(20, seed=5)

    return tfdist.data.shard(part, global_batch_size=BATCH, **options)


def parts(data, workers):
    return [data.part(Place(workers, worker), 3) for worker in range(workers)]


def batches(data, workers, passes=PASS + 1):
    """Returns the global batches of a pass as those workers read them."""
    for epoch in range(passes):
        each = [[e.numpy().tolist() for e in part.iterator(epoch)] for part in parts(data, workers)]
    longest = max(map(len, each))
    return [sum((own[i] for own in each if i < len(own)), []) for i in range(longest)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (2, 1)])
@pytest.mark.parametrize("make", [files, function])
def test_other_workers_read_the_batches_that_were_left(make, before, after, folder):
    if make is files:
        assert make(folder).policy_for(before).name == "file"
    expected = batches(make(folder), before, 1)
    found = []
    for worker in range(after):
        rest = RestOfPass(parts(make(folder), before), Place(after, worker), 0, DONE)
        found.append([])
        while (each := rest.next()) is not None:
            data, rows = each
            assert (0 if data is None else len(data)) == sum(rows[worker])
            found[-1].append([] if data is None else data.numpy().tolist())
    assert [sum(each, []) for each in zip(*found, strict=True)] == expected[DONE:]
    assert sorted(sum(expected, [])) == list(range(101))


def test_a_feed_goes_on_alone_where_two_workers_were_and_says_so_in_its_position(folder):
    def feed():
        return Feed(tf.distribute.get_strategy(), files(folder))

    expected = batches(files(folder), 2)
    first = feed()
    for _ in range(PASS):
        list(first.epoch())
    next(first.epoch())
    position = json.loads(json.dumps({**first.position(), "iterator": None}))
    position |= {"policy": "file", "workers": 2, "batch": DONE}

    second = feed()
    second.restore(position)
    reading = second.epoch(done=DONE)
    [one] = [next(reading).data]
    assert one.numpy().tolist() == expected[DONE]
    # Killed once more in the same pass, it is again one of two workers.
    third = feed()
    third.restore(json.loads(json.dumps(second.position())))
    rest = third.epoch(done=DONE + 1)
    assert [batch.data.numpy().tolist() for batch in rest] == expected[DONE + 1 :]
    # Later passes are its own.
    own = [batch.data.numpy().tolist() for batch in third.epoch()]
    assert own == batches(files(folder), 1, PASS + 2)
    assert (third.position()["workers"], third.position()["policy"]) == (1, "example")


def test_batches_of_every_kind_of_tensor_are_joined():
    ragged = tf.ragged.constant([[1, 2], [3]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    batch = (tf.constant([[1], [2]]), {"ragged": ragged, "sparse": sparse})
    dense, others = join([batch, batch])
    assert np.ravel(dense).tolist() == [1, 2, 1, 2]
    assert others["ragged"].to_list() == [[1, 2], [3], [1, 2], [3]]
    assert tf.sparse.to_dense(others["sparse"]).numpy().tolist() == [[0, 1], [2, 0]] * 2
