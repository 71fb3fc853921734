"""`fit`, as Keras's models have it: for one device, for synchronous replicas and for servers."""

from __future__ import annotations

from typing import Any

from tfdist.engine import loop
from tfdist.engine.arguments import FitArguments
from tfdist.engine.replicas import is_asynchronous
from tfdist.engine.servers import loop as server_loop


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """Trains `model`; arguments and result are those of `keras.Model.fit`.

    Every worker of a job calls it with the same arguments and gets the same `History`. Under
    parameter servers the coordinator calls it, and training is asynchronous.

    Raises:
        DisagreementError: Workers were given different arguments.
        PeerLostError: Another worker or a parameter server died, or no worker answers.
        UnsupportedError: The model asks for what workers that do not wait for each other cannot do.
    """
    model._assert_compile_called("fit")
    asked = FitArguments(
        x,
        y,
        batch_size,
        epochs,
        verbose,
        callbacks,
        validation_split,
        validation_data,
        shuffle,
        class_weight,
        sample_weight,
        initial_epoch,
        steps_per_epoch,
        validation_steps,
        validation_batch_size,
        validation_freq,
    )
    if is_asynchronous(model.distribute_strategy):
        return server_loop.fit(model, asked)
    return loop.fit(model, asked)
