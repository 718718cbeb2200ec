"""Where a place of one release is in another, and how much changed near it.  Pure; text in, values out.

Lines are compared with their white space folded, so that code that was only indented anew is not code that changed.
"""

from __future__ import annotations

import ast
import symtable
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

REACH = 40  # lines to either side of a hunk that count as near it
# From here on much has changed near a hunk that still applies.  Of about 1,100 places in v1/, config/ and the connectors that
# took a hunk from one vLLM release to the next (0.28.0 to 0.33.0), 27 to 41 % had any change near them and 5 to 8 % this much.
MUCH_NEAR = 20  # code lines within REACH
MUCH_OF_FUNCTION = 0.25  # of the code lines of the function around it
_PRODUCT = 10_000  # pairs of lines that difflib may compare in one gap without a line that is unique on both sides
_PASSES = 60  # how often, on the average, a line may be looked at before the rest is left as different


def text_lines(data: bytes) -> tuple[str, ...]:
    """Lines of a file without their ends; bytes that are not UTF-8 are replaced."""
    lines = data.decode("utf-8", errors="replace").split("\n")
    return tuple(line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines))


def folded(line: str) -> str:
    return " ".join(line.split())


def is_code(line: str) -> bool:
    """Neither blank nor a comment of its own line, as Python and YAML write one."""
    bare = line.lstrip()
    return bool(bare) and not bare.startswith("#")


@dataclass(frozen=True)
class Near:
    """How many of the code lines near a place are other ones in the newer file; `of` counts those of the older one."""

    changed: int
    of: int


@dataclass(frozen=True)
class Movement:
    """What happened near one hunk between two releases.

    `function` is the qualified name of the function around it in the older one, None outside of any; `in_function`
    counts its changed lines.  `function_gone`: the newer file has none of that name.
    """

    near: Near
    function: str | None = None
    in_function: Near | None = None
    function_gone: bool = False

    @property
    def much(self) -> bool:
        """Enough for a person to look: MUCH_NEAR lines within REACH, MUCH_OF_FUNCTION of the function, or it has gone."""
        share = self.in_function.changed / max(1, self.in_function.of) if self.in_function else 0.0
        return self.near.changed >= MUCH_NEAR or share >= MUCH_OF_FUNCTION or self.function_gone


