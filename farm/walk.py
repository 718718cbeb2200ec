"""One walk over a syntax tree: what it binds, imports, asks of names with dots, and what guards that.  Pure.

The walk keeps its own stack: an expression may be nested deeper than Python functions may call each other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from farm.scopes import Block, Chain, Imported, Keyed, Place, Scope, Scopes

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TRIES = tuple(getattr(ast, name) for name in ("Try", "TryStar") if hasattr(ast, name))  # TryStar: 3.11
_LEAVES = frozenset({ast.Load, ast.Store, ast.Del, ast.Constant, ast.Pass})  # half of all nodes, and they say nothing
_TYPE_PARAMETERS = ("TypeVar", "ParamSpec", "TypeVarTuple")  # 3.12
_ANY = frozenset({"Exception", "BaseException"})
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"}) | _ANY
_ATTRIBUTE_ERRORS = frozenset({"AttributeError"}) | _ANY
# What a function's body is not: it does not run where it stands.
_LATER = ~(Place.IMPORT_GUARDED | Place.ATTRIBUTE_GUARDED | Place.STRAIGHT)


def read_scopes(tree: ast.Module, watched: Iterable[str] = ()) -> Scopes:
    """Walk a module, in time linear in its nodes.

    `watched`: top-level names; the statements and method calls that write to them are kept in `lists`.
    """
    return _Walk(tree, frozenset(watched)).found


class _Walk:
    def __init__(self, tree: ast.Module, watched: frozenset[str]) -> None:
        self.module = Scope(Block.MODULE)
        self.found = Scopes(self.module)
        self.watched = watched
        self.stack: list[tuple[ast.AST, Scope, Place]] = []
        visits: dict[type, Callable[..., None]] = {
            ast.Import: self._import, ast.ImportFrom: self._import_from, ast.ClassDef: self._class, ast.Lambda: self._lambda,
            ast.If: self._if, ast.With: self._with, ast.AsyncWith: self._with, ast.Name: self._name,
            ast.Attribute: self._attribute, ast.Subscript: self._subscript, ast.Call: self._call, ast.Compare: self._compare,
            ast.Global: self._global, ast.Nonlocal: self._nonlocal, ast.NamedExpr: self._named, ast.arg: self._arg,
            ast.ExceptHandler: self._handler, ast.MatchAs: self._capture, ast.MatchStar: self._capture,
            ast.MatchMapping: self._capture, ast.Assign: self._assign, ast.AnnAssign: self._annotated,
            ast.AugAssign: self._assign, ast.For: self._branch, ast.AsyncFor: self._branch, ast.While: self._branch,
            ast.Match: self._branch, **dict.fromkeys(_FUNCTIONS, self._function), **dict.fromkeys(_TRIES, self._try),
            **dict.fromkeys(_COMPREHENSIONS, self._comprehension)}
        visits |= {getattr(ast, name): self._type_parameter for name in _TYPE_PARAMETERS if hasattr(ast, name)}
        self._push(tree.body, self.module, Place.STRAIGHT)
        while self.stack:
            node, scope, place = self.stack.pop()
            visits.get(type(node), self._other)(node, scope, place)

    def _push(self, nodes: Iterable[ast.AST | None], scope: Scope, place: Place) -> None:
        found = [(node, scope, place) for node in nodes if node is not None and type(node) not in _LEAVES]
        found.reverse()
        self.stack += found

    def _other(self, node: ast.AST, scope: Scope, place: Place) -> None:
        self._push(ast.iter_child_nodes(node), scope, place)

    def _branch(self, node: ast.AST, scope: Scope, place: Place) -> None:
        self._push(ast.iter_child_nodes(node), scope, place & ~Place.STRAIGHT)

    def _bind(self, name: str, scope: Scope, place: Place, what: Imported | None = None) -> None:
        if scope.bind(name, what) is self.module:
            (self.found.typing_names if place & Place.TYPING else self.found.names).add(name)

    # --- what binds -----------------------------------------------------------------------

    def _import(self, node: ast.Import, scope: Scope, place: Place) -> None:
        for alias in node.names:
            bound = Imported(alias.name if alias.asname else alias.name.partition(".")[0], 0, None, place, alias.lineno)
            self._bind(alias.asname or bound.module, scope, place, bound)
            self.found.imports.append(Imported(alias.name, 0, None, place, alias.lineno))

    def _import_from(self, node: ast.ImportFrom, scope: Scope, place: Place) -> None:
        for alias in node.names:
            bound = Imported(node.module or "", node.level, alias.name, place, alias.lineno)
            if alias.name != "*":
                self._bind(alias.asname or alias.name, scope, place, bound)
            self.found.imports.append(bound)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, place: Place) -> None:
        self._bind(node.name, scope, place)
        inner = Scope(Block.FUNCTION, scope)
        self._push([*getattr(node, "type_params", ()), *node.body], inner, place & _LATER)
        self._arguments(node.args, scope, inner, place)
        self._push([*node.decorator_list, node.returns], scope, place)

    def _lambda(self, node: ast.Lambda, scope: Scope, place: Place) -> None:
        inner = Scope(Block.FUNCTION, scope)
        self._push([node.body], inner, place & _LATER)
        self._arguments(node.args, scope, inner, place)

    def _arguments(self, args: ast.arguments, outer: Scope, inner: Scope, place: Place) -> None:
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        for arg in every:
            inner.bind(arg.arg)
        self._push([*args.defaults, *args.kw_defaults, *(arg.annotation for arg in every)], outer, place)

    def _class(self, node: ast.ClassDef, scope: Scope, place: Place) -> None:
        self._bind(node.name, scope, place)
        inner = Scope(Block.CLASS, scope)
        self._push([*getattr(node, "type_params", ()), *node.body], inner, place & ~Place.STRAIGHT)
        self._push([*node.decorator_list, *node.bases, *node.keywords], scope, place)

    def _comprehension(self, node: ast.AST, scope: Scope, place: Place) -> None:
        self._push(ast.iter_child_nodes(node), Scope(Block.COMPREHENSION, scope), place & ~Place.STRAIGHT)

    def _name(self, node: ast.Name, scope: Scope, place: Place) -> None:
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id, scope, place)
        elif isinstance(node.ctx, ast.Del) and scope is self.module and place & Place.STRAIGHT:
            self.found.names.discard(node.id)
            self.found.typing_names.discard(node.id)

    def _named(self, node: ast.NamedExpr, scope: Scope, place: Place) -> None:
        self._bind(node.target.id, scope.enclosing(), place)
        self._push([node.value], scope, place)

    def _arg(self, node: ast.arg, scope: Scope, place: Place) -> None:
        scope.bind(node.arg)

    def _handler(self, node: ast.ExceptHandler, scope: Scope, place: Place) -> None:
        if node.name:
            scope.bind(node.name)  # gone after the handler: no name of the module
        self._push(ast.iter_child_nodes(node), scope, place & ~Place.STRAIGHT)

    def _capture(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping, scope: Scope, place: Place) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name:
            self._bind(name, scope, place)
        self._push(ast.iter_child_nodes(node), scope, place)

    def _type_parameter(self, node: ast.AST, scope: Scope, place: Place) -> None:
        scope.bind(node.name)  # type: ignore[attr-defined]
        self._push(ast.iter_child_nodes(node), scope, place)

    def _global(self, node: ast.Global, scope: Scope, place: Place) -> None:
        if scope is not self.module:
            scope.elsewhere.update(dict.fromkeys(node.names, self.module))

    def _nonlocal(self, node: ast.Nonlocal, scope: Scope, place: Place) -> None:
        for name in node.names:
            home = scope.parent.find(name) if scope.parent else None
            scope.elsewhere[name] = home if home not in (None, self.module) else scope.parent or self.module

    def _assign(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign, scope: Scope, place: Place) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if scope is self.module:
            if any(_base(target) in self.watched for target in targets):
                self.found.lists.append(node)
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                self.found.texts.update({t.id: node.value.value for t in targets if isinstance(t, ast.Name)})
        self._other(node, scope, place)

    def _annotated(self, node: ast.AnnAssign, scope: Scope, place: Place) -> None:
        if node.value is None:  # declared, not bound
            self._push([node.target], scope, place | Place.TYPING)
            self._push([node.annotation], scope, place)
        else:
            self._assign(node, scope, place)

    # --- what guards ----------------------------------------------------------------------

    def _if(self, node: ast.If, scope: Scope, place: Place) -> None:
        place &= ~Place.STRAIGHT
        negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        typing = _base_chain(node.test.operand if negated else node.test)[-1:] == ("TYPE_CHECKING",)
        self._push(node.orelse, scope, place | Place.TYPING if typing and negated else place)
        self._push(node.body, scope, place | Place.TYPING if typing and not negated else place)
        self._push([node.test], scope, place)

    def _try(self, node: ast.Try, scope: Scope, place: Place) -> None:
        place &= ~Place.STRAIGHT
        caught = {name for handler in node.handlers for name in _caught(handler.type)}
        guarded = place | _guards(caught)
        self._push([*node.orelse, *node.finalbody], scope, place)
        self._push(node.handlers, scope, guarded)  # the other half of "this or that"
        self._push(node.body, scope, guarded)

    def _with(self, node: ast.With | ast.AsyncWith, scope: Scope, place: Place) -> None:
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        caught = {name for call in calls if _base_chain(call.func)[-1:] == ("suppress",)
                  for arg in call.args for name in _caught(arg)}
        self._push(node.body, scope, (place | _guards(caught)) & (~Place.STRAIGHT if caught else ~Place.NONE))
        self._push(node.items, scope, place)

    # --- what uses ------------------------------------------------------------------------

    def _attribute(self, node: ast.Attribute, scope: Scope, place: Place) -> None:
        chain, rest = _chain(node, scope, place)
        if chain is None:
            self._push([rest], scope, place)
        elif isinstance(node.ctx, ast.Load):
            self.found.chains.append(chain)
        elif len(chain.attrs) > 1:  # written to: what is before its last part is read
            self.found.chains.append(Chain(scope, chain.base, chain.attrs[:-1], chain.line, place))

    def _subscript(self, node: ast.Subscript, scope: Scope, place: Place) -> None:
        chain, _ = _chain(node.value, scope, place)
        if chain is not None:
            if isinstance(node.ctx, ast.Load):
                self.found.keyed.append(Keyed(chain, node.slice, called=False))
            if chain.attrs[-1:] == ("modules",) and isinstance(node.slice, ast.Name) and node.slice.id == "__name__":
                self.found.opaque = True
        self._other(node, scope, place)

    def _compare(self, node: ast.Compare, scope: Scope, place: Place) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            chain = _chain(right, scope, place)[0] if isinstance(operator, (ast.In, ast.NotIn)) else None
            if chain is not None:
                self.found.keyed.append(Keyed(chain, left, called=False))
        self._other(node, scope, place)

    def _call(self, node: ast.Call, scope: Scope, place: Place) -> None:
        chain, _ = _chain(node.func, scope, place)
        if chain is not None:
            if not chain.attrs:
                self._builtin(chain.base, node)
            if chain.base in self.watched and scope is self.module:
                self.found.lists.append(node)
            key = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "key"), None)
            if key is not None:
                self.found.keyed.append(Keyed(chain, key, called=True))
        self._other(node, scope, place)

    def _builtin(self, name: str, node: ast.Call) -> None:
        if name in ("globals", "exec"):
            self.found.opaque = True
        elif name == "hasattr" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            self.found.asked.add((_base(node.args[0]), str(node.args[1].value)))


def _base_chain(node: ast.AST) -> tuple[str, ...]:
    """`a.b.c` as ("a", "b", "c"); empty for anything else."""
    attrs: list[str] = []
    while isinstance(node, ast.Attribute):
        attrs.append(node.attr)
        node = node.value
    return (node.id, *reversed(attrs)) if isinstance(node, ast.Name) else ()


def _chain(node: ast.AST, scope: Scope, place: Place) -> tuple[Chain | None, ast.AST]:
    """A name or a dotted name, or None and the node below the dots."""
    words = _base_chain(node)
    if words:
        return Chain(scope, words[0], words[1:], node.end_lineno or node.lineno, place), node  # type: ignore[attr-defined]
    while isinstance(node, ast.Attribute):
        node = node.value
    return None, node


def _base(node: ast.AST) -> str:
    """The name under subscripts and dots, or nothing."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _caught(node: ast.AST | None) -> Iterator[str]:
    """Last words of the exceptions that an `except` or a `suppress` names; a bare `except` catches BaseException."""
    if node is None:
        yield "BaseException"
    for each in node.elts if isinstance(node, ast.Tuple) else [node]:
        if each is not None and (words := _base_chain(each)):
            yield words[-1]


def _guards(caught: Iterable[str]) -> Place:
    names = frozenset(caught)
    return ((Place.IMPORT_GUARDED if names & _IMPORT_ERRORS else Place.NONE)
            | (Place.ATTRIBUTE_GUARDED if names & _ATTRIBUTE_ERRORS else Place.NONE))
