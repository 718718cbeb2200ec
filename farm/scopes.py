"""What one syntax tree binds where, and the names through which it reaches into modules: values.  Pure; see `farm.walk`."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import Enum, Flag


class Place(Flag):
    """What surrounds a node.  STRAIGHT: a statement of the module that runs whenever the module is imported."""

    NONE = 0
    TYPING = 1
    IMPORT_GUARDED = 2
    ATTRIBUTE_GUARDED = 4
    STRAIGHT = 8


class Block(Enum):
    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"
    COMPREHENSION = "comprehension"


@dataclass(frozen=True)
class Imported:
    """An import that binds a name: `name` of `module` (None: the module itself) after `level` dots."""

    module: str
    level: int
    name: str | None
    place: Place
    line: int

    @property
    def what(self) -> tuple[str, int, str | None]:
        return self.module, self.level, self.name


@dataclass
class Scope:
    """Names that one block binds: by an import, or else (None), once per binding."""

    block: Block
    parent: Scope | None = None
    bound: dict[str, list[Imported | None]] = field(default_factory=dict)
    elsewhere: dict[str, Scope] = field(default_factory=dict)  # global and nonlocal names

    def bind(self, name: str, what: Imported | None = None) -> Scope:
        """Bind it where Python would, and say where that is."""
        scope = self
        while name in scope.elsewhere:
            scope = scope.elsewhere[name]
        scope.bound.setdefault(name, []).append(what)
        return scope

    def find(self, name: str) -> Scope | None:
        """The scope whose name a use in this one means; class bodies are seen by themselves alone."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.elsewhere:
                scope = scope.elsewhere[name]
            elif name in scope.bound and (scope is self or scope.block is not Block.CLASS):
                return scope
            else:
                scope = scope.parent
        return None

    def enclosing(self) -> Scope:
        """Where `:=` binds: comprehensions are passed over."""
        scope = self
        while scope.block is Block.COMPREHENSION and scope.parent is not None:
            scope = scope.parent
        return scope


@dataclass(frozen=True)
class Chain:
    """A loaded `base.attr.attr`: the scope where it stands, and the line of its last part."""

    scope: Scope
    base: str
    attrs: tuple[str, ...]
    line: int
    place: Place = Place.NONE


@dataclass(frozen=True)
class Keyed:
    """A chain asked for a key: `chain(key, …)` where `called`, else `chain[key]` or `key in chain`."""

    chain: Chain
    key: ast.expr
    called: bool


@dataclass
class Scopes:
    """What the walk found.  `names` and `typing_names`: bound on top level at run time, and for type checkers only."""

    module: Scope
    names: set[str] = field(default_factory=set)
    typing_names: set[str] = field(default_factory=set)
    imports: list[Imported] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    keyed: list[Keyed] = field(default_factory=list)
    asked: set[tuple[str, str]] = field(default_factory=set)  # `hasattr(base, "name")`
    texts: dict[str, str] = field(default_factory=dict)  # top-level `NAME = "text"`
    lists: list[ast.stmt | ast.Call] = field(default_factory=list)  # what writes to a watched top-level name
    opaque: bool = False
