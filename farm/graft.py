"""Take single tests from a newer version's test file onto an older pin's own file.

Pure: text in, text out.  The result is the older file, unchanged, followed by
the named tests and by whatever they refer to that the older file lacks:
imports (narrowed to the names in use), fixtures, helpers, constants.  What the
older file defines stays in force, because it fits the older vLLM: a class may
have moved between modules, a helper may take other arguments.

References are found by the interpreter's own scope analysis (`symtable`), so a
local variable is never mistaken for a module's name.  Beyond plain names, a
test asks for fixtures by argument or by string, and for the module's
`pytestmark` and autouse fixtures silently: those are attached to the grafted
tests alone, so that the older file's tests run as they always did.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator, Sequence

from farm.errors import InvalidMeasurement
from farm.records import Reason

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Import = (ast.Import, ast.ImportFrom)
_AMBIENT = set(dir(builtins)) | {"__file__", "__name__", "__doc__", "__spec__", "__package__", "__builtins__"}


def test_path(nodeid: str) -> tuple[str, str]:
    """Split a node id: ("tests/x.py", "TestC::test_a"), parameters dropped; the second is "" for a file."""
    path, _, name = nodeid.partition("[")[0].partition("::")
    return path, name


test_path.__test__ = False  # type: ignore[attr-defined]  # pytest collects functions called test*


def graft(older_source: str | None, newer_source: str, tests: Sequence[str]) -> str:
    """The text of the older file plus `tests`, named `test_a`, `TestC::test_a`, either with `[parameters]`.

    `older_source` is None where the older version has no such file.  A test that both files have, alike
    but for layout, is left as it is.  Raises InvalidMeasurement, naming test and name, where a test is not
    in the newer file, where the older file has another test of that name, where a name that is needed is
    defined by neither file or as different things, and where a file is no Python.
    """
    older = _Module(older_source or "", "the older file")
    newer = _Module(newer_source, "the newer file")
    chosen: dict[str, set[str]] = {}  # function, or class and its methods
    for test in tests:
        name = test.partition("[")[0]
        if _is_missing(name, older, newer):
            head, _, method = name.partition("::")
            chosen.setdefault(head, set()).update({method} - {""})
    if not chosen:
        return older_source or ""
    selection = _Selection(older, newer, chosen)
    result = selection.text()
    _Module(result, "the grafted file")
    return result


def _is_missing(name: str, older: _Module, newer: _Module) -> bool:
    """Whether the test has to be taken over; raises where the newer file lacks it or the older has another."""
    theirs, ours = newer.find(name), older.find(name)
    if theirs is None:
        raise _refused(f"the newer file has no test {name}", "check the node id against that version's sdist")
    if ours is None:
        if "::" not in name and name in older.bound:
            raise _refused(f"the older file uses the name {name} for something else", "this test cannot be grafted")
        return True
    if ast.dump(ours) != ast.dump(theirs):
        raise _refused(f"the older file has a test {name} of its own, and it differs",
                       "run it from source `pin`, or leave it out")
    return False


class _Module:
    """A parsed file: which top-level statement binds which name."""

    def __init__(self, source: str, what: str) -> None:
        try:
            self.tree = ast.parse(source)
        except SyntaxError as error:
            raise _refused(f"{what} is no Python: {error}", "open it at that line") from error
        self.lines = source.splitlines()
        self.binders: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            for name in _binds(statement):
                self.binders.setdefault(name, []).append(statement)
        self.bound = set(self.binders)
        self.has_star = "*" in self.bound
        self.fixtures = {_fixture_name(s): s for s in self.tree.body if _fixture(s) is not None}

    def definition(self, name: str) -> ast.stmt | None:
        return next((s for s in reversed(self.binders.get(name, ())) if isinstance(s, _Definition)), None)

    def find(self, test: str) -> ast.stmt | None:
        head, _, method = test.partition("::")
        node = self.definition(head)
        if method:
            return _members(node).get(method)
        return node

    def futures(self) -> set[str]:
        return {a.name for s in self.tree.body if _is_future(s) for a in s.names}

    def marks(self) -> list[ast.expr]:
        """The expressions of `pytestmark`, each fit to be a decorator."""
        values = [s.value for s in self.binders.get("pytestmark", ()) if isinstance(s, ast.Assign | ast.AnnAssign)]
        return [] if not values else list(getattr(values[-1], "elts", [values[-1]]))

    def text(self, first: int, last: int) -> str:
        """Lines `first` to `last`, counted from 1, both included."""
        return "\n".join(self.lines[first - 1:last])


class _Selection:
    """What has to be taken from the newer file, found once, written in that file's order."""

    def __init__(self, older: _Module, newer: _Module, chosen: dict[str, set[str]]) -> None:
        self.older, self.newer, self.chosen = older, newer, chosen
        self.marks = [] if "pytestmark" in older.bound else newer.marks()
        self.autouse = [name for name, s in newer.fixtures.items() if _is_autouse(s) and name not in older.fixtures]
        self.names: set[str] = set()  # taken from the newer file, the tests themselves apart
        self.taken: list[ast.stmt] = []
        self._close()

    def _close(self) -> None:
        waiting: list[tuple[str, ast.AST]] = []  # (who asks, what to look through)
        for head, methods in self.chosen.items():
            node = self.newer.definition(head)
            asker = f"{head}::{min(methods)}" if methods else head
            waiting += [(asker, part) for part in self._parts(node)]
            waiting += [(asker, ast.Expr(mark)) for mark in self.marks]
            waiting += [(asker, self.newer.fixtures[name]) for name in self.autouse]
            self.names |= {self.newer.fixtures[name].name for name in self.autouse}
            if self.marks or self.autouse:
                waiting.append((asker, ast.Expr(ast.Name("pytest", ast.Load()))))
        while waiting:
            asker, node = waiting.pop()
            for name in {*_references(node), *self._fixtures_asked(node)}:
                if name in self.older.bound:
                    self._refuse_clash(asker, name)
                elif name in self.newer.bound:
                    if name not in self.names and name not in self.chosen:
                        self.names.add(name)
                        waiting += [(asker, s) for s in self.newer.binders[name] if not isinstance(s, _Import)]
                        waiting += [(asker, s) for s in self.newer.tree.body if name in _changes(s)]
                elif name not in _AMBIENT and not self.older.has_star:
                    star = " (it may come from its `import *`)" if self.newer.has_star else ""
                    raise _refused(f"test {asker} needs the name {name}, which neither file defines{star}",
                                   "this test cannot be grafted")

    def _parts(self, node: ast.stmt) -> list[ast.stmt]:
        """A chosen test's statements to search: a function, or a class reduced to what is taken of it."""
        if not isinstance(node, ast.ClassDef):
            return [node]
        kept = self._kept(node)
        shell = ast.ClassDef(name=node.name, bases=node.bases, keywords=node.keywords,
                             decorator_list=node.decorator_list, body=kept or [ast.Pass()])
        shell.type_params = getattr(node, "type_params", [])  # Python 3.12
        return [shell]

    def _kept(self, node: ast.ClassDef) -> list[ast.stmt]:
        """Members to take: the chosen tests, and all that is no test and that the older class lacks."""
        have = set(_members(self.older.definition(node.name)))
        return [m for m in node.body
                if (m.name in self.chosen[node.name] if _is_test(m) else not (_binds(m) and _binds(m) <= have))]

    def _fixtures_asked(self, node: ast.AST) -> Iterator[str]:
        """Fixtures of the newer file that are asked for by argument or by string (`usefixtures`, `indirect`)."""
        for inner in ast.walk(node):
            asked = inner.arg if isinstance(inner, ast.arg) else getattr(inner, "value", None)
            names = [n.strip() for n in asked.split(",")] if isinstance(asked, str) else []
            yield from (self.newer.fixtures[n].name for n in names
                        if n in self.newer.fixtures and n not in self.older.fixtures)

    def _refuse_clash(self, asker: str, name: str) -> None:
        ours, theirs = _kind(self.older, name), _kind(self.newer, name)
        if ours != theirs and "import" not in (ours, theirs) and name not in self.chosen:
            raise _refused(f"test {asker} needs {name}, a {theirs} in the newer file and a {ours} in the older",
                           "this test cannot be grafted")

    def text(self) -> str:
        imports: list[str] = []
        parts: list[str] = []
        for statement in self.newer.tree.body:
            if isinstance(statement, _Import):
                imports += _narrowed(statement, self.names)
            elif getattr(statement, "name", None) in self.chosen:
                parts.append(self._test(statement))
            elif _binds(statement) & self.names or _changes(statement) & self._own_names():
                parts.append(self._other(statement))
        missing = sorted(self.newer.futures() - self.older.futures())
        kept = _with_futures(self.older, missing).rstrip("\n")
        return "\n\n\n".join(filter(None, [kept, "\n".join(imports), *parts])) + "\n"

    def _own_names(self) -> set[str]:
        """Taken names that are more than an import: a change to one of those belongs to its definition."""
        return {n for n in self.names if not all(isinstance(s, _Import) for s in self.newer.binders[n])}

    def _test(self, node: ast.stmt) -> str:
        uses = [f"pytest.mark.usefixtures({', '.join(map(repr, self.autouse))})"] if self.autouse else []
        extra = "".join(f"@{line}\n" for line in [*map(ast.unparse, self.marks), *uses])
        if not isinstance(node, ast.ClassDef):
            return extra + self.newer.text(_first_line(node), node.end_lineno)
        if self.older.definition(node.name) is not None:
            header = f"class {node.name}({node.name}):"  # the older class with its tests, and more
        else:
            header = self.newer.text(_first_line(node), _first_line(node.body[0]) - 1)
        return extra + "\n\n".join([header, *(self.newer.text(_first_line(m), m.end_lineno) for m in self._kept(node))])

    def _other(self, node: ast.stmt) -> str:
        if not _is_autouse(node):
            return self.newer.text(_first_line(node), node.end_lineno)
        call = _fixture(node)
        keywords = [k for k in call.keywords if k.arg != "autouse"]
        calm = ast.unparse(ast.Call(func=call.func, args=call.args, keywords=keywords))
        others = [ast.unparse(d) for d in node.decorator_list if d is not call]
        return "".join(f"@{d}\n" for d in [calm, *others]) + self.newer.text(node.lineno, node.end_lineno)


