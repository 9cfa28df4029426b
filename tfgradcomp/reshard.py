"""Command line that changes the number of workers of a backup.

`python -m tfgradcomp.reshard --help`; the work is done by
`tfgradcomp.checkpoint.reshard`.
"""

from tfgradcomp.checkpoint.reshard import main

if __name__ == "__main__":
    main()
