"""The config of a training run: one YAML file, checked in full before anything starts.

    experiment:
      name: digits                # a name of `trainer.experiments`
      options: {filters: 32}      # the experiment's own `Options`
    data:
      global_batch_size: 64
    training:
      epochs: 3

`load("configs/digits-single.yaml", ["training.epochs=1"])` returns a frozen `Config`. Every
mistake is a `ConfigError` that names the dotted path: unknown keys with the nearest known one,
wrong types with the value and the type that was expected, bad YAML with its line and column.
All mistakes of a file are shown at once.

Sections such as `vertex:` say where the run takes place; training itself does not look at them.
Containers and machines elsewhere get the rest by value, as one argument (`as_argument`).
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Annotated
from typing import Any
from typing import Literal

import pydantic

from tfdist.errors import ConfigError
from trainer import documents
from trainer import experiments
from trainer import sections

#: A count: a whole number of at least 1.
Count = Annotated[int, pydantic.Field(gt=0)]


class Section(pydantic.BaseModel):
    """Base of every part of a config: frozen, strict about types, closed to unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class ExperimentConfig(Section):
    """Which experiment to run.

    Attributes:
        name: A name of `trainer.experiments.NAMES`.
        options: What the experiment itself lets one choose: an instance of its `Options`.
    """

    name: str
    options: Annotated[Any, pydantic.SkipValidation] = pydantic.Field(default_factory=dict)


class StrategyConfig(Section):
    """How to distribute, passed to `tfdist.strategy`.

    Attributes:
        name: A strategy of tfdist, or None to let tfdist choose from the cluster.
        replicas: Replicas in this process where they are not given by accelerators, or None.
    """

    name: str | None = None
    replicas: Count | None = None


class DataConfig(Section):
    """How examples become batches.

    Attributes:
        global_batch_size: Examples per step over all replicas of all workers.
        shuffle_buffer: Examples among which the next one is drawn, or None for the whole set.
    """

    global_batch_size: Count = 64
    shuffle_buffer: Count | None = None


class TrainingConfig(Section):
    """How long and how to train.

    Attributes:
        epochs: Epochs to train.
        steps_per_epoch: Steps in an epoch; the next one reads on. None: an epoch is all data.
        learning_rate: Step size of the optimizer, as given: it is not scaled by replicas.
        seed: Seed of initial weights and of the order of examples.
        steps_per_execution: Steps that one call of the compiled function runs.
        verbose: Progress on the console as in Keras: 0 none, 1 a bar, 2 a line per epoch.
    """

    epochs: Count = 1
    steps_per_epoch: Count | None = None
    learning_rate: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] = 0.001
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    steps_per_execution: Count = 1
    verbose: Literal[0, 1, 2] = 2


class OutputConfig(Section):
    """What is written, and where. Flags and `AIP_*` variables go before these directories.

    Attributes:
        directory: Parent of those below that are not given; None: `runs/<experiment name>`.
        model_dir: Receives `model.keras` and `metrics.json`; None: `<directory>/model`.
        checkpoint_dir: Receives checkpoints; None: `<directory>/checkpoints`.
        log_dir: Receives `history.csv` and TensorBoard events; None: `<directory>/logs`.
        checkpoint: Which epochs' models stay: the last one, the one of the lowest validation
            loss, all, or none.
        tensorboard: Whether to write TensorBoard events.
        backup: How often all is saved to `backup` in the checkpoint directory, from where the same
            command goes on after an interruption: "epoch", steps, or seconds as "60s"; "none".
    """

    directory: str | None = None
    model_dir: str | None = None
    checkpoint_dir: str | None = None
    log_dir: str | None = None
    checkpoint: Literal["last", "best", "all", "none"] = "last"
    tensorboard: bool = True
    backup: Count | str = "epoch"


