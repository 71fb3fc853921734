"""Documents in YAML or JSON, in files or by value, read without surprises.

A key may be written once, `1e-3` is a number, and a mistake is told with its line and column.
"""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from typing import Any

import yaml

from tfdist.errors import ConfigError


def read(path: str) -> Any:
    """Returns the content of a file, or of a text that begins with "{" and is the document itself.

    Raises:
        ConfigError: There is no such file, or it is not a valid document.
    """
    return _value(path) if is_value(path) else parse(_text(path), path)


def is_value(path: str) -> bool:
    """Whether a path is no path but a document."""
    return path.lstrip().startswith("{")


def named(path: str) -> str:
    """Returns what messages call a document."""
    return "the value of --config" if is_value(path) else path


def _value(text: str) -> Any:
    try:
        # JSON first: PyYAML reads some of its escapes otherwise.
        return json.loads(text, object_pairs_hook=_once)
    except ValueError:
        return parse(text, named(text))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")  # Which, and where, says the reader of YAML.
    return dict(pairs)


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = pathlib.Path(path).parent
        beside = sorted(str(file) for file in folder.glob("*.yaml"))
        close = difflib.get_close_matches(path, beside, n=1, cutoff=0.0)
        fix = f"did you mean {close[0]}" if close else "check --config and the working directory"
        raise ConfigError("a config file", f"{path}, which does not exist", fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "a config file that can be read", f"{path}: {error}", "check --config"
        ) from error


def parse(text: str, source: str) -> Any:
    """Returns the content of one YAML document.

    Raises:
        ConfigError: It is not valid YAML; `source` is what the message calls it.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # _Loader derives from SafeLoader.
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(
            "valid YAML", f"{source}{position}: {what}", "correct that line"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError("valid YAML", f"{source}: {error}", "save it as UTF-8 text") from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key may be written once, and `1e-3` is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                continue
            key = self.construct_object(key_node)
            if key in seen:
                # YAML forbids it and PyYAML lets the last one win, so half of an edit gets lost.
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {key!r} given twice, first in line {seen[key]}",
                    key_node.start_mark,
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


# PyYAML follows YAML 1.1, where 1e-3 without a dot is a string; YAML 1.2 and everyone who sets a
# learning rate take it for a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)
