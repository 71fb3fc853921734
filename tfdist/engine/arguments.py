"""The arguments of one call of `fit`, unpacked once for every kind of loop."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from keras.src.backend import config as keras_config
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils


@dataclasses.dataclass
class FitArguments:
    """What `fit` was given; names and meanings are those of `keras.Model.fit`."""

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool | str = True
    class_weight: Any = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1

    def __post_init__(self) -> None:
        limit = keras_config.max_epochs()
        if limit and limit < self.epochs:
            warnings.warn(f"Limiting epochs to {limit}", stacklevel=4)
            self.epochs = limit

    def sources(self, make: Callable[..., Any], **options: Any) -> Sources:
        """Returns what to train on and what to validate on.

        Args:
            make: Returns a feed of `(x, y, sample_weight)` and the options of a `Feed`.
            **options: More options of the feed to train on.
        """
        x, y, weight = self.x, self.y, self.sample_weight
        held_out = self.validation_data
        if self.validation_split and held_out is None:
            (x, y, weight), held_out = array_slicing.train_validation_split(
                (x, y, weight), validation_split=self.validation_split
            )
        feed = make(
            x,
            y,
            weight,
            batch_size=self.batch_size,
            steps=self.steps_per_epoch,
            shuffle=self.shuffle,
            class_weight=self.class_weight,
            **options,
        )
        if held_out is None:
            return Sources(feed)
        val_x, val_y, val_weight = data_adapter_utils.unpack_x_y_sample_weight(held_out)
        sizes = {
            "batch_size": self.validation_batch_size or self.batch_size,
            "steps": self.validation_steps,
        }
        return Sources(
            feed,
            make(val_x, val_y, val_weight, **sizes),
            {"x": val_x, "y": val_y, "sample_weight": val_weight, **sizes},
        )


@dataclasses.dataclass(frozen=True)
class Sources:
    """The data of one call of `fit`.

    Attributes:
        feed: What is trained on.
        held_out: What is validated on, or None.
        evaluate: The same, as arguments of `model.evaluate`.
    """

    feed: Any
    held_out: Any = None
    evaluate: dict[str, Any] = dataclasses.field(default_factory=dict)
