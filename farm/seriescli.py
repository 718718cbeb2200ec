"""The verbs that look at a series without a card: `farm check`, `farm merge-check`, `farm triage`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs to the farm's own."""
