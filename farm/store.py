"""The results: commit an attempt of a cell, read it back, resume, compact, query.

Which files make up the dataset, and why a reader never sees half an attempt
or a row twice, is told in farm/dataset.py.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from farm.dataset import ATTEMPT, COMPACTED, MEMBERS, RUN_FILE, TRIES, Dataset, Unreadable
from farm.errors import FarmError, ResultsUnwritable, UsageError
from farm.rows import first_line, to_arrow
from farm.schemas import RUN_TABLES, SCHEMA_VERSION, SCHEMAS, TABLES

log = logging.getLogger(__name__)

_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,149}")
_CELL_TABLES = tuple(t for t in TABLES if t not in RUN_TABLES)
_GROUP_ROWS = 50_000  # rows that compaction holds at once: about 100 MB of Arrow


@dataclass(frozen=True)
class Reading:
    """Rows of one table, and a sentence for each file that could not be read."""

    table: pa.Table
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class QueryResult:
    """Of `farm sql`: column names as the query gave them, rows of Python values."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Store:
    """A results root.  A small value: it pickles, and any number of processes may use the same root."""

    root: str
    files: Dataset

    @classmethod
    def open(cls, root: str | Path) -> Store:
        """The root, created where it is missing and proved writable.  Raises UsageError."""
        store = cls(str(root), _locate(root))
        fs, base = store.files.fs, store.files.base
        probe = f"{base}/.probe-{uuid.uuid4().hex}"
        try:
            fs.create_dir(base, recursive=True)
            with fs.open_output_stream(probe) as stream:
                stream.write(b"patch farm")
            fs.delete_file(probe)
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"results root {root} is not writable ({first_line(error)}); make it writable or name "
                             "another results root") from error
        return store

    @classmethod
    def at(cls, root: str | Path) -> Store:
        """A root that exists, for readers: nothing is written to it.  Raises UsageError."""
        store = cls(str(root), _locate(root))
        try:
            kind = store.files.fs.get_file_info(store.files.base).type
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"results root {root} cannot be read ({first_line(error)}); check access") from error
        if kind == pafs.FileType.File:
            raise UsageError(f"results root {root} is a file; name the directory that a run wrote to")
        if kind != pafs.FileType.Directory:
            raise UsageError(f"results root {root} does not exist; name the root that a run wrote to")
        return store

    # --- writing --------------------------------------------------------------------------------

    def commit(self, run: str, cell: str, attempt: int, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        """Write all rows of one attempt; returns the paths, the one that commits it last.

        `rows` holds exactly one row for `cells`.  Nothing is written unless
        every row fits its schema.  Raises FarmError for a row that does not,
        an attempt that is already committed, or a disk that refuses.
        """
        _check_name("run", run)
        _check_name("cell", cell)
        if unknown := sorted(set(rows) - set(_CELL_TABLES)):
            raise FarmError(f"a cell has no rows for {', '.join(unknown)}; its tables are {', '.join(_CELL_TABLES)}")
        if len(rows.get("cells", ())) != 1:
            raise FarmError(f"run {run}, cell {cell}, attempt {attempt}: a commit takes exactly one row for cells")
        identity = {"run": run, "cell": cell, "attempt": attempt}
        tables = {table: to_arrow(table, rows[table], identity) for table in _CELL_TABLES if rows.get(table)}
        name = f"{cell}-{attempt}.parquet"
        paths = {table: self.files.path(table, run, name) for table in sorted(tables, key=lambda t: t == "cells")}
        with self._writing(run):
            self._refuse_second_commit(run, name)
            # A killed process may have left some of this attempt's files, also of tables that have no rows now.
            self.files.delete(self.files.path(t, run, name) for t in _CELL_TABLES if t not in tables)
            for table, path in paths.items():
                self.files.put(path, _parquet(tables[table]))
        return list(paths.values())

    def commit_run(self, run: str, row: Mapping[str, Any]) -> str:
        """Write the run's own row, or replace it when the run ends; returns the path."""
        _check_name("run", run)
        return self._replace("runs", run, [row])

    def commit_cards(self, run: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """Write what became of the run's cards, all of it anew; returns the path."""
        _check_name("run", run)
        return self._replace("cards", run, rows)

    def _replace(self, table: str, run: str, rows: Sequence[Mapping[str, Any]]) -> str:
        filled = [{"schema_version": SCHEMA_VERSION, "run": run, "cell": "", "attempt": 0, **row} for row in rows]
        path = self.files.path(table, run, RUN_FILE)
        payload = _parquet(to_arrow(table, filled, {"run": run}))
        with self._writing(run):
            self.files.put(path, payload)
        return path

    def compact(self, run: str) -> list[str]:
        """Make one file per table of a finished run; returns problems met, whose files stay as they are.

        Safe to kill at any moment and to run again, and safe beside readers.
        """
        _check_name("run", run)
        with self._writing(run):
            return [problem for table in _CELL_TABLES for problem in self._compact_table(table, run)]

    def _compact_table(self, table: str, run: str) -> list[str]:
        self._sweep(table, run)
        listing = self.files.committed_listing(table, run)
        problems, merged = list(listing.problems), []
        if len(listing.live) < 2:
            return problems
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, SCHEMAS[table], compression="zstd") as writer:
            waiting: list[pa.Table] = []
            for name in listing.live:
                try:
                    waiting.append(self.files.load(table, self.files.path(table, run, name)))
                except FileNotFoundError:
                    return problems  # another process compacts this run: its work stands
                except Unreadable as error:
                    problems.append(str(error))
                    continue
                merged.append(name)
                if sum(t.num_rows for t in waiting) >= _GROUP_ROWS:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
            # Claims are inherited: they say which attempts are committed, and a late compactor's file stays hidden.
            writer.add_key_value_metadata({MEMBERS: json.dumps(sorted({*merged, *listing.claimed}))})
        number = 1 + max((int(COMPACTED.fullmatch(n)[1]) for n in listing.compacted), default=0)
        path = self.files.path(table, run, f"compacted.{number}.parquet")
        if len(merged) > 1 and self.files.put_new(path, sink.getvalue()):
            self._sweep(table, run)
        return problems

    def _sweep(self, table: str, run: str) -> None:
        self.files.delete(self.files.path(table, run, name) for name in self.files.listing(table, run).leftovers)

    def _refuse_second_commit(self, run: str, name: str) -> None:
        listing, path = self.files.listing("cells", run), self.files.path("cells", run, name)
        if name in listing.live:
            try:
                self.files.check("cells", path)
            except Unreadable:
                return  # a damaged file commits nothing: the attempt may be written again
        if name in listing.attempts:
            raise FarmError(f"{path} is committed already; a retry takes the next attempt")

    @contextmanager
    def _writing(self, run: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResultsUnwritable(f"run {run}: cannot write below {self.root} ({first_line(error)}); what is committed "
                                    "stays. Make room or give access") from error

    # --- reading --------------------------------------------------------------------------------

    def read(self, table: str, run: str | None = None) -> pa.Table:
        """All committed rows of a table (one run's, or all) in today's schema; problems are logged."""
        reading = self.reading(table, run)
        _warn(reading.problems)
        return reading.table

    def reading(self, table: str, run: str | None = None) -> Reading:
        """As `read`, with each file that could not be read told by name.  Missing columns read as null."""
        if table not in SCHEMAS:
            raise UsageError(f"no table {table!r}; tables are {', '.join(TABLES)}")
        if run is not None:
            _check_name("run", run)
        parts, problems = [SCHEMAS[table].empty_table()], []
        for one in self.runs() if run is None else [run]:
            loaded, met = self.files.each(table, one, lambda path: self.files.load(table, path))
            parts.extend(loaded)
            problems.extend(met)
        return Reading(pa.concat_tables(parts), tuple(problems))

    def committed(self, run: str) -> set[tuple[str, int]]:
        """(cell, attempt) of each attempt whose `cells` file is there and sound: what resume need not run."""
        _check_name("run", run)
        names, _ = self.files.each("cells", run, self._attempts_in)
        found = (ATTEMPT.fullmatch(name) for some in names for name in some)
        return {(m["cell"], int(m["attempt"])) for m in found if m}

    def _attempts_in(self, path: str) -> set[str]:
        return {Path(self.files.check("cells", path)).name} | self.files.claims(path)

    def runs(self) -> list[str]:
        """Ids of all runs that wrote anything, in name order."""
        try:
            found = self.files.runs("runs") | self.files.runs("cells")
        except OSError as error:
            raise UsageError(f"results root {self.root} cannot be read ({first_line(error)}); check access") from error
        return sorted(run for run in found if _SAFE.fullmatch(run))

    def connect(self) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB with one lazy view per table, over what is committed now."""
        return self._connect(self._sound())

    def sql(self, query: str) -> QueryResult:
        """Run a query over the views.  Raises UsageError with DuckDB's own words."""
        paths = self._sound()
        damaged: frozenset[str] = frozenset()  # behind a sound footer: only a query that reads all of it finds out
        for _ in range(TRIES):
            try:
                with self._connect({table: [p for p in of if p not in damaged] for table, of in paths.items()}) as connection:
                    cursor = connection.execute(query)
                    if cursor is None:  # nothing but blanks or a comment
                        raise UsageError("the query is empty; for instance: select cell, verdict from cells")
                    return QueryResult(tuple(d[0] for d in cursor.description or ()), tuple(cursor.fetchall()))
            except (duckdb.Error, FileNotFoundError) as error:
                before, paths = paths, self._sound()
                if paths == before and not damaged and not isinstance(error, (duckdb.ParserException, duckdb.BinderException)):
                    damaged = self._damaged(paths)
                    if damaged:
                        continue
                if paths == before:  # else a compaction took a file away under the query
                    raise UsageError(f"{error}\nTables: {', '.join(TABLES)}; columns: describe cells") from error
        raise FarmError(f"{self.root} changed {TRIES} times during one query; run it again later")

    def _sound(self) -> dict[str, list[str]]:
        paths: dict[str, list[str]] = {table: [] for table in TABLES}
        for run in self.runs():
            for table in TABLES:
                sound, problems = self.files.each(table, run, lambda path, table=table: self.files.check(table, path))
                paths[table].extend(sound)
                _warn(problems)
        return paths

    def _damaged(self, paths: Mapping[str, list[str]]) -> frozenset[str]:
        """The files whose rows cannot be read, each told in a warning.  Reads everything."""
        found: set[str] = set()
        for table, of in paths.items():
            for path in of:
                try:
                    self.files.load(table, path)
                except Unreadable as error:
                    found.add(path)
                    _warn([str(error)])
                except FileNotFoundError:
                    continue  # a compaction took it away
        return frozenset(found)

    def _connect(self, paths: Mapping[str, list[str]]) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect()
        connection.execute("SET TimeZone = 'UTC'")
        for table, schema in SCHEMAS.items():
            source = ds.dataset(paths[table], schema=schema, format="parquet", filesystem=self.files.fs) \
                if paths[table] else ds.dataset(schema.empty_table())
            connection.register(table, source)
        return connection


def _warn(problems: Sequence[str]) -> None:
    for problem in problems:
        log.warning("%s", problem)


def _parquet(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _locate(root: str | Path) -> Dataset:
    text = str(root)
    if "://" not in text:
        return Dataset(pafs.LocalFileSystem(), str(Path(text).expanduser().absolute()))
    try:
        fs, base = pafs.FileSystem.from_uri(text)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"results root {text} cannot be opened ({first_line(error)}); give a path, or a file, s3 or "
                         "gs URI") from error
    return Dataset(fs, base.rstrip("/"))


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not _SAFE.fullmatch(name):
        raise UsageError(f"{what} id {name!r} cannot name a file: use letters, digits and _, inside also . @ + -; "
                         "at most 150")
