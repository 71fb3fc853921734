"""What a job does, measured: the recovery drill and its report.

    tfdist drill --workers 2 --faults kill-worker,kill-chief train.py

| module | is |
|---|---|
| `drill` | the two runs, the comparison, the verdict |
| `faults` | which faults there are, and when each one strikes |
| `runs` | one run of the job, with a deadline; nothing of it is left behind |
| `injector` | strikes |
| `drilled` | the first code in a task of a drill; then the user's script |
| `recorder` | what a task notes while it trains |
| `notes` | the files in which it does |
| `evidence` | what is known about a run, and how two of them differ |
| `timeline`, `report` | the page that a person looks at |
"""

from __future__ import annotations
