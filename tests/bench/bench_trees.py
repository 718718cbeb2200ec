#!/usr/bin/env python3
"""How long a second tree of a built pin takes, beside `cp -r` of its package plus the same patches.

    python tests/bench/bench_trees.py                      # 0.29.0-cpu with patches/, the farm's own cache
    python tests/bench/bench_trees.py --pin 0.28.0-cpu --cache /tmp/cache --rounds 10

Both ways are timed in turn in the same run, each from nothing to a package that can be imported.  The tree's time
includes finding the pristine, checking it by stat before and after, and hashing what the patches touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

import yaml  # noqa: E402

from farm.config import PinConfig  # noqa: E402
from farm.pins import Pin, PinStore  # noqa: E402
from farm.series import Series, load_series, series_directory  # noqa: E402
from farm.trees import TreeStore  # noqa: E402
from farm.worker import default_cache  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pin", default="0.29.0-cpu")
    parser.add_argument("--series", type=Path, default=PROJECT / "patches")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    file = PROJECT / "configs" / "pins" / f"{options.pin}.yaml"
    pin = Pin.from_config(options.pin, PinConfig(**yaml.safe_load(file.read_text(encoding="utf-8"))), file)
    series = load_series(series_directory(options.series, pin.version))
    pristine = PinStore(options.cache).pristine(pin, print)
    print(f"{pin.name}: {len(pristine.manifest.files)} files, {len(series.patches)} patches, "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.cache) as scratch:
        for number in range(options.rounds):
            ours.append(tree(options.cache, Path(scratch, f"tree-{number}"), pin, series))
            theirs.append(copy(pristine.package, Path(scratch, f"copy-{number}"), series))
            print(f"round {number + 1:2}: tree {ours[-1]:.3f} s, cp -r and patch {theirs[-1]:.3f} s", flush=True)
    for words, times in (("tree", ours), ("cp -r and patch", theirs)):
        print(f"{words}: median {statistics.median(times):.3f} s, {min(times):.3f} to {max(times):.3f} s, n={len(times)}")
    return 0


def tree(cache: Path, store: Path, pin: Pin, series: Series) -> float:
    """Seconds for one tree in an empty store on the cache's file system."""
    began = time.perf_counter()
    TreeStore(store).build(PinStore(cache).pristine(pin, print), series.patches)
    took = time.perf_counter() - began
    shutil.rmtree(store)
    return took


def copy(package: Path, folder: Path, series: Series) -> float:
    """Seconds for `cp -r` and GNU patch."""
    folder.mkdir()
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(package), str(folder)], check=True)
    for patch in series.patches:
        subprocess.run(["patch", "-p1", "--fuzz", "0", "--forward", "--no-backup-if-mismatch", "--silent"], check=True,
                       cwd=folder / "vllm", input=patch.data)
    took = time.perf_counter() - began
    shutil.rmtree(folder)
    return took


if __name__ == "__main__":
    sys.exit(main())
