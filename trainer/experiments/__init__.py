"""Experiments by name: each is one module with data and a model for one real problem.

To add one, write a module that offers what `Experiment` lists and name it in `NAMES`. Its module
imports neither TensorFlow nor Keras at its top: configs are checked against its `Options` first,
so that a mistake shows at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import TYPE_CHECKING
from typing import Any
from typing import Protocol
from typing import cast

from tfdist.errors import ConfigError

if TYPE_CHECKING:
    import keras
    import pydantic

    from tfdist.data.sharded import Sharded

#: Name to module. A module is imported when its experiment is asked for.
NAMES = {
    "digits": "trainer.experiments.digits",
    "flights": "trainer.experiments.flights",
}


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of an experiment.

    Attributes:
        train: Shuffled (features, label) batches of the global size, a known number of them; one
            pass is one epoch.
        validation: Batches looked at after each epoch.
        test: Batches looked at once, when training is over.
        spec: What `build_model` has to know about the data, a type of the experiment's own.
    """

    train: Sharded
    validation: Sharded
    test: Sharded
    spec: Any


class Experiment(Protocol):
    """What a module in this package offers."""

    #: Choices of the experiment, each with a default: the `experiment.options` of a config.
    Options: type[pydantic.BaseModel]

    def datasets(
        self,
        options: Any,
        *,
        global_batch_size: int,
        shuffle_buffer: int | None,
        seed: int,
    ) -> Data:
        """Returns the data; the same on every worker, which takes its share when it trains."""

    def build_model(self, options: Any, spec: Any) -> keras.Model:
        """Returns a new model, not compiled. Called in the strategy's scope."""

    def compile_arguments(self, learning_rate: float) -> dict[str, Any]:
        """Returns optimizer, loss and metrics for `model.compile`. Called in the scope too."""


def get(name: str) -> Experiment:
    """Returns the experiment of that name.

    Raises:
        ConfigError: There is none, or a package that it needs is not installed.
    """
    if name not in NAMES:
        raise ConfigError("the name of an experiment", unknown(name), "correct experiment.name")
    return cast(Experiment, importlib.import_module(NAMES[name]))


def unknown(name: str) -> str:
    """Returns the sentence that says that `name` is no experiment and which ones there are."""
    close = difflib.get_close_matches(name, NAMES, n=1)
    nearest = f"did you mean {close[0]}? " if close else ""
    return f"no experiment {name!r} ({nearest}known: {', '.join(NAMES)})"
