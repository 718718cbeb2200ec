"""What one Python source defines, imports and reads from the environment: facts without importing it.

Pure but for `Answers`, which keeps facts on disk by the hash of their source.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm.scopes import Block, Chain, Imported, Place, Scope, Scopes
from farm.walk import read_scopes

FORMAT = 2  # raise it whenever the same source shall give other facts: cached ones are of their format
LIMIT = 1 << 19  # bytes, above which a source is compiled and not read: that takes a second, and no file of vLLM is so long
PACKAGE = "vllm"
KNOBS, EXPORTS = "environment_variables", "__all__"
# Calls and containers that read a variable by name, and those of vllm/envs.py that want a registered one.
_READERS = frozenset({"os.getenv", "os.environ.get", "os.environ.pop", "os.environ.setdefault", "vllm.envs.is_set"})
_ENVIRONMENTS = frozenset({"os.environ", f"vllm.envs.{KNOBS}"})

_MANY = 50  # a name that is imported more often means none


@dataclass(frozen=True)
class Reference:
    """What a source asks of a module of vLLM: `name` of `module` (None: the module itself), then `attrs` of that.

    `level` counts the dots of a relative import.  No attrs: an import; `name` is `*` for a star import.
    `typing`: under TYPE_CHECKING, where a module's own TYPE_CHECKING names count too.
    """

    line: int
    module: str
    level: int = 0
    name: str | None = None
    attrs: tuple[str, ...] = ()
    typing: bool = False


@dataclass(frozen=True)
class EnvRead:
    """A line that reads a variable from the environment by a literal name."""

    line: int
    name: str


@dataclass(frozen=True)
class ModuleFacts:
    """One source.

    `error` is CPython's refusal (line from 1, words), and then nothing else is known.  `names` are bound on top level
    at run time, `typing_names` only for type checkers.  `exports` is a literal `__all__` (None: none, or not literal).
    `opaque`: names may come from elsewhere (module `__getattr__`, `globals()`, `exec`, `sys.modules`), or it was not read
    (LIMIT).  `stars` are the modules (level, name) that it star-imports, any package's.  What a `try` guards is no reference.
    `knobs` are the literal keys of a dict `environment_variables` (None: there is none); `knobs_open`: it has others.
    """

    error: tuple[int, str] | None = None
    names: frozenset[str] = frozenset()
    typing_names: frozenset[str] = frozenset()
    exports: frozenset[str] | None = None
    opaque: bool = False
    stars: tuple[tuple[int, str], ...] = ()
    references: tuple[Reference, ...] = ()
    reads: tuple[EnvRead, ...] = ()
    knobs: frozenset[str] | None = None
    knobs_open: bool = False

    def to_json(self) -> dict[str, Any]:
        """Sorted, so that equal facts are equal text."""
        return {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModuleFacts:
        """Raises TypeError, ValueError or KeyError for what `to_json` did not write."""
        return cls(
            error=None if data["error"] is None else (int(data["error"][0]), str(data["error"][1])),
            names=frozenset(data["names"]), typing_names=frozenset(data["typing_names"]),
            exports=None if data["exports"] is None else frozenset(data["exports"]), opaque=bool(data["opaque"]),
            stars=tuple((int(level), str(module)) for level, module in data["stars"]),
            references=tuple(Reference(int(r["line"]), str(r["module"]), int(r["level"]), r["name"], tuple(r["attrs"]),
                                       bool(r["typing"])) for r in data["references"]),
            reads=tuple(EnvRead(int(r["line"]), str(r["name"])) for r in data["reads"]),
            knobs=None if data["knobs"] is None else frozenset(data["knobs"]), knobs_open=bool(data["knobs_open"]))


# --- one source ------------------------------------------------------------------------------


def facts_of(source: bytes) -> ModuleFacts:
    """Compile it with this Python, and read its syntax tree.  Never raises for a bad source, however deep or broken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a source's invalid escapes are not our output
            compile(source, "source", "exec", dont_inherit=True)  # its tree would be refused at less depth
            tree = _tree(source)
    except SyntaxError as error:
        return ModuleFacts(error=(error.lineno or 1, error.msg or "invalid syntax"))
    except (RecursionError, MemoryError):
        return ModuleFacts(error=(1, "nested too deeply"))
    except (ValueError, OverflowError) as error:  # null bytes, on some Pythons
        return ModuleFacts(error=(1, str(error)))
    if tree is None:
        return ModuleFacts(opaque=True)
    found = read_scopes(tree, (KNOBS, EXPORTS))
    exports, unsure = _literals(found, EXPORTS)
    knobs, more = _literals(found, KNOBS)
    return ModuleFacts(
        names=frozenset(found.names), typing_names=frozenset(found.typing_names - found.names),
        exports=None if unsure else exports,
        opaque=found.opaque or "__getattr__" in found.names,
        stars=tuple(dict.fromkeys((i.level, i.module) for i in found.imports if i.name == "*" and not i.place & Place.TYPING)),
        references=tuple(_references(found)), reads=tuple(_reads(found)), knobs=knobs, knobs_open=more)


def _tree(source: bytes) -> ast.Module | None:
    """None: it compiles, and is too deep or too long for a tree of Python's objects; nothing is said about such a source."""
    try:
        return ast.parse(source) if len(source) <= LIMIT else None
    except (RecursionError, MemoryError):
        return None


