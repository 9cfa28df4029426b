"""Start a multi-worker training run: `python -m tfgradcomp.launch --help`."""

import sys

from tfgradcomp.launch.launcher import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
