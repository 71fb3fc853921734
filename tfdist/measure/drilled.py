"""The first code in every task of a drill: sees to it that training is recorded, runs the script.

The launcher runs it as `-m tfdist.measure.drilled script.py ARGS`. The script is run as
`python script.py ARGS` would, and knows nothing of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tfdist.cluster.detect import detect
from tfdist.engine import hooks
from tfdist.launch import bootstrap
from tfdist.measure.notes import FOLDER
from tfdist.measure.notes import Notes


def main() -> None:
    """Runs the script that the arguments of the process name."""
    folder = Path(os.environ[FOLDER])
    notes = Notes(folder, str(detect().task), int(os.environ.get("TFDIST_INCARNATION", "0")))
    notes.add("start", pid=os.getpid())

    def observe() -> None:
        from tfdist.engine import training
        from tfdist.measure.recorder import Observer

        training.observers.append(Observer(folder, notes))

    # Not before the script imports Keras itself: it may set environment variables first.
    hooks.install()
    hooks.on_import("tfdist.engine.training", observe)
    if os.getcwd() == sys.path[0]:
        del sys.path[0]  # As `-m` has put it there, and a script would not.
    del sys.argv[0]
    bootstrap.run_script(sys.argv[0])


if __name__ == "__main__":
    main()
