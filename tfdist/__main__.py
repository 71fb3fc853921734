"""`python -m tfdist` is `tfdist`."""

import sys

from tfdist.cli.main import main

sys.exit(main())
