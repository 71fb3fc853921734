"""How long a run takes to go on from step 1,000,000, against step 10.

    python benchmarks/restore.py [--json] [--rounds 5]

Each source is trained on by `fit` with `BackupAndRestore` for some steps, which leaves a commit of
step 10. A second directory gets the same commit with the position of step 1,000,000. Then `fit`
goes on from the one and from the other, in turns, and from nothing. Timed is from the call of `fit`
to the first batch that is trained on; printed are medians. A restore in O(1) has the same time in
both columns, whatever lies before the place.

| source | step 1,000,000 is |
|---|---|
| sequence | in the middle of a pass over 64 million examples, made when they are asked for |
| arrays | in the middle of a pass over 2 million rows, in batches of one |
| files | in the middle of a pass over 2 million records of 4 local TFRecord files, one a batch |
| epochs | at the end of pass 125,000 over 64 rows: a commit holds the history of all of them |
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
STEP = 1_000_000
ROWS = 2 * STEP


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="restores from each place (5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TFDIST_CACHE"] = str(folder / "cache")
        write_records(folder)
        found = {
            kind: measure(kind, folder, options.rounds)
            for kind in ("sequence", "arrays", "files", "epochs")
        }
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{'source':10} {'anew':>9} {'step 10':>9} {'step 1e6':>9}  1e6 / 10  (ms)")
    for kind, times in found.items():
        new, early, late = (1000 * times[key] for key in ("anew", "early", "late"))
        print(f"{kind:10} {new:9.0f} {early:9.0f} {late:9.0f} {late / early:9.2f}")
    return 0


def measure(kind: str, folder: Path, rounds: int) -> dict[str, float]:
    """Returns the median seconds until the first batch: from nothing, step 10 and step 1e6."""
    early, late = folder / f"{kind}-early", folder / f"{kind}-late"
    train(kind, folder, early, batches=12)
    move(kind, early, late)
    times: dict[str, list[float]] = {"anew": [], "early": [], "late": []}
    for number in range(rounds + 1):
        fresh = folder / f"{kind}-fresh-{number}"
        for key, directory in (("anew", fresh), ("early", early), ("late", late)):
            seconds, where = train(kind, folder, directory, batches=1)
            expected = {"anew": 0, "early": 10, "late": STEP}[key]
            assert where == expected, f"{kind} went on at step {where} instead of {expected}"
            if number:  # The first round warms up.
                times[key].append(seconds)
    return {key: statistics.median(each) for key, each in times.items()}


def train(kind: str, folder: Path, directory: Path, batches: int) -> tuple[float, int]:
    """Calls `fit` until a number of batches are done, and breaks it off.

    Returns:
        Seconds until the first batch, and the step that it went on from.
    """
    import keras

    import tfdist

    tfdist.activate()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
    data, options = source(kind, folder)
    began = time.perf_counter()
    first: list[Any] = []

    class Ends(keras.callbacks.Callback):
        done = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not first:
                training = tfdist.engine.training.of(self.model)
                first.extend([time.perf_counter() - began, training.step])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            Ends.done += 1
            if Ends.done == batches:
                raise KeyboardInterrupt

    every = 10 if batches > 10 else 10**9
    backup = tfdist.callbacks.BackupAndRestore(directory, save_every=every, asynchronous=False)
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(*data, epochs=10**6, verbose=0, callbacks=[backup, Ends()], **options)
    return first[0], first[1]


class Rows:
    """64 million examples, none of which is kept."""

    def __len__(self) -> int:
        return 64 * STEP

    def __getitem__(self, row: int) -> Any:
        import numpy as np

        return np.full(4, row % 7, np.float32), np.ones(1, np.float32)


def source(kind: str, folder: Path) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what `fit` is given."""
    import numpy as np
    import tensorflow as tf

    import tfdist

    if kind == "sequence":
        data = tfdist.data.shard(Rows(), global_batch_size=32, shuffle=True, seed=1)
        return (data,), {}
    if kind == "files":

        def parse(record: Any) -> Any:
            x = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [4])
            return x, x[:1]

        pattern = str(folder / "*.tfrecord")
        data = tfdist.data.shard(
            pattern, global_batch_size=1, shuffle=True, seed=1, parse=parse, policy="example"
        )
        return (data,), {}
    rows, batch = (ROWS, 1) if kind == "arrays" else (64, 8)
    x = np.ones((rows, 4), np.float32)
    return (x, x[:, :1]), {"batch_size": batch}


def move(kind: str, early: Path, late: Path) -> None:
    """Writes the commit of `early` to `late`, as if it had been made at step 1,000,000."""
    from tfdist.state.commit import Snapshot
    from tfdist.state.store import Store

    found = Store(early).read_latest()
    assert found is not None and found[0].step == 10
    facts = copy.deepcopy(dict(found[1].facts))
    data = facts["workers"][0]["data"]
    facts["step"] = STEP
    if kind == "epochs":
        passes, batch = divmod(STEP, 8)
        if not batch:
            passes, batch = passes - 1, 8
        facts |= {"epoch": passes, "batch": batch}
        data |= {"epoch": passes + 1, "batch": batch}
        told = facts["history"]
        told["epoch"] = list(range(passes))
        told["history"] = {"loss": [0.123456789 + e * 1e-7 for e in range(passes)]}
    else:
        facts["batch"] = data["batch"] = STEP
    Store(late).write(Snapshot(STEP, facts, found[1].arrays))


def write_records(folder: Path) -> None:
    """Writes 2 million records of 16 bytes to 4 files, with TensorFlow's checksums left zero."""
    record = struct.pack("<Q", 16) + bytes(4) + struct.pack("<4f", 1, 2, 3, 4) + bytes(4)
    for number in range(4):
        (folder / f"{number}.tfrecord").write_bytes(record * (ROWS // 4))


if __name__ == "__main__":
    raise SystemExit(main())
