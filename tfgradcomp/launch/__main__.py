"""Start a multi-worker training run: `python -m tfgradcomp.launch --help`."""

import sys

from tfgradcomp.launch.launcher import main

sys.exit(main())
