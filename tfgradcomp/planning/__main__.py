"""Command line of the planner: `python -m tfgradcomp.planning --help`."""

import sys

from tfgradcomp.planning.command import main

sys.exit(main())
