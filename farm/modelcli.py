"""The verb that writes a stand-in model: `farm model`.  Thin; what is written is farm.models'."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farm.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the verb to the farm's own."""
    app.command("model")(model_command)


def model_command(
    name: Annotated[str | None, typer.Argument(help="Which model; without it, the names are listed.")] = None,
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="A new or empty directory.")] = None,
) -> None:
    """Write a tiny stand-in model: config, byte-level tokenizer and chat template, the same bytes everywhere.

    There are no weights: serve it with --load-format=dummy.  Keep `dflash` out of the path: vLLM takes it for a method.
    """
    from farm import models
    from farm.tables import print_table

    console = Console()
    if name is None:
        print_table(console, ("model", "what it is"), [(kind, models.WORDS[kind]) for kind in models.KINDS])
        return
    if name not in models.KINDS:
        raise UsageError(f"no stand-in model {name!r}; there are: {', '.join(models.KINDS)}")
    if directory is None:
        raise UsageError(f"where to? Give a directory: farm model {name} DIR")
    written = models.write_model_to(name, directory)
    console.print(f"{written.path}: {name}, sha256 {written.sha256}", highlight=False, markup=False, soft_wrap=True)
