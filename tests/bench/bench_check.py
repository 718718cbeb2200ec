#!/usr/bin/env python3
"""How long `farm check` takes for a series of 40 patches over 60 files, beside a plain shell loop of GNU patch.

    python tests/bench/bench_check.py                          # on vLLM 0.29.0's source in the farm's own cache
    python tests/bench/bench_check.py --source TREE --rounds 9 # TREE holds a `vllm` package

The patches are made from the package itself: each adds lines to real functions, some to several files, some on top of
earlier patches.  Both ways are whole processes, timed in turn in the same run: `farm check DIR --source TREE`, and
`cp -r` of the package plus `patch -p1 --fuzz 0` for each line of the series.  The copy goes to the temporary directory,
and once more to memory, where that is another place; taking it away again is not timed.  Cold means that the farm's
cache is empty; the files of the package are in the machine's own cache in all rounds, since they are read before.

Exit code: 0, or 1 where a way does not end clean.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from farm.places import default_cache  # noqa: E402

PATCHES, FILES, ON_TOP = 40, 60, 8
ALONE = 20  # patches of one file; those after them, but for the ones on top, share the other files
MEMORY = Path("/dev/shm")
LOOP = """set -e
cp -r "$1" "$2/vllm"
cd "$2/vllm"
while read -r patch; do
    patch -p1 --fuzz 0 --forward --no-backup-if-mismatch --silent < "$3/$patch"
