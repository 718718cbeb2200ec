"""`farm`; `python -m farm` is the same."""

import sys


def main() -> None:
    """The console script: `farm VERB …`.  Ctrl-C while the verbs are still read ends it in silence, too."""
    try:
        from farm.cli import main as verbs
    except KeyboardInterrupt:
        sys.exit(130)  # farm.errors.INTERRUPTED_EXIT, which may not be there yet
    verbs()


if __name__ == "__main__":
    main()