# --- reading syntax ---------------------------------------------------------------------------


def _references(node: ast.AST) -> set[str]:
    """Names that a statement expects of its module, in every scope that it opens."""
    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        yield from (s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global()))
        for child in table.get_children():
            yield from walk(child)

    return set(walk(symtable.symtable(ast.unparse(ast.fix_missing_locations(node)), "<graft>", "exec")))


def _binds(statement: ast.stmt) -> set[str]:
    """Names that a statement binds in its own scope, inside if, try, with and for too."""
    if isinstance(statement, _Definition):
        return {statement.name}
    if isinstance(statement, _Import):
        return set() if _is_future(statement) else {_alias(a) for a in statement.names}
    return {n.id for n in _open_nodes(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | {
        name for n in _open_nodes(statement) if n is not statement and isinstance(n, (*_Definition, *_Import))
        for name in _binds(n)}


def _open_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Like ast.walk, without going into another scope."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        elif not isinstance(child, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _open_nodes(child)


def _changes(statement: ast.stmt) -> set[str]:
    """Names whose object a top-level statement changes in place: `CASES.append(…)`, `CASES["a"] = …`, `CASES += …`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        targets = [statement.value.func]
    elif isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    else:
        return set()
    changed = set()
    for target in targets:
        direct = isinstance(target, ast.Name)
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and (not direct or isinstance(statement, ast.AugAssign)):
            changed.add(target.id)
    return changed


def _kind(module: _Module, name: str) -> str:
    statement = module.binders.get(name, [None])[-1]
    if statement is None or isinstance(statement, _Import):
        return "import"
    if _fixture(statement) is not None:
        return "fixture"
    return "function or class" if isinstance(statement, _Definition) else "value"


def _members(node: ast.stmt | None) -> dict[str, ast.stmt]:
    return {n: m for m in node.body for n in _binds(m)} if isinstance(node, ast.ClassDef) else {}


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, _Definition) and node.name.lower().startswith("test")


def _fixture(node: ast.stmt) -> ast.expr | None:
    """The decorator that makes a function a fixture."""
    for decorator in getattr(node, "decorator_list", ()):
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called).rpartition(".")[2] == "fixture":
            return decorator
    return None


def _keyword(node: ast.stmt, name: str) -> object:
    values = [k.value for k in getattr(_fixture(node), "keywords", ()) if k.arg == name]
    return getattr(values[0], "value", None) if values else None


def _fixture_name(node: ast.stmt) -> str:
    return str(_keyword(node, "name") or node.name)


def _is_autouse(node: ast.stmt) -> bool:
    return bool(_keyword(node, "autouse"))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _alias(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _narrowed(statement: ast.Import | ast.ImportFrom, names: set[str]) -> list[str]:
    aliases = [a for a in statement.names if _alias(a) in names]
    if not aliases or _is_future(statement):
        return []
    if isinstance(statement, ast.Import):
        return [ast.unparse(ast.Import(aliases))]
    return [ast.unparse(ast.ImportFrom(statement.module, aliases, statement.level))]


def _with_futures(module: _Module, names: Sequence[str]) -> str:
    """The module's text with `from __future__ import names` where the language wants it."""
    lines = list(module.lines)
    if names:
        at = 0
        if module.tree.body:
            first = module.tree.body[0]
            has_docstring = ast.get_docstring(module.tree) is not None
            at = first.end_lineno if has_docstring else _first_line(first) - 1
        lines.insert(at, f"from __future__ import {', '.join(names)}")
    return "\n".join(lines)


def _refused(what: str, next_step: str) -> InvalidMeasurement:
    return InvalidMeasurement(f"graft: {what}; {next_step}", reason=Reason.BAD_CONFIG)
