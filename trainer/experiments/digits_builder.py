"""The `tensorflow_datasets` builder of scikit-learn's handwritten digits, without a download.

Importing this module makes `tfds.builder("digits")` work. `prepare` makes any tfds data set safe
to ask for from several processes of one machine at the same moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import Any
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from tfdist.errors import ConfigError

#: 1536 = 3 * 512 training examples divide evenly among 2, 3, 4, 6 or 8 workers in the usual
#: batches. The other 261 of the 1797 test.
TRAIN_EXAMPLES = 1536


class Digits(tfds.core.GeneratorBasedBuilder):
    """1797 images of handwritten digits, 8x8 pixels, from scikit-learn."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Handwritten digits of 43 people, 8x8 pixels, from scikit-learn.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://scikit-learn.org/stable/datasets/toy_dataset.html",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager  # scikit-learn carries the data.
        import sklearn.datasets

        digits = sklearn.datasets.load_digits()
        # Ink comes as 0..16; an image has 0..255.
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
        train, test = _stratified(digits.target)
        return {
            "train": self._generate_examples(images, digits.target, train),
            "test": self._generate_examples(images, digits.target, test),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray, indices: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in indices.tolist():
            yield index, {"image": images[index], "label": int(labels[index])}


def _stratified(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of training and test examples, each class in proportion.

    Evenly spaced positions in the order of the labels give each class its share, within one
    example, with no random numbers.
    """
    by_label = np.argsort(labels, kind="stable")
    tests = len(labels) - TRAIN_EXAMPLES
    is_test = np.zeros(len(labels), bool)
    is_test[np.arange(tests) * len(labels) // tests] = True
    return np.sort(by_label[~is_test]), np.sort(by_label[is_test])


def prepare(name: str, data_dir: str | None = None) -> tfds.core.DatasetBuilder:
    """Returns the builder of a tfds data set whose data is on disk, making it if it is not.

    Processes that ask for the same one wait for the first. tfds writes aside and renames, so a
    process that dies in the middle leaves nothing that the next one could take for the data.

    Args:
        name: A tfds name such as "digits" or "mnist".
        data_dir: Where data sets are kept; None for tfds's own choice (`TFDS_DATA_DIR`, else
            `~/tensorflow_datasets`). A remote directory must hold the data already.

    Raises:
        ConfigError: tfds knows no such data set, or a remote directory does not hold it.
    """
    tfds.disable_progress_bar()
    folder = (
        data_dir or os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
    )
    with _lock(folder, name):
        # Built inside the lock: a builder reads what is on disk when it is made.
        try:
            builder = tfds.builder(name, data_dir=folder)
        except tfds.core.DatasetNotFoundError as error:
            raise ConfigError(
                "a data set that tensorflow_datasets knows",
                repr(name),
                "correct experiment.options.dataset; the names are at "
                "https://www.tensorflow.org/datasets/catalog",
            ) from error
        if "://" in folder and not builder.data_path.exists():
            raise ConfigError(
                f"data set {name} prepared in {folder}",
                "no data there",
                "prepare it once from one machine, since remote directories cannot be locked",
            )
        builder.download_and_prepare()
    return builder


@contextlib.contextmanager
def _lock(folder: str, name: str) -> Iterator[None]:
    """Holds a lock that the kernel releases even when this process is killed."""
    if "://" in folder:
        yield
        return
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with (path / f".{name.replace('/', '-').replace(':', '-')}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
