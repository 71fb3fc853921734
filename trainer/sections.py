"""Sections of a config that say where a job runs: frozen dataclasses read from YAML.

    problems = []
    job = read(JobSpec, {"project": "demo", ...}, ("vertex",), problems)

The classes belong to the rooms that use them and know nothing of YAML. `read` is as strict as the
rest of a config: each key once and known, each value of its type. All problems are collected.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import types
import typing
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Annotated
from typing import Any

import pydantic

#: Name of a section to its dataclass, imported where a config has the section.
SECTIONS: Mapping[str, str] = {
    "vertex": "tfdist.vertex.spec:JobSpec",
    "kubernetes": "tfdist.schedulers.sections:Kubernetes",
    "slurm": "tfdist.schedulers.sections:Slurm",
    "ray": "tfdist.schedulers.sections:Ray",
}

_Path = tuple[str, ...]


def kind(name: str) -> type:
    """Returns the dataclass of a section of `SECTIONS`."""
    module, _, attribute = SECTIONS[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def read(kind: type, given: Any, path: _Path, problems: list[str]) -> Any:
    """Builds a dataclass from what YAML holds.

    Args:
        kind: A dataclass, whose fields may be dataclasses too.
        given: What was read for it, a mapping if all is well.
        path: Keys that lead to it, for messages.
        problems: Receives one sentence for each mistake.

    Returns:
        The instance, or None where there were problems.
    """
    model = _model(kind)
    try:
        checked = model.model_validate(_without_nulls(given, kind))
    except pydantic.ValidationError as error:
        problems += _describe(error, kind, path)
        return None
    return _build(kind, checked)


@functools.cache
def _model(kind: type) -> type[pydantic.BaseModel]:
    """Returns a closed, strict pydantic model with the fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        fields[field.name] = (_annotation(hints[field.name]), _default(field))
    config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)
    return pydantic.create_model(kind.__name__, __config__=config, **fields)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return pydantic.Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


def _annotation(hint: Any) -> Any:
    """Returns the type that pydantic checks for a type hint of a dataclass."""
    if dataclasses.is_dataclass(hint):
        return _model(typing.cast(type, hint))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_annotation(each) for each in inner)]  # noqa: UP007
    if origin is tuple:  # YAML knows lists only.
        items: Any = list[_annotation(inner[0])]  # type: ignore[misc]
        return Annotated[items, pydantic.AfterValidator(tuple)]
    return hint


def _build(kind: Any, value: Any) -> Any:
    """Turns models, which `_model` made, into the dataclasses they were made from."""
    if isinstance(value, pydantic.BaseModel):
        hints = typing.get_type_hints(kind)
        fields = {
            name: _build(_dataclass(hints[name]), getattr(value, name))
            for name in type(value).model_fields
        }
        return kind(**fields)
    if isinstance(value, tuple):
        return tuple(_build(kind, each) for each in value)
    if isinstance(value, Mapping):
        return {key: _build(kind, each) for key, each in value.items()}
    return value


def _dataclass(hint: Any) -> Any:
    """Returns the dataclass inside a type hint, None where there is none."""
    if dataclasses.is_dataclass(hint):
        return hint
    return next(filter(None, map(_dataclass, typing.get_args(hint))), None)


def _without_nulls(given: Any, kind: Any) -> Any:
    """Leaves out keys without a value: what is below them is commented out."""
    if not isinstance(given, dict) or kind is None:
        return given
    hints = typing.get_type_hints(kind)
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return {
        key: _without_nulls(value, _dataclass(hints.get(key)))
        for key, value in given.items()
        if value is not None or key not in hints or key in required
    }


def _describe(error: pydantic.ValidationError, kind: type, path: _Path) -> list[str]:
    """Returns one sentence for each problem, each beginning with a dotted path."""
    wrong: dict[_Path, tuple[list[str], Any]] = {}
    found = []
    known = set(keys(kind))
    for detail in error.errors():
        place = tuple(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            found.append(f"{_dotted(path, place)}: unknown key ({_nearest(place, kind, path)})")
            continue
        if detail["type"] == "missing":
            found.append(f"{_dotted(path, place)}: required, but not given")
            continue
        # A union is tried type by type; pydantic names the type after the path.
        while place not in known and place[:-1] in known and _is_union(place[:-1], kind):
            place = place[:-1]
        expected = detail["msg"].removeprefix("Input should be ")
        if detail["type"] in ("model_type", "model_attributes_type"):
            expected = "a mapping of keys to values"
        if detail["type"] == "list_type":
            expected = "a list, one word in each item"
        wrong.setdefault(place, ([], detail["input"]))[0].append(expected)
    for place, (expected_ones, received) in wrong.items():
        sentence = f"expected {' or '.join(expected_ones)}, received {received!r}"
        texts = any("string" in each for each in expected_ones)
        if texts and isinstance(received, bool | int | float):
            sentence += f" (in quotes it is a text: '{received}')"
        found.append(f"{_dotted(path, place)}: {sentence}")
    return found


def _is_union(place: _Path, kind: type) -> bool:
    hint: Any = kind
    for name in place:
        hint = typing.get_type_hints(_dataclass(hint) or hint).get(name)
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _dotted(path: _Path, place: _Path) -> str:
    return ".".join((*path, *place))


def keys(kind: type, above: _Path = ()) -> Iterator[_Path]:
    """Yields the path of every key of a dataclass, those that hold others before what they hold."""
    for name, hint in typing.get_type_hints(kind).items():
        yield (*above, name)
        if below := _dataclass(hint):
            yield from keys(below, (*above, name))


def _nearest(place: _Path, kind: type, path: _Path) -> str:
    """Says which key was probably meant: one of its siblings, or one that is elsewhere."""
    holder: Any = kind
    for name in place[:-1]:
        holder = _dataclass(typing.get_type_hints(holder).get(name))
    # A class may know what people look for in it.
    hint = getattr(holder, "ELSEWHERE", {}).get(place[-1])
    if hint is not None:
        return str(hint)
    known = list(keys(kind))
    siblings = {key[-1]: key for key in known if key[:-1] == place[:-1]}
    everywhere = {key[-1]: key for key in reversed(known)}  # The first of a name stays.
    for candidates in (siblings, everywhere):
        if close := difflib.get_close_matches(place[-1], candidates, n=1, cutoff=0.6):
            return f"did you mean {_dotted(path, candidates[close[0]])}?"
    return f"known here: {', '.join(siblings)}" if siblings else "nothing can be set here"
