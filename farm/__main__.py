"""`python -m farm` is the same as `farm`."""

from farm.cli import main

main()
