"""The files of the dataset: which count at this moment, how one is read, and how one is put there.

    ROOT/table=<table>/run=<run>/<cell>-<attempt>.parquet     one file per table and cell attempt
    ROOT/table=<table>/run=<run>/compacted.<n>.parquet        many of those in one, claiming its members
    ROOT/table=runs/run=<run>/run.parquet                     the run itself
    ROOT/table=cards/run=<run>/run.parquet                    what became of its cards

An attempt exists from the moment its `cells` file does; files of other tables
without it are skipped.  A compacted file names its members in its own
metadata, and members are skipped wherever the file that claims them is there:
before the swap, half way or after a kill, each row is read once.  Readers
take no lock; they list again afterwards and start over if a compaction passed.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from farm import jsontext
from farm.errors import FarmError
from farm.rows import Foreign, conform, first_line
from farm.schemas import RUN_TABLES

T = TypeVar("T")

RUN_FILE = "run.parquet"
MEMBERS = "farm_members"  # key of a compacted file's metadata: JSON list of file names
TRIES = 20  # one more per compaction that passes a reader; more than this is a broken file system
ATTEMPT = re.compile(r"(?P<cell>.+)-(?P<attempt>\d+)\.parquet")
COMPACTED = re.compile(r"compacted\.(\d+)\.parquet")


class Unreadable(Exception):
    """A file that is no part of the dataset: the sentence says which and why."""


@dataclass(frozen=True)
class Listing:
    """One directory at one moment, names in order."""

    live: tuple[str, ...]  # what a reader reads
    compacted: frozenset[str]
    claimed: frozenset[str]
    leftovers: tuple[str, ...]  # claimed, and not yet deleted
    problems: tuple[str, ...]

    @property
    def attempts(self) -> frozenset[str]:
        return frozenset(n for n in (*self.live, *self.claimed) if ATTEMPT.fullmatch(n))


@dataclass(frozen=True)
class Dataset:
    """A root directory on any of pyarrow's file systems."""

    fs: pafs.FileSystem
    base: str

    def path(self, table: str, run: str, name: str) -> str:
        return f"{self.base}/table={table}/run={run}/{name}"

    def runs(self, table: str) -> set[str]:
        where = pafs.FileSelector(f"{self.base}/table={table}", allow_not_found=True)
        names = (_name(info) for info in self.fs.get_file_info(where))
        return {n.removeprefix("run=") for n in names if n.startswith("run=")}

    def each(self, table: str, run: str, visit: Callable[[str], T]) -> tuple[list[T], list[str]]:
        """`visit` of the path of each live file, and a sentence for each that raised Unreadable."""
        for _ in range(TRIES):
            results: list[T] = []
            try:
                listing = self.committed_listing(table, run)
                problems = list(listing.problems)
                for name in listing.live:
                    try:
                        results.append(visit(self.path(table, run, name)))
                    except Unreadable as error:
                        problems.append(str(error))
                if self.listing(table, run).compacted == listing.compacted:
                    return results, problems
            except FileNotFoundError:
                continue
            except OSError as error:  # of the folder; what is wrong with a file is told as Unreadable
                return [], [f"{self.path(table, run, '')}: skipped, the folder cannot be read ({first_line(error)})"]
        raise FarmError(f"{self.path(table, run, '')} changed {TRIES} times while it was read; read again when its "
                        "compaction has ended")

    def committed_listing(self, table: str, run: str) -> Listing:
        """The listing without files of attempts that never committed."""
        if table in (*RUN_TABLES, "cells"):
            return self.listing(table, run)
        # The attempts first: all files of an attempt that is committed by now are there to be listed next.
        return self.listing(table, run, frozenset().union(*self.each_attempt(run)))

    def each_attempt(self, run: str) -> list[frozenset[str]]:
        """Twice the names of committed attempts: listing is not atomic, and a name that a compaction took away
        from the first is in what the second finds claimed."""
        return [self.listing("cells", run).attempts for _ in range(2)]

    def listing(self, table: str, run: str, committed: frozenset[str] | None = None) -> Listing:
        where = pafs.FileSelector(self.path(table, run, "").rstrip("/"), allow_not_found=True)
        infos = [info for info in self.fs.get_file_info(where) if info.type == pafs.FileType.File]
        names = sorted(name for name in map(_name, infos) if not name.startswith((".", "_")))
        ours = [n for n in names if _is_ours(table, n)]
        problems = [f"{self.path(table, run, n)}: not written by the farm, skipped" for n in names if n not in ours]
        compacted = {n for n in ours if COMPACTED.fullmatch(n)}
        claimed: set[str] = set()
        for name in compacted:
            try:
                claimed |= self.claims(self.path(table, run, name)) - {name}
            except Unreadable:
                continue  # told when it is visited; its members count again as far as they are there
        uncommitted = set() if committed is None else set(ours) - compacted - committed
        return Listing(tuple(n for n in ours if n not in claimed | uncommitted), frozenset(compacted),
                       frozenset(claimed), tuple(n for n in ours if n in claimed), tuple(problems))

    def claims(self, path: str) -> set[str]:
        """Names that a compacted file claims; empty for any other file.  Raises Unreadable."""
        with self._parquet(path) as file:
            return _members(file)

    def check(self, table: str, path: str) -> str:
        """The path, where the footer is sound and the columns convert.  Raises Unreadable."""
        with self._parquet(path) as file:
            _members(file)
            conform(file.schema_arrow.empty_table(), table)
        return path

    def load(self, table: str, path: str) -> pa.Table:
        """All rows in today's schema.  Raises Unreadable, FileNotFoundError."""
        with self._parquet(path) as file:
            _members(file)
            return conform(file.read(), table)

    @contextmanager
    def _parquet(self, path: str) -> Iterator[pq.ParquetFile]:
        try:
            with self.fs.open_input_file(path) as source, pq.ParquetFile(source) as file:
                yield file
        except FileNotFoundError:
            raise
        except Foreign as error:
            raise Unreadable(f"{path}: skipped, {error}") from error
        except (OSError, pa.ArrowException) as error:
            raise Unreadable(f"{path}: skipped, not a readable Parquet file ({first_line(error)})") from error

    def put(self, path: str, payload: pa.Buffer) -> None:
        """Put or replace a file: it is seen whole or not at all."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            with _beside(Path(path), payload) as written:
                written.replace(path)
        else:  # an object appears when its upload ends: there is nothing to rename
            with self.fs.open_output_stream(path) as stream:
                stream.write(payload)

    def put_new(self, path: str, payload: pa.Buffer) -> bool:
        """As `put`, but False where the file exists.  Object stores cannot tell: there, one writer at a time."""
        if not isinstance(self.fs, pafs.LocalFileSystem):
            self.put(path, payload)
            return True
        with _beside(Path(path), payload) as written:
            try:
                Path(path).hardlink_to(written)
            except FileExistsError:
                return False
        return True

    def delete(self, paths: Iterable[str]) -> None:
        """Delete what is there of these."""
        for info in self.fs.get_file_info(list(paths)):
            if info.type == pafs.FileType.File:
                try:
                    self.fs.delete_file(info.path)
                except FileNotFoundError:
                    continue  # another process was quicker


def _members(file: pq.ParquetFile) -> set[str]:
    """Raises Foreign."""
    try:
        members = jsontext.loads((file.metadata.metadata or {}).get(MEMBERS.encode(), b"[]"))
        return set(map(jsontext.text, members if isinstance(members, list) else [members]))
    except ValueError as error:
        raise Foreign(f"its list of members is damaged ({first_line(error)})") from error


def _name(info: pafs.FileInfo) -> str:
    """Of a file that has none in UTF-8: nothing of ours."""
    try:
        return info.base_name
    except UnicodeDecodeError:
        return "(a name that is not UTF-8)"


def _is_ours(table: str, name: str) -> bool:
    return name == RUN_FILE if table in RUN_TABLES else bool(ATTEMPT.fullmatch(name) or COMPACTED.fullmatch(name))


@contextmanager
def _beside(path: Path, payload: pa.Buffer) -> Iterator[Path]:
    """A synced file with a hidden name beside `path`, to be renamed or linked to it; then its directory is synced."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        for ancestor in (path.parents[1], path.parents[2]):
            _sync_directory(ancestor)
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # no reader's pattern takes it
    try:
        with hidden.open("xb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        yield hidden
    finally:
        hidden.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
