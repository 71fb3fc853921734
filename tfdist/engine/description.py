"""What a training is, in facts that a record of the run can keep."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from typing import Any

from tfdist.engine import differences
from tfdist.engine import seeds

if TYPE_CHECKING:
    from tfdist.engine.training import Training


def describe(training: Training) -> dict[str, Any]:
    """Returns what the training was told and where it runs, fit for JSON.

    Args:
        training: The training; its data is not read.

    Returns:
        `topology`, `parameters`, `data` and `seeds`.
    """
    model, feed = training.model, training.feed
    data = differences.data_facts(feed)
    seed, drawn = seeds.position()
    found_seeds: dict[str, Any] = {"program": seed, "drawn": drawn}
    if training.has_position:
        # Of what cannot be told without reading, nothing is told.
        with contextlib.suppress(Exception):
            place = feed.position()
            data["fingerprint"] = place["fingerprint"]
            found_seeds["data"] = place["seed"]
    return {
        "topology": differences.topology(model, training.peers),
        "parameters": {
            "model": model.name,
            "weights": int(model.count_params()),
            "optimizer": differences.optimizer_facts(model),
            "epochs": training.epochs,
            "steps_per_epoch": feed.num_batches,
            "steps_per_execution": model.steps_per_execution,
        },
        "data": data,
        "seeds": found_seeds,
    }