done < "$3/series"
"""


@dataclass(frozen=True)
class Took:
    """One process and those that it waited for: seconds by the clock and of CPU, and how it ended."""

    wall_s: float
    cpu_s: float
    code: int
    said: str


@dataclass(frozen=True)
class Way:
    name: str
    run: Callable[[], Took]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=default_cache() / "source/0.29.0", metavar="TREE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the series here, and leave it there")
    options = parser.parse_args()
    package = options.source / "vllm"
    if not package.is_dir():
        parser.error(f"{options.source} holds no vllm package; give --source, e.g. an unpacked sdist, or fetch one into the "
                     "farm's cache: farm check patches --pin 0.29.0")
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep {options.keep}: it exists already; name a new directory")
    with tempfile.TemporaryDirectory(prefix="bench-check-") as scratch:
        return bench(package, options.rounds, Path(scratch), options.keep or Path(scratch, "series"))


def bench(package: Path, rounds: int, scratch: Path, series: Path) -> int:
    files, hunks = make_series(package, series)
    size = sum(1 for _ in package.rglob("*"))
    print(f"{PATCHES} patches, {files} files, {hunks} hunks, on {package} ({size:,} files and directories); "
          f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    warm = scratch / "cache"
    ways = [Way("farm check, warm", lambda: check(series, package, warm)),
            Way("farm check, cold", lambda: cold(series, package, scratch / "cold")),
            Way("cp -r and a loop of patch", lambda: loop(series, package, scratch / "copy"))]
    with tempfile.TemporaryDirectory(prefix="bench-check-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as memory:
        if os.stat(memory).st_dev != os.stat(scratch).st_dev:
            ways.append(Way("the same, in memory", lambda: loop(series, package, Path(memory, "copy"))))
        for way in (ways[0], ways[2]):
            way.run()  # fills the farm's cache and the machine's
        times: dict[str, list[Took]] = {way.name: [] for way in ways}
        for number in range(rounds):
            for way in ways if number % 2 else ways[::-1]:
                times[way.name].append(took := way.run())
                if took.code:
                    print(f"{way.name} ended with {took.code}: {took.said}")
                    return 1
    print("seconds, least / median / most")
    for name, taken in times.items():
        print(f"{name + ':':<27} {_spread([t.wall_s for t in taken])} s; of CPU {_spread([t.cpu_s for t in taken])} s; "
              f"n={rounds}")
    print(f"load now {os.getloadavg()[0]:.1f}; {times[ways[0].name][-1].said.splitlines()[-1]}")
    verdict(times[ways[0].name], [(way.name, times[way.name]) for way in ways[2:]])
    return 0


def verdict(ours: Sequence[Took], others: Sequence[tuple[str, Sequence[Took]]]) -> None:
    wall, cpu = (statistics.median(get(took) for took in ours) for get in (_wall, _cpu))
    for name, theirs in others:
        against, of_cpu = (statistics.median(get(took) for took in theirs) for get in (_wall, _cpu))
        print(f"warm check is {'faster' if wall < against else 'slower'} than {name}: {wall:.2f} s against {against:.2f} s by "
              f"the clock, {cpu:.2f} s against {of_cpu:.2f} s of CPU (medians)")


def _wall(took: Took) -> float:
    return took.wall_s


def _cpu(took: Took) -> float:
    return took.cpu_s


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"


# --- the two ways ----------------------------------------------------------------------------


def check(series: Path, package: Path, cache: Path) -> Took:
    return timed([sys.executable, "-m", "farm", "check", str(series), "--source", str(package.parent)],
                 {"FARM_CACHE": str(cache), "PYTHONPATH": str(PROJECT)})


def cold(series: Path, package: Path, cache: Path) -> Took:
    try:
        return check(series, package, cache)
    finally:
        shutil.rmtree(cache)


def loop(series: Path, package: Path, folder: Path) -> Took:
    folder.mkdir()
    try:
        return timed(["sh", "-c", LOOP, "sh", str(package), str(folder), str(series)], {})
    finally:
        shutil.rmtree(folder)


def timed(command: list[str], more: dict[str, str]) -> Took:
    began, before = time.perf_counter(), _children_s()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, **more}, timeout=300)
    return Took(time.perf_counter() - began, _children_s() - before, done.returncode, done.stdout)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the series ------------------------------------------------------------------------------


def make_series(package: Path, folder: Path) -> tuple[int, int]:
    """Write PATCHES patches over FILES files of a package and their list; how many files and hunks they have."""
    files = choose(package)
    texts = {path: (package / path).read_text(encoding="utf-8") for path in files}
    shared = PATCHES - ALONE - ON_TOP
    parts = [[path] for path in files[:ALONE]] + [files[ALONE + at::shared] for at in range(shared)]
    parts += [parts[at * 3] for at in range(ON_TOP)]
    folder.mkdir(parents=True)
    hunks, touched = 0, set()
    for number, paths in enumerate(parts, 1):
        diffs = []
        for path in paths:
            new = edited(texts[path], number)
            diffs += difflib.unified_diff(texts[path].splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}",
                                          f"b/{path}")
            texts[path] = new
        data = f"Patch {number} of a series that is made to be timed\n\n" + "".join(diffs)
        hunks += len(re.findall(r"^@@ ", data, re.MULTILINE))
        touched.update(re.findall(r"^\+\+\+ b/(.*)$", data, re.MULTILINE))
        (folder / f"{number:02}-made.patch").write_text(data, encoding="utf-8")
    names = [f"{number:02}-made.patch\n" for number in range(1, len(parts) + 1)]
    (folder / "series").write_text("".join(names), encoding="utf-8")
    return len(touched), hunks


def choose(package: Path) -> list[str]:
    """FILES Python files of the package, evenly over its name space: of 200 to 3,000 lines, with functions."""
    fit = []
    for path in sorted(package.rglob("*.py")):
        data = path.read_bytes()
        if 200 <= data.count(b"\n") <= 3000 and b"\r" not in data and b"\x0c" not in data and data.endswith(b"\n") and len(
                list(places(data.decode("utf-8")))) >= 3:
            fit.append(path.relative_to(package).as_posix())
    if len(fit) < FILES:
        raise SystemExit(f"{package} has {len(fit)} files with functions, and {FILES} are needed")
    return [fit[at * len(fit) // FILES] for at in range(FILES)]


def edited(text: str, number: int) -> str:
    """The source with a comment and an assignment more at the begin of two to four of its functions."""
    lines = text.splitlines(keepends=True)
    found = list(places(text))
    wanted = found[number % 3::max(1, len(found) // (2 + number % 3))][:2 + number % 3]
    for at, indent in sorted(wanted, reverse=True):
        lines[at:at] = [f"{indent}# Made for patch {number}: what follows sees one value more.\n",
                        f"{indent}made_by_patch_{number} = {number}\n"]
    return "".join(lines)


def places(text: str) -> Iterator[tuple[int, str]]:
    """Where a function's code begins, after its docstring: index of the line, and its indentation."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            if body:
                first = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))])
                before = node.body[0].end_lineno if body is not node.body else node.lineno
                if first > (before or first) and first > node.lineno:
                    yield first - 1, " " * body[0].col_offset


if __name__ == "__main__":
    sys.exit(main())