class Config(Section):
    """All of a training run.

    Attributes:
        vertex: A `tfdist.vertex.JobSpec`, what the file does not say at its default.
        kubernetes: What `tfdist.schedulers` has to know, and so on.
    """

    experiment: ExperimentConfig
    strategy: StrategyConfig = StrategyConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    output: OutputConfig = OutputConfig()
    vertex: Annotated[Any, pydantic.SkipValidation] = None
    kubernetes: Annotated[Any, pydantic.SkipValidation] = None
    slurm: Annotated[Any, pydantic.SkipValidation] = None
    ray: Annotated[Any, pydantic.SkipValidation] = None


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a config.

    Args:
        path: The YAML file, or the config itself where it begins with "{".
        overrides: `key.path=value` texts, the value in YAML; later ones win.

    Returns:
        The config, with `experiment.options` an instance of the experiment's `Options` and each
        section of `trainer.sections` an instance of its class.

    Raises:
        ConfigError: The file cannot be read or is not a valid config; every problem is listed.
    """
    source = " ".join([documents.named(path), *(f"--set {override}" for override in overrides)])
    return check(read(path, overrides), source)


def as_argument(path: str, overrides: Sequence[str] = ()) -> str:
    """Returns a config by value, for `--config` where there is no such file.

    Args:
        path: As in `load`.
        overrides: As in `load`; they are contained.

    Returns:
        One line of JSON without the sections that say where to run. It has no "$": schedulers
        replace `$(NAME)` in arguments.

    Raises:
        ConfigError: It cannot be read.
    """
    content = read(path, overrides)
    kept = {key: value for key, value in content.items() if key not in sections.SECTIONS}
    return json.dumps(kept, ensure_ascii=False, default=str).replace("$", "\\u0024")


def read(path: str, overrides: Sequence[str] = ()) -> dict[Any, Any]:
    """Returns what a config says, overrides applied, for `check`.

    Raises:
        ConfigError: It cannot be read.
    """
    name = documents.named(path)
    content = documents.read(path)
    if content is None:
        raise ConfigError(f"a config in {name}", "an empty file", "start from a file in configs/")
    if not isinstance(content, dict):
        raise ConfigError(
            f"sections such as 'experiment:' at the top of {name}",
            repr(content),
            "start from a file in configs/",
        )
    for override in overrides:
        _apply(override, content)
    return content


def check(content: dict[Any, Any], source: str) -> Config:
    """Returns the config that `content` is, as `load` does.

    Raises:
        ConfigError: It is not valid; every problem is listed. `source` is what it is called.
    """
    problems: list[str] = []
    # A section whose keys are all commented out reads as null.
    content = {
        key: value
        for key, value in content.items()
        if value is not None or key not in Config.model_fields
    }
    for name in sections.SECTIONS:
        if name in content:
            kind = sections.kind(name)
            content[name] = sections.read(kind, content[name], (name,), problems)
    experiment = content.get("experiment")
    if isinstance(experiment, dict) and isinstance(experiment.get("name"), str):
        # The type of the options is known only once the experiment is.
        name = experiment["name"]
        if name in experiments.NAMES:
            given = experiment.get("options")
            given = {} if given is None else given  # As with sections.
            options_type = experiments.get(name).Options
            try:
                options = options_type.model_validate(given)
            except pydantic.ValidationError as error:
                options = options_type()
                problems += _describe(error, options_type, ("experiment", "options"))
            content = {**content, "experiment": {**experiment, "options": options}}
        else:
            problems.append(f"experiment.name: {experiments.unknown(name)}")
    config = None
    try:
        config = Config.model_validate(content)
    except pydantic.ValidationError as error:
        problems = _describe(error, Config) + problems
    if problems or config is None:
        raise ConfigError(
            f"a valid config in {source}",
            "; ".join(problems),
            "correct the file, or the --set that says it",
        )
    return config


def _describe(
    error: pydantic.ValidationError,
    model: type[pydantic.BaseModel],
    prefix: tuple[str, ...] = (),
) -> list[str]:
    """Returns one sentence for each problem, each beginning with a dotted path."""
    return [_problem(dict(detail), model, prefix) for detail in error.errors()]


def _problem(
    detail: dict[str, Any], model: type[pydantic.BaseModel], prefix: tuple[str, ...]
) -> str:
    location = tuple(str(part) for part in detail["loc"])
    path = ".".join(prefix + location)
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return f"{path}: unknown key ({_nearest(location, model, prefix)})"
    if detail["type"] == "missing":
        return f"{path}: required, but not given"
    expected = detail["msg"].removeprefix("Input should be ")
    if detail["type"] == "model_type":
        expected = "a mapping of keys to values"
    return f"{path}: expected {expected}, received {detail['input']!r}"


def _nearest(
    location: tuple[str, ...], model: type[pydantic.BaseModel], prefix: tuple[str, ...]
) -> str:
    """Says which key was probably meant: first among the siblings, then anywhere."""
    known = list(_paths(model))
    parent, last = location[:-1], location[-1]
    siblings = {path[-1]: path for path in known if path[:-1] == parent}
    everywhere = {path[-1]: path for path in known}
    for candidates in (siblings, everywhere):
        if close := difflib.get_close_matches(last, candidates, n=1, cutoff=0.6):
            return f"did you mean {'.'.join(prefix + candidates[close[0]])}?"
    return f"known here: {', '.join(siblings)}" if siblings else "nothing can be set here"


def _paths(model: type[pydantic.BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yields the path of every key of `model`, sections before what they hold."""
    for name, field in model.model_fields.items():
        yield (name,)
        for kind in _types(field.annotation):
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                yield from ((name, *below) for below in _paths(kind))


def _types(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _apply(override: str, content: dict[Any, Any]) -> None:
    """Sets one `key.path=value` in `content`."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            "--set key.path=value", repr(override), "write for example --set training.epochs=3"
        )
    section: dict[Any, Any] = content
    for key in keys[:-1]:
        below = section.get(key)
        # What is not a mapping is replaced, and the check of the whole then refuses the path.
        section[key] = dict(below) if isinstance(below, Mapping) else {}
        section = section[key]
    section[keys[-1]] = documents.parse(text, f"--set {override}")