def _references(found: Scopes) -> Iterator[Reference]:
    """What is asked of vLLM and not guarded, each once a line, in no order that means anything."""
    asked: dict[Reference, None] = {}
    for each in found.imports:
        if _ours(each) and not each.place & Place.IMPORT_GUARDED:
            asked[Reference(each.line, each.module, each.level, each.name, (), bool(each.place & Place.TYPING))] = None
    for chain in found.chains:
        source = _imported(chain.scope, chain.base) if chain.attrs else None
        if source is None or not _ours(source) or chain.place & Place.ATTRIBUTE_GUARDED:
            continue
        if (chain.base, chain.attrs[0]) not in found.asked:
            typing = bool((source.place | chain.place) & Place.TYPING)
            asked[Reference(chain.line, source.module, source.level, source.name, chain.attrs, typing)] = None
    return iter(asked)


def _reads(found: Scopes) -> Iterator[EnvRead]:
    reads: dict[EnvRead, None] = {}
    for each in found.keyed:
        name = _text(each.key, each.chain.scope, found)
        if name is not None and _dotted(each.chain) in (_READERS if each.called else _ENVIRONMENTS):
            reads[EnvRead(each.chain.line, name)] = None
    return iter(reads)


def _ours(source: Imported) -> bool:
    return source.level > 0 or source.module == PACKAGE or source.module.startswith(f"{PACKAGE}.")


def _imported(scope: Scope, name: str) -> Imported | None:
    """The import that a name means, where it can mean one alone."""
    home = scope.find(name)
    sources = home.bound[name] if home else []
    first = sources[0] if 0 < len(sources) <= _MANY else None
    if first is None or any(s is None or s.what != first.what for s in sources):
        return None
    return next((s for s in sources if s is not None and not s.place & Place.TYPING), first)


def _dotted(chain: Chain) -> str:
    """`os.environ.get` for whatever name the source gave to any part of it."""
    source = _imported(chain.scope, chain.base)
    if source is None or source.level:
        return ""
    return ".".join([source.module, *([source.name] if source.name else []), *chain.attrs])


def _text(key: ast.expr, scope: Scope, found: Scopes) -> str | None:
    """A literal string, or the top-level constant that holds one and is bound once."""
    if isinstance(key, ast.Constant):
        return key.value if isinstance(key.value, str) else None
    if not isinstance(key, ast.Name):
        return None
    home = scope.find(key.id)
    constant = home is not None and home.block is Block.MODULE and len(home.bound[key.id]) == 1
    return found.texts.get(key.id) if constant else None


def _literals(found: Scopes, name: str) -> tuple[frozenset[str] | None, bool]:
    """The literal strings that a top-level list or dict is given (None: there is none), and whether it may hold others."""
    if name not in found.names:
        return None, False
    words: set[str] = set()
    every = True
    for statement in found.lists:
        for value in _given(statement, name):
            every &= _strings(value, words)
    return frozenset(words), not every


def _given(statement: ast.stmt | ast.Call, name: str) -> Iterator[ast.AST | None]:
    """Values that a statement puts under a top-level name: assigned, added, `name[key] = …`, or by a method."""
    if isinstance(statement, ast.Call):
        method = statement.func
        if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and method.value.id == name:
            if method.attr == "update" and statement.keywords:
                yield ast.List([ast.Constant(k.arg) if k.arg else k.value for k in statement.keywords])
            for arg in statement.args[:1]:
                yield ast.List([arg]) if method.attr in ("append", "setdefault", "add") else arg
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]  # type: ignore[attr-defined]
    for target in targets:
        if isinstance(target, ast.Name) and target.id == name:
            yield statement.value  # type: ignore[attr-defined]
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id == name:
            yield ast.List([target.slice])


def _strings(value: ast.AST | None, words: set[str]) -> bool:
    """Add a literal list's strings, or a literal dict's keys, also where `+` or `|` join them; False: there may be others."""
    every = True
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Add, ast.BitOr)):
            parts += [part.left, part.right]
        elif isinstance(part, ast.Dict):
            parts += [v if k is None else ast.List([k]) for k, v in zip(part.keys, part.values, strict=True)]
        elif isinstance(part, (ast.List, ast.Tuple, ast.Set)):
            texts = [e.value for e in part.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            every &= len(texts) == len(part.elts)
            words.update(texts)
        else:
            every = False
    return every


# --- many sources ----------------------------------------------------------------------------


class Answers:
    """JSON on disk, one file per key.  What is torn, foreign or cannot be read or written costs time, never an answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Any | None:
        try:
            kept = json.loads((self.folder / f"{key}.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return kept.get("answer") if isinstance(kept, dict) and kept.get("key") == key else None

    def put(self, key: str, answer: Any) -> None:
        """Whole or not at all; of two writers either wins, with the same answer."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    json.dump({"key": key, "answer": answer}, stream, separators=(",", ":"))
                os.replace(beside, self.folder / f"{key}.json")
            except OSError:
                os.unlink(beside)
                raise


class FactsCache:
    """`facts_of`, kept in memory and below `cache/check`: by Python, since that decides what compiles, and by format."""

    def __init__(self, cache: Path) -> None:
        self.answers = Answers(cache / "check" / f"{sys.implementation.cache_tag}-{FORMAT}")
        self.known: dict[str, ModuleFacts] = {}

    def facts(self, source: bytes) -> ModuleFacts:
        key = sha256_of(source)
        if key not in self.known:
            self.known[key] = self._kept(key) or self._read(key, source)
        return self.known[key]

    def _kept(self, key: str) -> ModuleFacts | None:
        try:
            return ModuleFacts.from_json(self.answers.get(key) or {})
        except (KeyError, TypeError, ValueError):
            return None

    def _read(self, key: str, source: bytes) -> ModuleFacts:
        facts = facts_of(source)
        self.answers.put(key, facts.to_json())
        return facts


def sha256_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()
