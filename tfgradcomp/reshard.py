"""`python -m tfgradcomp.reshard`: see `tfgradcomp.checkpoint.reshard`."""

from tfgradcomp.checkpoint.reshard import main

if __name__ == "__main__":
    main()
