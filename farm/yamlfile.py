"""YAML files read with their line numbers, and pydantic's complaints turned into one line each.

A user's mistake must come back as `file:line: what, and the nearest known word`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from farm.errors import UsageError

Loc = tuple[str | int, ...]
T = TypeVar("T")
MOST_NODES = 100_000  # aliases written out: a few lines can stand for billions


@dataclass(frozen=True)
class YamlFile:
    """A parsed document: plain data, and the line (from 1) of every key and item by its path."""

    path: Path
    data: Any
    lines: dict[Loc, int] = field(default_factory=dict)

    def line(self, loc: Loc) -> int | None:
        """The line of the deepest known part of `loc`."""
        for end in range(len(loc), -1, -1):
            if loc[:end] in self.lines:
                return self.lines[loc[:end]]
        return None

    def error(self, message: str, loc: Loc = ()) -> UsageError:
        return UsageError(message, file=self.path, line=self.line(loc))


def read(path: Path) -> YamlFile:
    """Raises UsageError: no such file, not YAML, a key given twice, not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 text: {error.reason} at byte {error.start}", file=path) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[Loc, int] = {}
        if node is not None:
            _walk(node, (), lines, path)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(
            f"is not valid YAML: {error.problem}", file=path, line=None if mark is None else mark.line + 1
        ) from error
    except yaml.YAMLError as error:  # characters that YAML does not allow come without a mark
        raise UsageError(f"is not valid YAML: {' '.join(str(error).split())}", file=path) from error
    except (RecursionError, ValueError, AttributeError) as error:  # AttributeError: `!!timestamp x`
        raise UsageError(f"is not usable YAML: {type(error).__name__}: {error}", file=path) from error
    if not isinstance(data, dict):
        raise UsageError("must be a mapping of keys to values", file=path, line=1)
    return YamlFile(path, data, lines)


def _walk(node: yaml.Node, loc: Loc, lines: dict[Loc, int], path: Path, above: tuple[int, ...] = ()) -> None:
    if id(node) in above:
        raise UsageError("an anchor contains itself", file=path, line=node.start_mark.line + 1)
    if len(lines) > MOST_NODES:
        raise UsageError(f"its aliases stand for more than {MOST_NODES} values", file=path, line=node.start_mark.line + 1)
    above = (*above, id(node))
    lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise UsageError(f"key {name!r} is given twice", file=path, line=key.start_mark.line + 1)
            seen.add(name)
            lines[(*loc, name)] = key.start_mark.line + 1
            _walk(value, (*loc, name), lines, path, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*loc, index), lines, path, above)


def validate(
    source: YamlFile, kind: type[T] | TypeAdapter[T], data: Any = None, locate: Callable[[Loc], Loc] = lambda loc: loc
) -> T:
    """`data` (default: the whole document) as `kind`; `locate` says where in the document a part of it stands.

    Raises UsageError for the first problem: an unknown key with the nearest
    known one, a missing key, a value of the wrong kind.
    """
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_python(source.data if data is None else data)
    except ValidationError as error:
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden" and e["type"] != "unexpected_keyword_argument")
        where = _of_the_document(tuple(first["loc"]), source.data if data is None else data)
        raise source.error(_sentence(first, adapter, where), locate(where)) from error


def _of_the_document(loc: Loc, data: Any) -> Loc:
    """`loc` without the parts that pydantic puts in for the branches of a union: they are nobody's keys.

    The last part may be a key that is missing from the document.
    """
    kept: list[str | int] = []
    for place, part in enumerate(loc):
        inside = isinstance(data, dict) and part in data
        if inside or (isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data)):
            kept.append(part)
            data = data[part]
        elif place == len(loc) - 1 and isinstance(part, str) and part.isidentifier():
            kept.append(part)
    return tuple(kept)


def _sentence(error: Any, adapter: TypeAdapter, where: Loc) -> str:
    name = str(where[-1]) if where else "the document"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(adapter, where)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        listed = f" Known here: {', '.join(known)}." if known else ""
        return f"unknown key {name!r}{hint}{listed}"
    if error["type"] in ("missing", "missing_argument"):
        return f"key {name!r} is missing"
    path = ".".join(str(part) for part in where) or "document"
    if error["type"] == "value_error":  # a check of ours: its sentence names what it is about
        return str(error["ctx"]["error"])
    return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _known_keys(adapter: TypeAdapter, where: Loc) -> list[str]:
    """The keys that the model at `where`'s parent knows, read from its JSON schema."""
    schema = adapter.json_schema(by_alias=True, mode="validation")
    definitions = schema.get("$defs", {})

    def resolve(node: dict) -> list[dict]:
        if "$ref" in node:
            return resolve(definitions.get(node["$ref"].rsplit("/", 1)[-1], {}))
        branches = [b for part in ("anyOf", "oneOf", "allOf") for b in node.get(part, [])]
        return [node, *(found for branch in branches for found in resolve(branch))]

    nodes = resolve(schema)
    for part in where[:-1]:
        step: list[dict] = []
        for node in nodes:
            if isinstance(part, int):
                found = [node.get("items"), *node.get("prefixItems", [])]
            else:
                found = [node.get("properties", {}).get(part), node.get("additionalProperties")]
            for child in found:
                if isinstance(child, dict):
                    step += resolve(child)
        nodes = step or nodes
    return sorted({key for node in nodes for key in node.get("properties", {})})


class Frozen(BaseModel):
    """Base of what YAML may say: unknown keys are errors, nothing changes after loading."""

    model_config = {"frozen": True, "extra": "forbid", "populate_by_name": True}
