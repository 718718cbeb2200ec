"""The `farm` verbs.  Thin: each one reads its arguments and calls one function.

What a verb needs is imported when it runs: Ray alone takes a second, and `farm check` answers within one.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farm import modelcli, seriescli
from farm.console import Steadfast, open_standard_streams
from farm.diffhead import printable
from farm.errors import INTERRUPTED_EXIT, USAGE_EXIT, FarmError, UsageError
from farm.interrupts import Interrupts, deaf_at_the_end
from farm.places import default_results

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
                  help="Evidence for patched vLLM trees: verdicts in Parquet.")

Results = Annotated[
    str | None, typer.Option(help="Results root, a path or URI [default: FARM_RESULTS or the user's data folder].")]
seriescli.register(app)
modelcli.register(app)
_BAD_ARGUMENTS = typer.BadParameter.__mro__[1]  # click's UsageError, of whichever click typer brings
FORMATS = ("terminal", "markdown", "html", "junit")
# What Ray prints when a node dies (the end of its raylet's log), or an actor.  The farm says it in a line of its own.
_SAID_BY_US = "Raylet is terminated|has been marked dead because the detector|A worker died or was killed while executing"


@app.command("matrix")
def matrix_command(
    config: Annotated[Path, typer.Argument(help="A matrix, e.g. configs/matrix/smoke-cpu.yaml.")],
    only: Annotated[str, typer.Option(help="Run these cells alone: job or cell names, separated by commas.")] = "",
    arms: Annotated[str, typer.Option(
        help="Run these arms instead of the cells' own; one named twice (patched,patched) is an A/A: its noise.")] = "",
    results: Results = None,
    resume: Annotated[
        str | None, typer.Option(help="Run what this run (`last`: the newest) has not committed, or had no card for.")] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster [default: RAY_ADDRESS, else one of our own].")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="With --resume: its driver, on another machine, is gone for good.")] = False,
) -> None:
    """Run a matrix.  Exit code: 0 all PASS or SKIP, 1 a FAIL, 2 INVALID or ERROR, 3 bad usage, 130 interrupted."""
    quiet_ray()
    with Interrupts().later():  # a signal that cuts an import in two may look like anything
        from farm import matrix

    request = matrix.Request(config, _listed("--only", only, "job or cell names"), results, resume, address, take_over,
                             _listed("--arms", arms, "arms of the matrix"))
    raise typer.Exit(matrix.main(request, Steadfast()))


def quiet_ray() -> None:
    """Keep Ray's pages about a node or an actor that died off the terminal.  Before Ray is imported: it reads this then."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _SAID_BY_US)


def _listed(option: str, words: str, what: str) -> tuple[str, ...]:
    listed = tuple(word.strip() for word in words.split(",") if word.strip())
    if words and not listed:
        raise UsageError(f"{option} {words!r} names nothing; give {what}, separated by commas")
    return listed


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="A run's id; `last` is the newest.")] = "last",
    format: Annotated[str, typer.Option(help=f"One of: {', '.join(FORMATS)}.")] = "terminal",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of printing.")] = None,
    results: Results = None,
) -> None:
    """Render a run's rows again."""
    from farm.report import html, junit, markdown, terminal
    from farm.runs import meant
    from farm.store import Store

    if format not in FORMATS:
        raise UsageError(f"--format {format}: choose one of {', '.join(FORMATS)}")
    store = Store.at(results or default_results())
    chosen = meant(store, run)
    if format == "terminal":
        if out is not None:
            raise UsageError("--out goes with --format markdown, html or junit")
        terminal.render_terminal(store, chosen, Steadfast())
        return
    text = {"markdown": markdown.markdown, "html": html.html, "junit": junit.junit}[format](store, chosen)
    if out is None:
        print(text)
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error


@app.command()
def sql(query: str, results: Results = None) -> None:
    """Ask DuckDB: one view per table (runs, cells, boots, measurements, samples, tests, patches)."""
    from farm.store import Store
    from farm.tables import print_table

    answer = Store.at(results or default_results()).sql(query)
    print_table(Steadfast(), answer.columns, answer.rows)


@app.command()
def runs(results: Results = None) -> None:
    """List the runs of a results root, oldest first: how each stands, cells done of those promised, how to go on."""
    from farm.runs import lines, print_runs
    from farm.store import Store

    print_runs(Steadfast(), lines(Store.at(results or default_results())))


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="A run's id, e.g. of a run on one card.")],
    second: Annotated[str, typer.Argument(help="Another run of the same matrix; `last` is the newest.")] = "last",
    results: Results = None,
    second_results: Annotated[str | None, typer.Option(help="Results root of the second run [default: the same].")] = None,
) -> None:
    """Compare two runs of one matrix: every verdict, every peak of the KV pool.  Exit code: 0 the same, 1 a difference."""
    from farm import agreement
    from farm.runs import meant
    from farm.store import Store

    one = Store.at(results or default_results())
    other = one if second_results is None else Store.at(second_results)
    runs = meant(one, first), meant(other, second)
    if second_results is None and runs[0] == runs[1]:
        raise UsageError(f"{runs[0]} would be compared with itself; see: farm runs")
    found = agreement.compare(agreement.ran(one, runs[0]), agreement.ran(other, runs[1]))
    agreement.print_agreement(Steadfast(), found)
    raise typer.Exit(0 if found.same else 1)


@app.command()
def cards(
    results: Results = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything that is known, as one JSON array.")] = False,
) -> None:
    """Show the cards of this machine: what each is, who has it since when, its health or quarantine, its last verdicts."""
    import json

    from farm.cardlist import COLUMNS, lines
    from farm.places import host_state
    from farm.store import Store
    from farm.tables import print_table

    root = results or default_results()
    store = Store.at(root) if results or "://" in root or Path(root).is_dir() else None  # none yet: no verdicts
    found = lines(host_state(), store)
    if as_json:
        print(json.dumps([line.json() for line in found], indent=2))
    else:
        print_table(Steadfast(), COLUMNS, [line.row() for line in found])


def main() -> None:
    """`farm VERB …`."""
    _run_app(app)


def matrix_entry() -> None:
    """`farm/matrix.py CONFIG`: the verb `matrix` alone."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command()(matrix_command)
    _run_app(alone)


def _run_app(typer_app: typer.Typer) -> None:
    """Every error is one clear line and one of the exit codes of DESIGN.md."""
    deaf_at_the_end()
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files, and terminals without UTF-8
    try:
        code = typer_app(standalone_mode=False)
        sys.stdout.flush()  # here a full disk is an error with words
    except _BAD_ARGUMENTS as error:
        error.show()
        raise SystemExit(USAGE_EXIT) from error
    except FarmError as error:
        _complain(str(error))
        raise SystemExit(USAGE_EXIT if isinstance(error, UsageError) else 2) from error
    except (KeyboardInterrupt, typer.Abort) as error:
        raise SystemExit(INTERRUPTED_EXIT) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            traceback.print_exception(error)
        else:
            _complain(f"cannot write {error.filename or 'what it prints'}: {error.strerror}. Make room and run it again")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at its end
        raise SystemExit(2) from error
    except Exception as error:  # Python's own exit status 1 would say FAIL: evidence against the tree
        traceback.print_exception(error)
        raise SystemExit(2) from error
    raise SystemExit(code if isinstance(code, int) else 0)


def _complain(words: str) -> None:
    lines = "\n".join(map(printable, words.split("\n")))
    Console(stderr=True).print(f"farm: {lines}", style="red", markup=False, highlight=False, soft_wrap=True)
