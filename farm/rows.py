"""Rows and their schema: dictionaries to Arrow on the way in, old files to today's columns on the way out.

Pure.  Stricter than Arrow, which writes 1.5 into an integer column as 1 and
the string "abc" into a list column as three strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from farm.errors import FarmError
from farm.schemas import IDENTITY, SCHEMAS

_YEARS = (datetime(1, 1, 2, tzinfo=timezone.utc), datetime(9999, 12, 30, tzinfo=timezone.utc))  # of datetime, in any zone
_REQUIRED = tuple(f.name for f in IDENTITY if not f.nullable)


class Foreign(Exception):
    """A file's columns are not this table's: the sentence says which."""


def to_arrow(table: str, rows: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]) -> pa.Table:
    """Rows in the table's schema, each carrying the `identity` that it is committed under.

    Raises FarmError that names the table and the column which is unknown,
    missing, of another type, or says another identity.
    """
    schema = SCHEMAS[table]
    for row in rows:
        if unknown := sorted(set(row) - set(schema.names)):
            raise FarmError(f"table {table} has no column {', '.join(unknown)} (farm/schemas.py)")
        for name, value in identity.items():
            if row.get(name) != value:
                raise FarmError(f"table {table}, column {name}: a row says {row.get(name)!r}, its commit {value!r}")
    return pa.Table.from_arrays([_column(table, f, [row.get(f.name) for row in rows]) for f in schema], schema=schema)


def conform(table: pa.Table, name: str) -> pa.Table:
    """Rows of a file of any age in today's schema of table `name`: columns that the file lacks are null, columns
    that today lacks are left out.  Raises Foreign where identity is missing, or a column twice or of no such type."""
    if missing := [c for c in _REQUIRED if c not in table.column_names]:
        raise Foreign(f"not written by the farm: no column {', '.join(missing)}")
    if len(set(table.column_names)) < len(table.column_names):
        raise Foreign("not written by the farm: two columns of one name")
    columns = []
    for field in SCHEMAS[name]:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            columns.append(table.column(field.name).cast(field.type))
            columns[-1].validate(full=True)  # text that is no UTF-8 would fail whoever reads it
        except pa.ArrowException as error:
            raise Foreign(f"column {field.name} does not convert: {first_line(error)}") from error
        if not field.nullable and columns[-1].null_count:
            raise Foreign(f"column {field.name}: a row has no value")
        if pa.types.is_timestamp(field.type) and not _is_readable(columns[-1]):
            raise Foreign(f"column {field.name}: a time beyond the year 9999, or before the first")
    return pa.Table.from_arrays(columns, schema=SCHEMAS[name])


def _is_readable(times: pa.ChunkedArray) -> bool:
    """Whether each is a time that Python's datetime can hold."""
    first, last = (pa.scalar(year, times.type) for year in _YEARS)
    found = pc.min_max(times)
    if not found["min"].is_valid:  # there is none
        return True
    return pc.greater_equal(found["min"], first).as_py() and pc.less_equal(found["max"], last).as_py()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _column(table: str, field: pa.Field, values: list[Any]) -> pa.Array:
    place = f"table {table}, column {field.name}"
    if not field.nullable and any(v is None for v in values):
        raise FarmError(f"{place}: a row has no value, and it is part of every row's identity")
    for value in {id(v): v for v in values}.values():  # rows share their conditions: look at each object once
        if not _fits(value, field.type):
            raise FarmError(f"{place}: {value!r:.200} is not {field.type} (farm/schemas.py)")
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise FarmError(f"{place}: {first_line(error)}") from error


def _fits(value: Any, kind: pa.DataType) -> bool:
    if value is None:
        return True
    if pa.types.is_list(kind):
        return isinstance(value, (list, tuple)) and all(_fits(v, kind.value_type) for v in value)
    if pa.types.is_map(kind):
        return isinstance(value, Mapping) and all(
            k is not None and _fits(k, kind.key_type) and _fits(v, kind.item_type) for k, v in value.items())
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        return isinstance(value, Mapping) and all(k in fields and _fits(v, fields[k]) for k, v in value.items())
    if pa.types.is_timestamp(kind):
        return isinstance(value, datetime) and value.tzinfo is not None
    if pa.types.is_boolean(kind) or isinstance(value, bool):
        return pa.types.is_boolean(kind) and isinstance(value, bool)
    if pa.types.is_integer(kind):
        return isinstance(value, int)
    if pa.types.is_floating(kind):
        return isinstance(value, (int, float))
    return pa.types.is_string(kind) and isinstance(value, str)