@dataclass(frozen=True)
class LineMap:
    """Which line of `old` is which of `new`: `to[i]` is an index of `new`, or -1 where the line has gone.  Indices from 0."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    to: tuple[int, ...]

    @cached_property
    def back(self) -> tuple[int, ...]:
        """Per line of `new` the index of `old`, -1 for a line that is new."""
        found = [-1] * len(self.new)
        for at, other in enumerate(self.to):
            if other >= 0:
                found[other] = at
        return tuple(found)

    def between(self, first: int, end: int) -> tuple[int, int]:
        """The lines of `new` that stand where old[first:end] stood: all between the kept lines before and after."""
        before = next((self.to[i] for i in range(min(first, len(self.to)) - 1, -1, -1) if self.to[i] >= 0), -1)
        after = next((self.to[i] for i in range(end, len(self.to)) if self.to[i] >= 0), len(self.new))
        return before + 1, max(before + 1, after)

    def changes(self, first: int, end: int) -> Near:
        """Changed code lines of old[first:end].  A line that was rewritten counts once, as do one taken out and one put in."""
        first, end = max(0, first), min(end, len(self.old))
        changed = lost = of = 0
        at = self.between(first, first)[0]
        for i in range(first, end):
            code = is_code(self.old[i])
            of += code
            if (other := self.to[i]) < 0:
                lost += code
                continue
            changed += max(lost, self._new_code(at, other))
            lost, at = 0, other + 1
        stop = self.between(first, end)[1] if lost or end == len(self.old) else at
        return Near(changed + max(lost, self._new_code(at, stop)), of)

    def _new_code(self, first: int, end: int) -> int:
        return sum(self.back[i] < 0 and is_code(self.new[i]) for i in range(first, end))


def line_map(old: Sequence[str], new: Sequence[str]) -> LineMap:
    """Match the lines of two files: patience (lines unique on both sides hold it together), difflib in what is left.

    Bounded: whatever the files, about _PASSES looks at each line; what is not matched by then counts as different.
    """
    numbers: dict[str, int] = {}
    a = [numbers.setdefault(folded(line), len(numbers)) for line in old]
    b = [numbers.setdefault(folded(line), len(numbers)) for line in new]
    to = [-1] * len(a)
    work = [(0, len(a), 0, len(b))]
    budget = _PASSES * (len(a) + len(b) + 1)
    while work and budget > 0:
        first, end, other, stop = work.pop()
        budget -= end - first + stop - other
        while first < end and other < stop and a[first] == b[other]:
            to[first] = other
            first, other = first + 1, other + 1
        while first < end and other < stop and a[end - 1] == b[stop - 1]:
            end, stop = end - 1, stop - 1
            to[end] = stop
        if first == end or other == stop:
            continue
        anchors = _anchors(a, b, first, end, other, stop)
        if anchors:
            for here, there in anchors:
                to[here] = there
            edges = [(first - 1, other - 1), *anchors, (end, stop)]
            work += [(p + 1, r, q + 1, s) for (p, q), (r, s) in zip(edges, edges[1:], strict=False)]
        elif (end - first) * (stop - other) <= _PRODUCT:
            for here, there, size in SequenceMatcher(None, a[first:end], b[other:stop], False).get_matching_blocks():
                to[first + here:first + here + size] = range(other + there, other + there + size)
    return LineMap(tuple(old), tuple(new), tuple(to))


def _anchors(a: list[int], b: list[int], first: int, end: int, other: int, stop: int) -> list[tuple[int, int]]:
    """The longest run, rising on both sides, of lines that occur once in each."""
    once_a, once_b = Counter(a[first:end]), Counter(b[other:stop])
    places = {b[i]: i for i in range(other, stop) if once_b[b[i]] == 1 and once_a.get(b[i]) == 1}
    pairs = [(i, places[a[i]]) for i in range(first, end) if a[i] in places]
    tops: list[int] = []  # the least last place of a run of each length
    runs: list[int] = []  # index into pairs of that run's last
    before: list[int] = []
    for at, (_, there) in enumerate(pairs):
        length = bisect_left(tops, there)
        before.append(runs[length - 1] if length else -1)
        tops[length:length + 1], runs[length:length + 1] = [there], [at]
    chain: list[tuple[int, int]] = []
    at = runs[-1] if runs else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


# --- structure ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """A class or function: its qualified name and its lines, from 1, decorators and the last line included."""

    name: str
    first: int
    last: int
    is_function: bool


def scopes(source: bytes | str) -> tuple[Scope, ...]:
    """Classes and functions of Python source, outer ones first; nothing of a file that Python cannot read."""
    tree = _parsed(source)
    if tree is None:
        return ()
    found: list[Scope] = []
    work: list[tuple[ast.AST, str]] = [(tree, "")]
    while work:
        node, prefix = work.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found.append(Scope(name, first, child.end_lineno or child.lineno, not isinstance(child, ast.ClassDef)))
                work.append((child, f"{name}."))
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                work.append((child, prefix))
    return tuple(sorted(found, key=lambda scope: (scope.first, -scope.last)))


def _parsed(source: bytes | str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in strings of old code
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def innermost(found: Sequence[Scope], first: int, last: int, *, kinds: Sequence[bool] = (True, False)) -> Scope | None:
    """The narrowest scope that holds these lines (from 1, both ends); `kinds` are the values of `is_function` that count."""
    holding = [s for s in found if s.first <= first and last <= s.last and s.is_function in kinds]
    return min(holding, key=lambda s: s.last - s.first, default=None)


def movement(lines: LineMap, first: int, end: int, older: Sequence[Scope], newer: Sequence[Scope]) -> Movement:
    """What changed near old[first:end] (indices from 0; none: between two lines), with the scopes of the two files."""
    near = lines.changes(first - REACH, end + REACH)
    around = innermost(older, first + (first < end), max(first + 1, end), kinds=(True,))
    if around is None:
        return Movement(near)
    inside = lines.changes(around.first - 1, around.last)
    return Movement(near, around.name, inside, all(s.name != around.name for s in newer))


def bound_names(source: bytes) -> frozenset[str]:
    """Every name that Python source binds anywhere, by assignment, definition, parameter or import."""
    try:
        work = [symtable.symtable(source, "<source>", "exec")]  # type: ignore[arg-type]  # bytes do, and bring their encoding
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    found: set[str] = set()
    while work:
        table = work.pop()
        work += table.get_children()
        found |= {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_parameter() or s.is_imported()}
    return frozenset(found)


def likeliest(lines: Sequence[str], candidates: Mapping[str, Sequence[str]], least: float = 0.5) -> tuple[str, float] | None:
    """Which file a file has become: the name of the candidate that shares most of its code lines, and the share.

    None where no candidate has `least` of them.
    """
    wanted = Counter(folded(line) for line in lines if is_code(line))
    shares = {name: sum((wanted & Counter(folded(line) for line in other if is_code(line))).values()) / max(1, wanted.total())
              for name, other in candidates.items()}
    best = max(shares, key=lambda name: shares[name], default=None)
    return None if best is None or shares[best] < least else (best, shares[best])
