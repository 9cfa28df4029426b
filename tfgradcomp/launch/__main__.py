"""Command line of the launcher: `python -m tfgradcomp.launch --help`."""

import sys

from tfgradcomp.launch.launcher import main

sys.exit(main())
