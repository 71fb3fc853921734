"""What `tfdist.data.shard` takes, what it makes of it, and what it refuses."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data import records
from tfdist.data.parts import Place
from tfdist.errors import ConfigError

ROWS = 101


def shards(source, **options):
    return data.shard(source, **{"global_batch_size": 16, **options})


def write(folder, counts, compression=None):
    """Writes files of numbers as text, and returns a pattern of them."""
    number = 0
    for index, count in enumerate(counts):
        with tf.io.TFRecordWriter(str(folder / f"{index:03d}.tfrecord"), compression) as file:
            for _ in range(count):
                file.write(str(number).encode())
                number += 1
    return str(folder / "*.tfrecord")


def parse(record):
    return tf.strings.to_number(record, tf.int64)


def numbers():
    yield from range(ROWS)


def parts(context):
    rows = tf.data.Dataset.range(ROWS)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id)


def read(sharded, workers=1, epoch=0):
    """Returns the real examples of each batch of each worker."""
    return [
        [
            np.asarray(b.data)[np.asarray(b.mask)].tolist()
            for b in sharded.batches(workers, w, epoch)
        ]
        for w in range(workers)
    ]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    "kind",
    [
        "array",
        "list",
        "files",
        "by file",
        "gzip",
        "not local",
        "dataset",
        "batched",
        "function",
        "generator",
    ],
)
def test_every_example_is_read_once(kind, workers, tmp_path):
    counts = [10, 20, 3, 0, 40, 28, 0]
    order = {"shuffle": True, "seed": 1}
    sharded = {
        "array": lambda: shards(np.arange(ROWS), **order),
        "list": lambda: shards(list(range(ROWS)), **order),
        "files": lambda: shards(write(tmp_path, counts), parse=parse, **order),
        "by file": lambda: shards(write(tmp_path, counts), parse=parse, policy="file", **order),
        "gzip": lambda: shards(write(tmp_path, counts, "GZIP"), parse=parse, **order),
        "not local": lambda: shards(f"file://{write(tmp_path, counts)}", parse=parse, **order),
        "dataset": lambda: shards(tf.data.Dataset.range(ROWS), **order),
        "batched": lambda: shards(tf.data.Dataset.range(ROWS).batch(7).prefetch(1)),
        "function": lambda: shards(parts),
        "generator": lambda: shards(numbers, map=lambda x: x),
    }[kind]()
    seen = [x for each in read(sharded, workers, epoch=1) for batch in each for x in batch]
    assert sorted(seen) == list(range(ROWS))


def test_the_mask_tells_what_is_real_and_shapes_stay_the_same():
    batches = list(shards((np.arange(5), 2 * np.arange(5)), global_batch_size=3))
    assert [batch.mask.numpy().tolist() for batch in batches] == [[True] * 3, [True, True, False]]
    assert [len(batch.data[1]) for batch in batches] == [3, 3]
    [spec, _] = shards((np.arange(5), np.arange(5)), global_batch_size=3).element_spec
    assert spec.shape == (3,)


@pytest.mark.parametrize(("remainder", "sizes"), [("partial", [2, 2, 1]), ("drop", [2, 2])])
def test_a_last_batch_that_is_not_full_stays_so_or_is_left_out(remainder, sizes):
    sharded = shards(np.arange(5), global_batch_size=2, remainder=remainder)
    assert [len(batch) for batch in sharded] == sizes
    assert sharded.num_batches == len(sizes)


def test_each_iteration_is_the_next_pass():
    sharded = shards(np.arange(ROWS), shuffle=True, seed=1, remainder="partial")
    passes = [np.concatenate(list(sharded)).tolist() for _ in range(2)]
    assert passes[0] != passes[1]
    assert passes[1] == sum(read(shards(np.arange(ROWS), shuffle=True, seed=1), epoch=1)[0], [])


def test_rows_of_other_workers_are_not_read(tmp_path):
    class Watched:
        seen: list[int] = []

        def __len__(self):
            return ROWS

        def __getitem__(self, index):
            self.seen.append(index)
            return index

    sharded = shards(Watched(), shuffle=True, seed=1)
    Watched.seen.clear()
    mine = read(sharded, 3)[1]
    Watched.seen.clear()
    list(sharded.batches(3, 1))
    assert sorted(Watched.seen) == sorted(sum(mine, []))


def test_examples_are_mapped_one_by_one_then_in_batches():
    sharded = shards(
        (np.arange(5), np.array(list("abcde"))),
        global_batch_size=2,
        remainder="partial",
        map=lambda x, text: (tf.fill([2], x), tf.strings.upper(text)),
        map_batch=lambda x, text: (x + tf.reduce_max(x), text),
    )
    x, text = list(sharded)[1]
    assert x.numpy().tolist() == [[5, 5], [6, 6]]
    assert text.numpy().tolist() == [b"C", b"D"]
    assert sharded.element_spec[0].shape == (None, 2)


def test_frames_are_matrices_or_columns():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    x, y = next(iter(shards((frame, frame["a"]), remainder="partial")))
    assert x.shape == (2, 2)
    assert y.shape == (2,)
    mixed = pd.DataFrame({"a": [1.0, 2.0], "b": ["u", "v"]})
    columns = next(iter(shards(mixed, remainder="partial")))
    assert columns["b"].numpy().tolist() == [b"u", b"v"]


def test_ragged_rows_stay_whole():
    rows = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    sharded = shards(rows, global_batch_size=2)
    padded = [batch for worker in range(2) for batch in sharded.batches(2, worker)]
    found = [batch.data[: int(sum(batch.mask.numpy()))].to_list() for batch in padded]
    assert sorted(sum(found, [])) == [[], [1], [2, 3], [4, 5, 6], [7]]


def test_an_index_of_records_is_kept_and_made_anew_for_a_changed_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(records, "_WORTH_KEEPING", 5)
    write(tmp_path, [20])
    path = str(tmp_path / "000.tfrecord")
    assert len(records.offsets(path)) == 21
    [kept] = (tmp_path / "cache" / "records").iterdir()
    assert records.Records([path]).read(np.array([7, 19, 0])) == [b"7", b"19", b"0"]
    write(tmp_path, [30])
    assert len(records.offsets(path)) == 31
    assert kept.exists()


def test_a_file_that_ends_in_a_record_is_named(tmp_path):
    write(tmp_path, [20])
    path = tmp_path / "000.tfrecord"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"000.tfrecord, whose record 19 at byte \d+ would end"):
        shards(str(path))


def test_a_tfds_split_is_read_by_record(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")

    class Squares(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = tmp_path

        def _info(self):
            features = tfds.features.FeaturesDict({"x": np.int64, "y": np.int64})
            return tfds.core.DatasetInfo(
                builder=self, features=features, supervised_keys=("x", "y")
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for x in range(50):
                yield x, {"x": x, "y": x * x}

    original = tfds.builder
    monkeypatch.setattr(tfds, "builder", lambda name: original(name, data_dir=str(tmp_path)))
    for split, rows in (("train", 50), ("train[:40%]", 20)):
        sharded = shards(f"tfds:squares/{split}", shuffle=True, seed=1, remainder="partial")
        assert sharded.num_examples == rows
        x, y = (np.concatenate(each) for each in zip(*sharded, strict=True))
        assert len(set(x.tolist())) == rows
        assert np.array_equal(x**2, y)
    with pytest.raises(ConfigError, match="a split of squares: train"):
        shards("tfds:squares/valid")


def test_a_dataset_of_weights_has_one_shape_and_gives_filling_the_weight_nothing():
    own = np.full(21, 2.0, "float32")
    assert shards((np.arange(21), np.arange(21), own)).to_dataset().cardinality() == 2
    batches = list(shards((np.arange(21), np.arange(21), own)).to_dataset())
    assert [batch[0].shape[0] for batch in batches] == [16, 16]
    weights = np.concatenate([weight for _, _, weight in batches])
    assert weights.tolist() == [2.0] * 21 + [0.0] * 11


def test_explain_counts_what_each_worker_takes(capsys):
    text = data.explain(shards(np.arange(1003), global_batch_size=64, shuffle=True, seed=1), 3)
    assert capsys.readouterr().out.strip() == text
    assert "1003 examples in 16 global batches of 64; the last holds 43" in text
    assert [f"worker {w}: {n} examples" in text for w, n in enumerate((345, 329, 329))] == [
        True
    ] * 3
    assert "from seed 1, for any number of workers" in text
    assert "worker 2: 0 examples (it reads nothing" in data.explain(shards(np.arange(2)), 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: shards(numbers()), "pass the function that makes it"),
        (lambda folder: shards(write(folder, [0, 0])), "2 files with none"),
        (lambda folder: shards(str(folder / "no*")), "which none fits"),
        (lambda folder: shards(np.arange(4), policy="file"), "a source of files"),
        (lambda folder: shards(np.arange(4), remainder="some"), "pad, partial, drop"),
        (lambda folder: shards(np.arange(4), shuffle="files"), "shuffle=True, False or 'batch'"),
        (lambda folder: shards(np.arange(4), global_batch_size=0), "at least 1"),
        (lambda folder: shards(shards(np.arange(4))), "not sharded yet"),
        (lambda folder: shards((np.arange(4), np.arange(5))), "same number of rows"),
        (lambda folder: shards([]), "length 0"),
        (lambda folder: shards(lambda: 3), "one that returns a int"),
        (lambda folder: shards(numbers, shuffle="batch"), "a source of the kind 'generator'"),
        (lambda folder: shards(np.arange(4), parse=parse), "pass the function as map="),
        (lambda folder: shards(42), "Received: int"),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_fix(make, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_batches_are_taken_apart_and_pieces_of_a_fixed_size_are_not():
    numbers = tf.data.Dataset.range(30)
    batched = shards(numbers.batch(7).prefetch(1))
    assert batched.num_examples == 30
    assert any("taken apart" in reason for reason in batched.reasons)
    pieces = shards(numbers.batch(5, drop_remainder=True).map(lambda x: x), remainder="partial")
    assert [batch.shape for batch in pieces] == [(6, 5)]
    assert any("single examples" in reason for reason in pieces.reasons)


def test_a_dataset_function_that_ignores_its_worker_is_refused():
    sharded = shards(lambda context: tf.data.Dataset.range(ROWS))
    assert read(sharded) == read(shards(tf.data.Dataset.range(ROWS)))
    with pytest.raises(ConfigError, match="did not ask which of 2 workers"):
        sharded.part(Place(2, 1), 0)


def test_a_late_batch_is_reached_as_fast_as_an_early_one():
    part = shards(np.zeros(16_000_016, np.int8), shuffle=True, seed=1).part(Place(), 1)

    def seconds(batch):
        begin = time.perf_counter()
        next(part.iterator(0, batch))
        return time.perf_counter() - begin

    seconds(0)
    early, late = (min(seconds(batch) for _ in range(3)) for batch in (10, 1_000_000))
    assert late < 3 * early + 0.05
