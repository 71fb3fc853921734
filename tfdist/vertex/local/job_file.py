"""Reads the file of a job: a config with a `vertex:` section, or a CustomJob as JSON or YAML."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import ConfigError


def load_job(path: str, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str, list[str]]:
    """Reads a job.

    Args:
        path: The file: a trainer's config, the body of a Create call as `tfdist vertex render`
            writes it, or a `CustomJobSpec` for gcloud.
        overrides: `key.path=value` texts that change a config.

    Returns:
        The CustomJob, `projects/P/locations/R` or "" where the file does not tell, and what the
        service would warn of or refuse, one sentence each.

    Raises:
        ConfigError: There is no such file, or it holds no job.
    """
    content = _parse(path)
    if "vertex" in content or "experiment" in content:
        return _from_config(path, overrides)
    if overrides:
        raise ConfigError(
            "--set only with a config that has a vertex: section",
            f"{path}, a rendered job",
            "change the file, or give the config it was rendered from",
        )
    return content, "", []


def install_packages(packages: Sequence[str], target: Path) -> str:
    """Installs distributions without their dependencies; returns the directory for `PYTHONPATH`.

    Args:
        packages: Files: source distributions or wheels.
        target: Directory that receives them.

    Raises:
        ConfigError: pip could not install them.
    """
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(target)]
    # Without isolation a source distribution needs no network; but what builds it must be here.
    for option in (["--no-build-isolation"], []):
        asked = subprocess.run(
            [sys.executable, *words, *option, *packages],
            capture_output=True,
            text=True,
            check=False,
        )
        if not asked.returncode:
            return str(target)
    last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
    raise ConfigError(
        "packages that pip can install here",
        f"{', '.join(packages)} ({last})",
        "see what this says: " + " ".join(["python", *words, *packages]),
    )


def _from_config(path: str, overrides: Sequence[str]) -> tuple[dict[str, Any], str, list[str]]:
    from tfdist.vertex.checks import JobError
    from tfdist.vertex.checks import check
    from tfdist.vertex.config import load
    from tfdist.vertex.render import body

    spec = load(path, overrides)
    try:
        notes = [str(warning) for warning in check(spec)]
    except JobError as error:
        # Here it costs nothing, and much of it (machines, regions) does not matter.
        notes = [f"the service would refuse this job: {error}"]
    return body(spec), spec.parent, notes


def _parse(path: str) -> dict[str, Any]:
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the file of a job that can be read", f"{path!r} ({error})", "check the path"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError("a job in JSON or YAML", f"{path!r}: {error}", "correct it") from error
    if not isinstance(content, dict):
        raise ConfigError(
            "a config with a vertex: section, or a CustomJob",
            f"{path!r}, which holds neither",
            "write one with: tfdist vertex render CONFIG --output FILE",
        )
    return content
