"""The verbs that look at a series without a card: `farm check`, `farm merge-check`, `farm triage`.  Thin.

Each prints for a reader, or one JSON object; what is fetched meanwhile is told on the standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from farm.console import Steadfast
from farm.errors import SeriesError, UsageError
from farm.places import usable_cache

if TYPE_CHECKING:
    from farm.series import Series
    from farm.sources import Source

PIN = "A pin of configs/pins, or a release: its Python source is fetched once."
SOURCE = "A directory that holds the `vllm` package, e.g. an unpacked sdist or site-packages."
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the farm's own."""
    app.command("check")(check_command)
    app.command("merge-check")(merge_check_command)
    app.command("triage")(triage_command)


def check_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds `series` and the patches.")],
    pin: Annotated[str | None, typer.Option(metavar="P", help=PIN)] = None,
    source: Annotated[Path | None, typer.Option(metavar="TREE", help=SOURCE)] = None,
    as_json: Json = False,
) -> None:
    """Lint a series and replay all of it on a pristine tree, which stays as it is.

    Without --pin and --source the list and the patches' own text alone are judged.  Exit code: 0 clean or offsets, 1 a
    patch fails, 2 the list and the directory disagree, 3 bad usage.
    """
    from farm import check

    _heed_signals()
    package = None
    if pin is not None and source is not None:
        raise UsageError("--pin and --source both say which tree judges; give one of them")
    if pin is not None:
        package = _resolve(pin).package
    elif source is not None:
        package = _package(source)
    report = check.check(directory, package, usable_cache())
    if as_json:
        _print_json(check.to_json(report))
    else:
        check.render(report, Steadfast(soft_wrap=True))
    raise typer.Exit(report.exit_code)


def merge_check_command(
    base: Annotated[str, typer.Argument(metavar="BASE", help="What the branches are to be merged onto, e.g. origin/main.")],
    refs: Annotated[list[str], typer.Argument(metavar="REF…", help="The branches.")],
    repo: Annotated[Path, typer.Option(help="A clone; nothing in it is touched.")] = Path("."),
    series: Annotated[str | None, typer.Option(metavar="DIR", help="The series' directory in the repository "
                                               "[default: patches].")] = None,
    pin: Annotated[list[str] | None, typer.Option(metavar="P", help=f"{PIN} May be given again: a series directory named by "
                                                  "a release is judged on it, the others on the newest.")] = None,
    source: Annotated[Path | None, typer.Option(metavar="TREE", help=SOURCE)] = None,
    as_json: Json = False,
) -> None:
    """Say what the series looks like after branches are merged: each alone, every pair, and all together.

    Without --pin and --source the lists and the patches' own text alone are judged.  Exit code: 0 all green, 1 a merge
    gives a broken series, 2 conflicts only, 3 bad usage.
    """
    from farm import mergecheck, mergereport

    _heed_signals()
    if pin and source is not None:
        raise UsageError("--pin and --source both say which tree judges; give one of them")
    trees = [_resolve(word) for word in pin or ()]
    alone = None if source is None else _package(source)
    report = mergecheck.merge_check(base, refs, usable_cache(), repo=repo, series=series,
                                    package_for=lambda directory: _judge_of(directory, trees) or alone, say=_say)
    if as_json:
        _print_json(mergereport.to_json(report))
    else:
        mergereport.render(report, Steadfast(soft_wrap=True))
    raise typer.Exit(report.exit_code)


def triage_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Holds `series`; DIR/VERSION is taken for a release that "
                                              "has a series of its own there.")],
    pin: Annotated[list[str], typer.Option(metavar="P", help=f"{PIN} Give it once for each release.")],
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, hunk by hunk.")] = False,
) -> None:
    """The table patch × pin: what applies, what moved, what the newer release carries already, and what stands there instead.

    Exit code: 0 every patch applies or is upstream, 1 one fails on some pin, 3 bad usage.
    """
    from farm import triage
    from farm.report import triage as report

    _heed_signals()
    if as_json and as_markdown:
        raise UsageError("--json and --markdown: choose one")
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; give the one that holds `series` and its patches")
    table = triage.triage([_triage_pin(directory, _resolve(word)) for word in pin])
    if as_json:
        _print_json(triage.to_json(table))
    elif as_markdown:
        _print(report.markdown(table))
    else:
        report.render(table, Steadfast(soft_wrap=True))
    raise typer.Exit(table.exit_code)


# --- what these have in common --------------------------------------------------------------


def _resolve(word: str) -> Source:
    from farm.sources import resolve

    return resolve(word, usable_cache(), _say)


def _heed_signals() -> None:
    """A TERM or HUP (of a cancelled CI job) ends a verb as Ctrl-C does: what it wrote aside is taken away."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def _package(source: Path) -> Path:
    package = source / "vllm"
    if not package.is_dir():
        raise UsageError(f"--source {source}: there is no directory vllm in it; give the one that holds the `vllm` package")
    return package


def _judge_of(directory: PurePosixPath, trees: Sequence[Source]) -> Path | None:
    """The package that judges a series directory: of the release that it is named by, else the newest."""
    from packaging.version import Version

    named = [t for t in trees if t.version == directory.name]  # both as releases are written, with three numbers
    newest = sorted(trees, key=lambda t: Version(t.version))[-1:]
    return next((t.package for t in (*named, *newest)), None)


def _triage_pin(directory: Path, source: Source) -> Any:
    from farm.triagetable import TriagePin

    return TriagePin(source.label, source.version, source.package, _series_of(directory, source.version))


def _series_of(directory: Path, version: str) -> Series:
    """The series that serves a release; its patches may be malformed, its list may not."""
    from farm.listing import read_listing
    from farm.series import Series, series_directory

    folder = series_directory(directory, version)
    listing = read_listing(folder)
    if wrong := [p for p in listing.problems if not p.problem.is_note]:
        raise SeriesError(f"{wrong[0].detail}. See: farm check {folder}", file=listing.file, line=wrong[0].line)
    return Series(listing.patches, str(folder))


def _say(line: str) -> None:
    Console(stderr=True).print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    _print(json.dumps(value, indent=1, ensure_ascii=True))


def _print(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
