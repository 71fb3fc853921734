"""Trains once, as one device or as a task of a cluster, and writes down what came out.

Run by `assert_matches_single_device` as `python -m tfdist.testing.program FOLDER WORLD`; WORLD is
"single", "workers" or "replicas:N". What to train is in FOLDER.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from tfdist import tuning
from tfdist.cluster.detect import detect
from tfdist.testing import records

JOB, FUNCTIONS, INITIAL = "job.json", "functions.pkl", "initial.npz"


def main(folder: Path, world: str) -> None:
    """Runs the training described in `folder`.

    Args:
        folder: Holds the job; results go into a folder of each task below it.
        world: "single", "workers" or "replicas:N".
    """
    tuning.tune()  # As `tfdist run` does: other kernels of TensorFlow round in other places.
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    sys.path.extend(path for path in job["sys_path"] if path not in sys.path)
    strategy = _strategy(world)
    index = detect(os.environ).task.index
    out = folder / world.partition(":")[0] / str(index)
    out.mkdir(parents=True, exist_ok=True)
    try:
        _train(folder, out, strategy, job, writes_steps=index == 0)
    except Exception:
        # The launcher's output is cut to its last lines; the first error is what matters.
        (out / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        raise


def _strategy(world: str) -> Any:
    if world == "single":  # Plain Keras, without the engine.
        return None
    import tfdist

    kind, _, count = world.partition(":")
    if kind == "replicas":
        return tfdist.strategy("mirrored", replicas=int(count))
    return tfdist.strategy()


def _train(folder: Path, out: Path, strategy: Any, job: dict[str, Any], writes_steps: bool) -> None:
    import keras
    import tensorflow as tf

    strategy = strategy or tf.distribute.get_strategy()
    # Initial values, the order of arrays and seedless shuffles are those of one device with it.
    keras.utils.set_random_seed(job["seed"])
    call = pickle.loads((folder / FUNCTIONS).read_bytes())  # noqa: S301  the parent wrote it
    with strategy.scope():
        model = call["model_fn"]()
    if not isinstance(model, keras.Model) or not model.compiled:
        raise TypeError(f"Expected model_fn to return a compiled Keras model. Received: {model!r}")
    data = call["dataset_fn"]()
    arguments = {"verbose": 0, **call["fit_arguments"]}
    steps = records.Steps(out / "steps", job["budget"], job["after"], job["until"])
    recorder = _recorder(keras)(folder / INITIAL, steps, writes_steps)
    callbacks = [recorder, *(arguments.pop("callbacks", None) or [])]
    if isinstance(data, tuple):
        x, y, weight = (*data, None, None)[:3]
        arguments.update(x=x, y=y, sample_weight=weight)
    else:
        if isinstance(data, tf.data.Dataset) and arguments.get("steps_per_epoch") is None:
            data = _of_known_length(data, call["dataset_fn"])
        arguments.update(x=data)
    history = model.fit(callbacks=callbacks, **arguments)
    records.save(out / "final.npz", values_of(model))
    facts = {
        "history": {k: np.asarray(v, np.float64).tolist() for k, v in history.history.items()},
        "steps": recorder.done,
        "replicas": strategy.num_replicas_in_sync,
        "random": [_label(layer) for layer in _layers(model) if _draws(keras, layer)],
        "statistics": [
            _label(layer)
            for layer in _layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
        ],
    }
    (out / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def values_of(model: Any) -> dict[str, Any]:
    """Returns the variables of a model and its optimizer by name; without random states."""
    variables = [*model.weights]
    if model.optimizer is not None:
        variables += model.optimizer.variables
    found: dict[str, Any] = {}
    for variable in variables:
        if "seed_generator" in variable.path:
            continue
        value = variable.value.numpy()
        name = variable.path if variable.path not in found else f"{variable.path} ({len(found)})"
        found[name] = value.astype("float32") if value.dtype.name == "bfloat16" else value
    return found


def _recorder(keras: Any) -> Any:
    class Recorder(keras.callbacks.Callback):  # type: ignore[misc]
        """Starts from the weights of one device, and writes down variables after steps."""

        def __init__(self, initial: Path, steps: records.Steps, writes: bool):
            super().__init__()
            self._initial = initial
            self._steps = steps
            self._writes = writes
            self._epoch_began_at = 0
            self.done = 0

        def on_train_begin(self, logs: Any = None) -> None:
            weights = [w for w in self.model.weights if "seed_generator" not in w.path]
            if not self._initial.exists():
                records.save(self._initial, {str(i): w.value for i, w in enumerate(weights)})
                return
            values = list(records.load(self._initial).values())
            if [value.shape for value in values] != [tuple(w.shape) for w in weights]:
                raise ValueError(
                    "Expected model_fn to build the same model every time. Received: weights of "
                    "other shapes than on one device."
                )
            with self.model.distribute_strategy.scope():
                for weight, value in zip(weights, values, strict=True):
                    weight.assign(value)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch_began_at = self.done

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.done = self._epoch_began_at + int(batch) + 1
            if self._steps.wants(self.done):
                # All workers read: a variable may have to be summed over them.
                values = values_of(self.model)
                if self._writes:
                    self._steps.add(self.done, values)

    return Recorder


def _of_known_length(data: Any, dataset_fn: Any) -> Any:
    """Returns the dataset with its number of batches.

    Keras alone counts a step too many for every epoch of data of unknown length, in
    `optimizer.iterations`: one device would be wrong then.
    """
    import tensorflow as tf

    if int(data.cardinality()) != tf.data.UNKNOWN_CARDINALITY:
        return data
    # A dataset of its own: reading one changes the order in which it shuffles next.
    length = sum(1 for _ in dataset_fn())
    return data.apply(tf.data.experimental.assert_cardinality(length))


def _layers(model: Any) -> list[Any]:
    found = []
    for layer in getattr(model, "layers", ()):
        found += [layer, *_layers(layer)]
    return found


def _label(layer: Any) -> str:
    return str(layer.path or layer.name)  # A layer without variables may have no path.


def _draws(keras: Any, layer: Any) -> bool:
    return any(
        isinstance(value, keras.random.SeedGenerator) for value in list(vars(layer).values())
    ) and not isinstance(layer, keras.Model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
