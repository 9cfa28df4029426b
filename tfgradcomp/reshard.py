"""`python -m tfgradcomp.reshard`: see `tfgradcomp.distribute.reshard`."""

from tfgradcomp.distribute.reshard import main

if __name__ == "__main__":
    main()
