"""A console whose reader may go (`| head`, a dropped connection)."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class Steadfast(Console):
    """What runs goes on, and its exit code says how it ended.  Rich would end the process with status 1, which says FAIL."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
