"""Documents for Kubernetes as text that no reader of YAML takes for anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

FORMATS = ("yaml", "json")


def text(documents: Sequence[dict[str, Any]], form: str = "yaml") -> str:
    """Returns documents as one file that `kubectl apply` takes.

    Args:
        documents: From `tfdist.schedulers.kubernetes.render`.
        form: "yaml" or "json".
    """
    if form == "json":
        whole: Any = documents[0]
        if len(documents) > 1:
            whole = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
    written = [
        yaml.dump(
            document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000, indent=2
        )
        for document in documents
    ]
    return "# Written by: tfdist render --for kubernetes\n" + "---\n".join(written)


class _Dumper(yaml.SafeDumper):
    """YAML in which texts cannot be taken for anything else, by YAML 1.1 or 1.2."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9/_.-]*")
_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf")


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    style = None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)
