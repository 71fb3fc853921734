"""Image classification: a small convolutional network on any image data set of tfds.

The default data set is scikit-learn's digits, made on the spot without a network
(`digits_builder`). `options: {dataset: mnist}` trains on another one, provided it has "image"
and "label" features, images all of one size, and splits "train" and "test".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import pydantic

from tfdist.errors import ConfigError
from tfdist.errors import UnsupportedError
from trainer.experiments import Data

if TYPE_CHECKING:
    import keras
    import tensorflow_datasets as tfds


class Options(pydantic.BaseModel):
    """Choices of the experiment.

    Attributes:
        dataset: Name of a tfds data set.
        data_dir: Where tfds keeps prepared data sets; None for its own choice.
        validation_examples: Training examples held out to look at after each epoch.
        filters: Filters of the first convolution; the second has twice as many.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    dataset: Annotated[str, pydantic.Field(min_length=1)] = "digits"
    data_dir: str | None = None
    validation_examples: Annotated[int, pydantic.Field(gt=0)] = 192
    filters: Annotated[int, pydantic.Field(gt=0)] = 32


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape of an image (height, width, channels) and number of classes."""

    image_shape: tuple[int, int, int]
    classes: int


def datasets(
    options: Options, *, global_batch_size: int, shuffle_buffer: int | None, seed: int
) -> Data:
    """Returns (image, label) batches: images uint8 of one shape, labels integers."""
    try:
        import tensorflow_datasets as tfds

        from trainer.experiments import digits_builder
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "the packages of the digits experiment",
            f"no module {error.name}",
            "pip install 'tfdist[experiments]'",
        ) from error
    from trainer import batches

    builder = digits_builder.prepare(options.dataset, options.data_dir)
    spec = _spec(builder)
    held_out = options.validation_examples
    examples = builder.info.splits["train"].num_examples
    if held_out >= examples:
        raise ConfigError(
            f"experiment.options.validation_examples below the {examples} training examples",
            str(held_out),
            "hold out fewer",
        )

    def read(split: str) -> Any:
        # All in memory, and in one order: every worker must see the same sequence.
        return tfds.as_numpy(
            builder.as_dataset(split=split, as_supervised=True, shuffle_files=False, batch_size=-1)
        )

    return Data(
        train=batches.batched(
            read(f"train[:-{held_out}]"),
            global_batch_size,
            shuffle=True,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        ),
        validation=batches.batched(read(f"train[-{held_out}:]"), global_batch_size),
        test=batches.batched(read("test"), global_batch_size),
        spec=spec,
    )


def build_model(options: Options, spec: Spec) -> keras.Model:
    """Returns a classifier of images with pixels in 0..255; outputs are logits."""
    import keras

    return keras.Sequential(
        [
            keras.Input(spec.image_shape, name="image"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(options.filters, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(2 * options.filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(spec.classes),
        ],
        name="digits",
    )


def compile_arguments(learning_rate: float) -> dict[str, Any]:
    """Returns Adam, cross entropy of the logits, and accuracy."""
    import keras

    return {
        "optimizer": keras.optimizers.Adam(learning_rate),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    }


def _spec(builder: tfds.core.DatasetBuilder) -> Spec:
    name = builder.info.name
    features = builder.info.features
    keys = builder.info.supervised_keys
    missing = {"train", "test"} - set(builder.info.splits)
    if keys != ("image", "label") or missing:
        raise ConfigError(
            "a data set of (image, label) pairs with splits train and test",
            f"{name} with {keys} and splits {', '.join(sorted(builder.info.splits))}",
            "choose another experiment.options.dataset",
        )
    shape = features["image"].shape
    if None in shape:
        raise ConfigError(
            "images all of one size",
            f"{name} with images of shape {shape}",
            "choose another experiment.options.dataset",
        )
    return Spec(image_shape=tuple(shape), classes=features["label"].num_classes)
