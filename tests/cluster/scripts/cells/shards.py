"""Files that each worker reads for itself, of different lengths."""

from __future__ import annotations

from cells.data import batches
from cells.models import SGD
from cells.models import Adam
from cells.models import small_model
from cells.registry import cell
from cells.registry import fit
from cells.registry import outcome
from cells.world import OUT
from cells.world import TASK
from cells.world import WORKERS
from cells.world import np
from cells.world import tf


def shard_lines(lengths):
    return [
        [f"{w},{i},{((i * 7 + w * 3) % 11) / 11.0:.4f}" for i in range(length)]
        for w, length in enumerate(lengths)
    ]


def parse(line):
    parts = tf.strings.to_number(tf.strings.split(line, ",", maxsplit=2))
    parts = tf.ensure_shape(parts, (3,))
    x = tf.stack([parts[0] / 2.0, tf.sin(parts[1]), tf.cos(parts[1] * 0.7), parts[2]])
    return x, parts[2:] * 2.0 - 1.0


def file_shards(count, lengths, optimizer):
    """One file for each worker, of different lengths: some have no data for many steps."""
    rows = shard_lines(lengths)
    size = 12 // count
    if count != WORKERS:
        merged, sizes, step = [], [], 0
        while any(each[step * size :] for each in rows):
            part = [line for each in rows for line in each[step * size : (step + 1) * size]]
            merged, sizes, step = merged + part, [*sizes, len(part)], step + 1
        parsed = [parse(tf.constant(line)) for line in merged]
        x = np.stack([np.asarray(a) for a, _ in parsed])
        y = np.stack([np.asarray(b) for _, b in parsed])
        data = batches(sizes, x, y)
    else:
        folder = OUT / f"shards-{count}-{TASK['index']}"
        folder.mkdir(exist_ok=True)
        for w, lines in enumerate(rows):
            (folder / f"{w}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE
        )
        data = tf.data.Dataset.list_files(str(folder / "*.txt"), shuffle=False)
        data = data.interleave(tf.data.TextLineDataset, cycle_length=1).map(parse)
        data = data.batch(12).with_options(options)
    model = small_model(optimizer, loss="mse", metrics=("mae",))
    return outcome(model, fit(model, data))


@cell("shards/two_workers")
def shards_two():
    return file_shards(2, (60, 18), lambda: SGD(0.1, momentum=0.5))


@cell("shards/three_workers")
def shards_three():
    return file_shards(3, (13, 40, 21), lambda: SGD(0.1, momentum=0.5))


@cell("shards/two_workers_accumulation_clip")
def shards_two_accumulation():
    return file_shards(
        2, (60, 18), lambda: Adam(0.02, epsilon=1e-3, gradient_accumulation_steps=3, clipnorm=0.3)
    )
