"""Puts the engine into Keras, and takes it out again.

What is replaced, and why, is listed in `tfdist.engine.repairs`. Nothing is replaced in a version of
Keras that the engine was not tested with, and models that were not created under a strategy of ours
run Keras's own code.

    >>> tfdist.activate()
    >>> tfdist.deactivate()
"""

from __future__ import annotations

import inspect
import logging
import os

from tfdist.engine.repairs import Repair
from tfdist.engine.repairs import repairs
from tfdist.errors import UnsupportedError

log = logging.getLogger("absl")

#: Keras minor versions that the test suite passes on.
TESTED_KERAS = ("3.15",)
TESTED_TENSORFLOW = ("2.21",)
_MARK = "_tfdist_original"


def activate() -> None:
    """Installs the engine; once is enough, again does nothing.

    Raises:
        UnsupportedError: Keras is of another version or on another backend, or a function to be
            repaired is not the one that was tested.
    """
    from tfdist.engine import seeds
    from tfdist.strategies import multi_worker

    _check_versions()
    # All or nothing: a script that goes on without the engine must have Keras as it was.
    for repair in repairs():
        if not defect_is_there(repair):
            raise UnsupportedError(
                f"{_label(repair)} as in Keras {TESTED_KERAS[-1]}",
                "a function that has changed",
                "install the Keras version that tfdist was tested with: "
                f"pip install 'keras=={TESTED_KERAS[-1]}.*'",
            )
    multi_worker.guard()
    seeds.install()
    installed = []
    for repair in repairs():
        current = getattr(repair.owner, repair.name)
        if hasattr(current, _MARK):
            continue
        replacement = repair.make(current)
        setattr(replacement, _MARK, current)
        setattr(repair.owner, repair.name, replacement)
        installed.append(_label(repair))
    if installed:
        log.info(
            "tfdist engine active: %d functions of Keras and TensorFlow replaced", len(installed)
        )
        log.debug("replaced: %s", ", ".join(installed))


def deactivate() -> None:
    """Takes the engine out; Keras is as it was imported."""
    from tfdist.engine import hooks
    from tfdist.engine import role
    from tfdist.engine import seeds
    from tfdist.strategies import multi_worker

    hooks.uninstall()
    role.answer_fit_with(None)
    for repair in repairs():
        original = getattr(getattr(repair.owner, repair.name), _MARK, None)
        if original is not None:
            setattr(repair.owner, repair.name, original)
    seeds.uninstall()
    multi_worker.unguard()


def is_active() -> bool:
    """Whether the engine is in Keras now."""
    return all(hasattr(getattr(r.owner, r.name), _MARK) for r in repairs())


def defect_is_there(repair: Repair) -> bool:
    """Whether the function of Keras that `repair` replaces is still the one it was made for."""
    if repair.probe is None:
        return True
    function = getattr(repair.owner, repair.name)
    return repair.probe in inspect.getsource(inspect.unwrap(getattr(function, _MARK, function)))


def _label(repair: Repair) -> str:
    return f"{repair.owner.__name__.rpartition('.')[2]}.{repair.name}"


def _check_versions() -> None:
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        log.warning(
            "TF_USE_LEGACY_KERAS=%s makes tf.keras Keras 2, which tfdist leaves alone; "
            "unset it to train with Keras 3",
            os.environ["TF_USE_LEGACY_KERAS"],
        )
    import keras

    minor = ".".join(keras.__version__.split(".")[:2])
    if minor not in TESTED_KERAS:
        raise UnsupportedError(
            f"Keras {' or '.join(TESTED_KERAS)}, which tfdist was tested with",
            f"Keras {keras.__version__}",
            f"pip install 'keras=={TESTED_KERAS[-1]}.*'",
        )
    import tensorflow as tf
    from tensorflow.python.distribute import input_lib
    from tensorflow.python.eager.polymorphic_function.concrete_function import (
        ConcreteFunction as function,
    )

    if ".".join(tf.__version__.split(".")[:2]) not in TESTED_TENSORFLOW:
        log.warning(
            "tfdist was tested with TensorFlow %s; this is %s",
            " and ".join(TESTED_TENSORFLOW),
            tf.__version__,
        )
    if not hasattr(input_lib, "_dummy_tensor_fn") or not hasattr(function, "_call_flat"):
        raise UnsupportedError(
            f"TensorFlow {' or '.join(TESTED_TENSORFLOW)}, which tfdist was tested with",
            f"TensorFlow {tf.__version__}, whose distributed datasets and functions are others",
            f"pip install 'tensorflow=={TESTED_TENSORFLOW[-1]}.*'",
        )
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            "Keras on the TensorFlow backend",
            f"the {keras.backend.backend()} backend",
            "set KERAS_BACKEND=tensorflow before Keras is imported",
        )
