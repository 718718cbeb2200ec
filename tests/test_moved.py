"""Where a line of one release is in another, and how much changed near it."""

import random
import time

import pytest
from releases import BASE, changed

from farm.moved import MUCH_NEAR, Near, Scope, bound_names, innermost, likeliest, line_map, movement, scopes, text_lines


def lines(text):
    return tuple(text.split())


@pytest.mark.parametrize(("old", "new", "to"), [
    pytest.param("a b c", "a b c", (0, 1, 2), id="same"),
    pytest.param("a b c", "a x b c", (0, 2, 3), id="put-in"),
    pytest.param("a b c", "a c", (0, -1, 1), id="taken-out"),
    pytest.param("a b c", "a x c", (0, -1, 2), id="rewritten"),
    pytest.param("", "a b", (), id="nothing-before"),
    pytest.param("a b", "", (-1, -1), id="nothing-after"),
    pytest.param("x x x a x x x", "x x x b x x x", (0, 1, 2, -1, 4, 5, 6), id="repeated-lines-around"),
])
def test_map(old, new, to):
    found = line_map(lines(old), lines(new))
    assert found.to == to
    assert all(found.back[there] == here for here, there in enumerate(found.to) if there >= 0)


def test_indentation_is_no_change():
    assert line_map(["a", "  b"], ["if x:", "    a", "      b"]).to == (1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_map_is_in_order_and_of_equal_lines(seed):
    chance = random.Random(seed)
    old = [str(chance.randrange(12)) for _ in range(chance.randrange(60))]
    new = [line for line in old if chance.random() < 0.7] + [str(chance.randrange(12)) for _ in range(5)]
    found = [(here, there) for here, there in enumerate(line_map(old, new).to) if there >= 0]
    assert [there for _, there in found] == sorted(there for _, there in found)
    assert all(old[here] == new[there] for here, there in found)


@pytest.mark.parametrize("old", [
    pytest.param([f"a{i}" for i in range(20_000)], id="every-second-line-changed"),
    pytest.param([f"l{i * 7919 % 200}" for i in range(20_000)], id="few-different-lines"),
    pytest.param(["same"] * 20_000, id="one-line-over-and-over"),
])
def test_map_takes_no_time(old):
    new = [line if i % 2 else f"{line}x" for i, line in enumerate(old)]
    start = time.process_time()
    line_map(old, new)
    assert time.process_time() - start < 5  # difflib alone takes a minute for the first


@pytest.mark.parametrize(("old", "new", "span", "place"), [
    pytest.param("a b c d", "a b c d", (1, 3), (1, 3), id="same"),
    pytest.param("a b c d", "a x y d", (1, 3), (1, 3), id="rewritten"),
    pytest.param("a b c d", "a d", (1, 3), (1, 1), id="gone"),
    pytest.param("a b", "a x y b", (1, 1), (1, 3), id="insertion-point"),
    pytest.param("a b", "q", (0, 2), (0, 1), id="nothing-kept"),
    pytest.param("", "", (0, 0), (0, 0), id="empty"),
])
def test_place(old, new, span, place):
    assert line_map(lines(old), lines(new)).between(*span) == place


@pytest.mark.parametrize(("old", "new", "near"), [
    pytest.param("a b c d", "a b c d", Near(0, 4), id="same"),
    pytest.param("a b c d", "a x c d", Near(1, 4), id="rewritten-counts-once"),
    pytest.param("a b c d", "a c d", Near(1, 4), id="taken-out"),
    pytest.param("a b c d", "a b x y c d", Near(2, 4), id="put-in"),
    pytest.param("a b c d", "x y z w v", Near(5, 4), id="all-new"),
    pytest.param("a #b c d", "a #x c d", Near(0, 3), id="comments-do-not-count"),
])
def test_changes(old, new, near):
    assert line_map(lines(old), lines(new)).changes(0, 99) == near


SOURCE = """\
@decorated
class A:
    x = 1

    def f(self):
        def inner():
            pass
        return inner

if True:
    async def g():
        pass
"""


def test_scopes():
    assert scopes(SOURCE) == (
        Scope("A", 1, 8, False), Scope("A.f", 5, 8, True), Scope("A.f.inner", 6, 7, True), Scope("g", 11, 12, True))


@pytest.mark.parametrize(("first", "last", "name"), [
    pytest.param(7, 7, "A.f.inner", id="inner"), pytest.param(6, 8, "A.f", id="over-its-end"),
    pytest.param(3, 3, "A", id="class"), pytest.param(4, 5, "A", id="between-methods"),
    pytest.param(10, 10, None, id="outside"),
])
def test_innermost(first, last, name):
    found = innermost(scopes(SOURCE), first, last)
    assert (found and found.name) == name


@pytest.mark.parametrize("source", [
    pytest.param(b"def f(:", id="syntax"), pytest.param(b"x = 1\0", id="null-byte"), pytest.param(b"\xff\xfe", id="no-utf-8"),
    pytest.param(b"(" * 500_000, id="nested-too-deep"), pytest.param(b"x = " + b"-" * 200_000 + b"1", id="long-chain"),
    pytest.param(b"# coding: no-such\n", id="unknown-encoding"), pytest.param(b"", id="empty"),
])
def test_source_that_python_cannot_read_has_no_scopes(source):
    assert scopes(source) == ()
    assert bound_names(source) == frozenset()


def test_bound_names():
    source = b"import a.b, c as d\nfrom e import f\ng = h\nfor i in j(k=1):\n    def l(m, *n): o.p = q\nr: int\n(s := 1)\n"
    assert bound_names(source) >= {"a", "d", "f", "g", "i", "l", "m", "n", "s"}
    assert not bound_names(source) & {"b", "c", "e", "h", "j", "k", "o", "p", "q"}


def near(old, new, marker):
    at = text_lines(old.encode()).index(marker)
    return movement(line_map(text_lines(old.encode()), text_lines(new.encode())), at, at + 1, scopes(old), scopes(new))


MARKER = "        blocks = [object() for _ in range(size)]"


def test_nothing_moved():
    found = near(BASE, BASE, MARKER)
    assert (found.near.changed, found.function, found.in_function, found.much) == (0, "Manager.allocate", Near(0, 8), False)


def test_a_little_moved():
    found = near(BASE, changed(BASE, ("        return len(blocks)", "        return len(blocks) + 1")), MARKER)
    assert (found.near.changed, found.in_function.changed, found.much) == (1, 0, False)


@pytest.mark.parametrize(("pairs", "counts"), [
    pytest.param([("LIMIT = 16\n", "LIMIT = 16\n" + "".join(f"NEW_{n} = {n}\n" for n in range(MUCH_NEAR)))], (MUCH_NEAR, 0),
                 id="many-lines-near-it"),
    pytest.param([('use_tail = self.mode == "tail"', 'use_tail = self.mode in ("tail", "both")'),
                  ("        return blocks\n", "        return list(blocks)\n")], (2, 2), id="a-quarter-of-its-function"),
])
def test_much_moved(pairs, counts):
    found = near(BASE, changed(BASE, *pairs), MARKER)
    assert (found.near.changed, found.in_function.changed) == counts
    assert found.much


def test_one_line_less_is_not_much():
    new = changed(BASE, ("LIMIT = 16\n", "LIMIT = 16\n" + "".join(f"NEW_{n} = {n}\n" for n in range(MUCH_NEAR - 1))))
    assert not near(BASE, new, MARKER).much


def test_what_is_far_away_does_not_count():
    new = changed(BASE, ("def helper_11(value):", "def helper_eleven(value):"))
    assert near(BASE, new, MARKER).near.changed == 0


def test_a_function_of_another_name():
    found = near(BASE, changed(BASE, ("def allocate(self", "def take(self")), MARKER)
    assert found.function_gone
    assert found.much


def test_likeliest_file():
    text = text_lines(BASE.encode())
    others = {"a.py": text[20:], "b.py": ("x = 1",), "c.py": text[60:]}
    assert likeliest(text, others)[0] == "a.py"
    assert likeliest(text, {"b.py": ("x = 1",)}) is None
    assert likeliest(text, {}) is None
