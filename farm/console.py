"""A console whose reader may go (`| head`, a dropped connection)."""

from __future__ import annotations

import contextlib
import os
import sys

from rich.console import Console


class Steadfast(Console):
    """What runs goes on, and its exit code says how it ended.  Rich would end the process with status 1, which says FAIL."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_standard_streams() -> None:
    """Descriptors 0 to 2 lead to nowhere where the caller has closed them.

    Else the next files would get these numbers: a child would lose the socket that it is given for one of its own standard
    streams, and what a library writes to its error stream would land in a results file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
