"""What a verb writes: to standard output, or to a file that is never half written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tfdist.errors import ConfigError


def write(text: str, output: Path | None, *, force: bool) -> None:
    """Writes `text` to a new file, or to standard output.

    Args:
        text: What to write.
        output: The file; None: standard output.
        force: Whether a file that exists is replaced, as a whole once all is written.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """
    if output is None:
        sys.stdout.write(text)
        return
    # A device is written to; renaming would put a file in its place.
    replaces = force and not (output.exists() and not output.is_file())
    place = output.with_name(f".{output.name}.tmp-{os.getpid()}") if replaces else output
    try:
        with place.open("w" if force else "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                if replaces or not force:
                    place.unlink(missing_ok=True)
                raise
        if replaces:
            place.replace(output.resolve())
    except FileExistsError:
        raise ConfigError(
            "--output to be a new file", f"{output}, which exists", "pass --force to replace it"
        ) from None
    except OSError as error:
        raise ConfigError(
            "--output to be a file that can be written", f"{output} ({error.strerror})"
        ) from error
