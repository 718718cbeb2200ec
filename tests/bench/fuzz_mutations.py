"""Bytes of patches and lists, changed at random: pure, the same for the same generator.

A mutation takes (generator, bytes, other patches) and gives bytes; most keep enough of the form to reach GNU patch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

from fuzz_corpus import EMPTY, OUTSIDE, POOL, SCHED, TABLE

Mutation = Callable[[Random, bytes, Sequence[bytes]], bytes]
_HUNK = re.compile(rb"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@", re.MULTILINE)
_HEADER = re.compile(rb"^(--- |\+\+\+ |diff --git |rename from |rename to |copy from |copy to |Index: )(.*)$", re.MULTILINE)
_NUMBER = re.compile(rb"\d+")
MOST = 300_000  # bytes of a mutated patch, but for the one that is meant to be too long
HUGE = (b"0", b"00", b"-1", b"2147483647", b"2147483648", b"4294967296", b"9223372036854775807", b"9223372036854775808",
        b"99999999999", b"18446744073709551616", b"9" * 400)
PATHS = (
    b"../canary.py", b"../../canary.py", b"../../../canary.py", b"../" * 7 + b"canary.py", b"v1/../../canary.py",
    b"./v1/core/sched.py", b"v1//core/sched.py", b"v1/core/./sched.py", b"v1/core/../core/sched.py", b"/canary.py",
    OUTSIDE + b"/canary.py", OUTSIDE + b"/new.py", b"/" + OUTSIDE + b"/canary.py", b"link.py", b"v1/away/canary.py",
    b"v1/away/new.py", b"v1/dangling.py", b"v1/away/../canary.py", b"", b".", b"..", b"/", b"//", b"~/x.py", b"-x.py",
    b"--help", b"v1/core", b"v1/core/", b"v1/core/sched.py/x.py", b"V1/CORE/SCHED.PY", b"v1\\core\\sched.py", b"C:\\x.py",
    b"v1/core/sched.py\0.txt", b"v1/core/sch\ted.py", b"v1/core/sch ed.py", b"\"v1/core/\\163ched.py\"",
    b"\"b/v1/core/\\163ched.py\"", b"\"b/\\056\\056/canary.py\"", b"\"/tmp/\\000x\"", b"\"unterminated", b"\"\\777\\400\"",
    b"x" * 255, b"x" * 256, b"d/" * 600 + b"x", b"d/" * 30 + b"x", b"\xff\xfe.py", "größe.py".encode(), b"\xe2\x80\xae.py",
    b"\x1b[31m.py", b"[red]x[/red].py", b"$(touch x).py", b"`touch x`.py", b"x.py;touch y", b"csrc/x.cu", b"v1/new.cu",
    b"tests/x.py", b"docs/x.md", b"vllm/v1/core/sched.py", b"vllm/../canary.py", b"vllm", b"setup.py",
    b"v1/core/sched.py.orig", b"v1/core/sched.py.rej", b"v1/core/sched.pyc", b"v1/__pycache__/x.pyc", b"/dev/null", b"dev/null",
    b"/dev/stdout", b"/dev/tty", SCHED.encode(), POOL.encode(), EMPTY.encode(), TABLE.encode())
WORDS = (
    b"--- ", b"+++ ", b"--- a/v1/core/sched.py", b"+++ b/v1/core/sched.py", b"+++ x", b"*** a/v1/core/sched.py",
    b"***************", b"*** 1,2 ****", b"--- 1,2 ----", b"Index: v1/core/sched.py", b"Index: ../canary.py",
    b"Prereq: 4.2", b"Prereq: import", b"1d0", b"1,3c1", b"< import os", b"> import os", b"0a1", b"1s/.*/x/", b".", b"1d",
    b"GIT binary patch", b"literal 5", b"Binary files a/x and b/x differ", b"-- ", b"2.43.0",
    b"\\ No newline at end of file", b"\\", b"\\ Kein Zeilenumbruch am Dateiende.",
    b"diff --git a/v1/core/sched.py b/v1/core/sched.py", b"diff --git a/x b/../canary.py", b"diff --git a/a b b/a b",
    b"rename from v1/core/sched.py", b"rename to v1/core/other.py", b"copy from v1/core/sched.py", b"copy to link.py",
    b"old mode 100644", b"new mode 100755", b"new mode 104755", b"new mode 120000", b"new file mode 120000",
    b"deleted file mode 100644", b"deleted file mode 120000", b"index 0123456..789abcd 120000", b"similarity index 100%",
    b"@@ -1 +1 @@", b"@@ -1,3 +1,3 @@", b"@@ -0,0 +1 @@", b"@@ -1 +0,0 @@", b"@@", b"@@@ -1,1 -1,1 +1,1 @@@", b" ", b"",
    b"\t", b"+", b"-", b"#", b"\r", b"\x0c", b"\xef\xbb\xbf", b"=" * 67, b"Only in a: x", b"patch -p0 < x",
    b"diff -u a/x b/x")
# What an added line may hold that is hard on who reads Python, or wrong in this package.
CODE = (
    b"(" * 3000 + b")" * 3000, b"x = " + b"[" * 150 + b"]" * 150, b"x" + b".a" * 4000, b"x = " + b"-" * 5000 + b"1",
    b"import vllm.nothing", b"from . import *", b"from ......... import x", b"import os; os.environ['VLLM_NOPE']",
    b"os.getenv('VLLM_\xff')", b"\0", b"\x0c", b"if True:", b"# -*- coding: utf-16 -*-", b"# coding: nope", b"def f(:",
    b"x = undefined_name_here", b"'''", b"\\", b"async = 1", b"from vllm.config.model import nothing_of_it",
    b"import vllm.config.model; vllm.config.model.nothing()", b"envs.VLLM_MADE_UP", b"from vllm import logger; logger.nothing",
    b"del LIMIT_v1_core_sched", b"global x", b"x: int = y = 3", b"print 'x'", b"\xff\xfe", "ñ = ß".encode(), b"match x:\n",
    b"x = 1" + b" + 1" * 3000, b"f'{'" * 50, b"lambda: (yield)", b"\t\tx = 1", b"x = 0" + b"9" * 5000,
    b"x = 0x" + b"f" * 5000, b"class A: " + b"\n", b"return await x", b"import " + b"a." * 500 + b"b")


def _lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")


def _some(rng: Random, count: int, most: int = 4) -> tuple[int, int]:
    """A short run [begin, end) of `count` things."""
    begin = rng.randrange(max(1, count))
    return begin, min(count, begin + rng.randint(1, most))


def flip(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 30))):
        if changed:
            at = rng.randrange(len(changed))
            changed[at] = rng.choice((changed[at] ^ (1 << rng.randrange(8)), rng.randrange(256), *b" \n\r\t+-@\\\"/\0"))
    return bytes(changed)


def delete_lines(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = _lines(data)
    begin, end = _some(rng, len(lines))
    return b"\n".join(lines[:begin] + lines[end:])


def repeat_lines(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = _lines(data)
    begin, end = _some(rng, len(lines), rng.choice((1, 4, 40)))
    times = rng.choice((1, 1, 1, 2, 50, 2000))
    more = min(times, 1 + MOST // (1 + sum(map(len, lines[begin:end]))))
    return b"\n".join(lines[:end] + lines[begin:end] * more + lines[end:])


def swap_lines(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = _lines(data)
    one = rng.randrange(len(lines))
    other = rng.randrange(len(lines)) if rng.random() < 0.3 else min(len(lines) - 1, one + 1)
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def trim(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = _lines(data)
    how = rng.randrange(4)
    if how == 0:
        return b"\n".join(line.rstrip() for line in lines)
    if how == 1:
        return data.rstrip(b"\n")
    blank = [at for at, line in enumerate(lines) if line == b" "] if how == 2 else range(len(lines))
    for at in rng.sample(list(blank), min(len(blank), 1 + rng.randrange(2))):
        lines[at] = lines[at].strip() if how == 2 else lines[at].rstrip() if rng.random() < 0.5 else lines[at] + b" "
    return b"\n".join(lines)


def count(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One number of a hunk header, by a little or a lot."""
    found = list(_HUNK.finditer(data))
    if not found:
        return data
    header = rng.choice(found)
    numbers = list(_NUMBER.finditer(data, *header.span()))
    number = rng.choice(numbers)
    value = rng.choice((*HUGE, *(b"%d" % (int(number[0]) + by) for by in (-1, 1, -1, 1, -2, 2, 7, 100))))
    return data[:number.start()] + value + data[number.end():]


def shift(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """All hunks elsewhere by the same lines: they apply with an offset."""
    by = rng.choice((-5, -1, 1, 3, 20, 400))

    def moved(match: re.Match[bytes]) -> bytes:
        words = match[0].split(b" ")
        return b" ".join([words[0], *(_moved(word, by) for word in words[1:3]), words[3]])

    return _HUNK.sub(moved, data)


def _moved(word: bytes, by: int) -> bytes:
    start, comma, lines = word[1:].partition(b",")
    return word[:1] + b"%d" % max(1, int(start) + by) + comma + lines if start != b"0" else word


def context(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One line of a hunk says something else."""
    lines = _lines(data)
    bodies = [at for at, line in enumerate(lines) if line[:1] in (b" ", b"-", b"+") and not line.startswith((b"---", b"+++"))]
    if bodies:
        at = rng.choice(bodies)
        lines[at] = rng.choice((lines[at] + b"!", lines[at][:1] + b"x", rng.choice(b" -+".split(b"?")) + lines[at][1:],
                                bytes([rng.choice(b" -+\\@")]) + lines[at][1:]))
    return b"\n".join(lines)


def code(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """An added line holds trouble for readers of Python."""
    lines = _lines(data)
    added = [at for at, line in enumerate(lines) if line.startswith(b"+") and not line.startswith(b"+++")]
    if added:
        at = rng.choice(added)
        indent = re.match(rb"\+\s*", lines[at])[0]
        lines[at] = rng.choice((indent, b"+", indent + b"    ")) + rng.choice(CODE)
    return b"\n".join(lines)


def path(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Another path in one header, in all of one part, or everywhere."""
    headers = list(_HEADER.finditer(data))
    if not headers:
        return data
    new = rng.choice(PATHS)
    if rng.random() < 0.5:  # both names of it, a/ and b/ kept
        names = [name for _, rest in _HEADER.findall(data) for name in rest.replace(b"\t", b" ").split(b" ")
                 if name.startswith((b"a/", b"b/"))]
        if names:
            old = rng.choice(names)[2:]
            return re.sub(rb"(?<=[ab]/)" + re.escape(old) + rb"(?=\s|$)", lambda _: new, data, flags=re.MULTILINE)
    header = rng.choice(headers)
    words = header[2].split(b" ")
    at = rng.randrange(len(words))
    words[at] = rng.choice((b"a/", b"b/", b"", b"a/", b"b/", b"vllm/", b"a/vllm/", b"../")) + new
    return data[:header.start(2)] + b" ".join(words) + data[header.end(2):]


def creates(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A new file at a path that is asking for trouble: the one thing that always applies."""
    name = rng.choice((b"a/", b"b/", b"b/", b"", b"b/vllm/")) + rng.choice(PATHS)
    git = b"diff --git a/%s b/%s\nnew file mode 100644\n" % (name[2:], name[2:]) if rng.random() < 0.4 else b""
    made = git + b"--- /dev/null\n+++ " + name + b"\n@@ -0,0 +1,2 @@\n+import os\n+WRITTEN = 1\n"
    return rng.choice((made, data + made, made + data))


def truncate(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    if rng.random() < 0.5:
        return data[:rng.randrange(len(data) + 1)]
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines) + 1)
    return b"".join(lines[:at] if rng.random() < 0.7 else lines[at:])


def splice(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    one, two = _lines(data), _lines(other)
    at, cut = rng.randrange(len(one) + 1), rng.randrange(len(two) + 1)
    return b"\n".join(rng.choice((one + two, one[:-1] + two, one[:at] + two[cut:], one[:at] + two[cut:] + one[at:],
                                  one[:at] + two + one[at:])))


def line_ends(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    how = rng.randrange(6)
    if how == 0:
        return data.replace(b"\n", b"\r\n")
    if how == 1:
        return data.replace(b"\n", b"\r")
    if how == 2:
        return data.replace(b"\r\n", b"\n")
    lines = _lines(data)
    if how == 3:  # the lines of hunks alone
        return b"\n".join(line + b"\r" if line[:1] in b" +-" and not line.startswith((b"---", b"+++")) else line
                          for line in lines)
    begin, end = _some(rng, len(lines), 6)
    return b"\n".join([*lines[:begin], *(line + b"\r" for line in lines[begin:end]), *lines[end:]])


def indent(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    by = rng.choice((b" ", b"    ", b"\t", b"X", b" X", b"> ", b"| ", b"#"))
    lines = data.splitlines(keepends=True)
    begin, end = rng.choice(((0, len(lines)), _some(rng, len(lines), 30)))
    copy = [by + line for line in lines[begin:end]]
    return b"".join(rng.choice((lines[:begin] + copy + lines[end:], copy + lines, lines + copy,
                                [b"Words:\n", *copy, b"\n", *lines])))


def twice(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The whole or one hunk of it again, also very often."""
    if rng.random() < 0.6:
        times = min(rng.choice((2, 2, 2, 3, 30, 1000)), 1 + MOST // (1 + len(data)))
        return rng.choice((b"", b"\nAnd again:\n")).join([data] * times)
    begins = [match.start() for match in _HUNK.finditer(data)]
    if not begins:
        return data
    begin = rng.choice(begins)
    end = next((other for other in begins if other > begin), len(data))
    return data[:end] + data[begin:end] + data[end:]


def huge(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    numbers = list(_NUMBER.finditer(data))
    if not numbers:
        return data
    number = rng.choice(numbers)
    return data[:number.start()] + rng.choice(HUGE) + data[number.end():]


def binary(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    noise = rng.randbytes(rng.choice((1, 3, 40, 3000)))
    return rng.choice((data[:at] + noise + data[at:], data[:at] + noise, noise + data, noise))


def words(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Lines that mean something to somebody, anywhere."""
    lines = _lines(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice((0, rng.randrange(len(lines) + 1), rng.randrange(len(lines) + 1), len(lines) - 1))
        lines[at:at] = [rng.choice((b"", b"", b"", b" ", b"\t", b"> ")) + rng.choice(WORDS)]
    return b"\n".join(lines)


def reverse(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Signs the other way round: in already, or un-applied."""
    swap = {b"+": b"-", b"-": b"+"}
    lines = [line if line.startswith((b"---", b"+++")) else swap.get(line[:1], line[:1]) + line[1:] for line in _lines(data)]
    return _HUNK.sub(lambda m: re.sub(rb"-(\S+) \+(\S+)", rb"-\2 +\1", m[0]), b"\n".join(lines))


def odd(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Other encodings, byte order marks, very long lines, nothing at all."""
    at = rng.randrange(len(data) + 1)
    how = rng.randrange(7)
    if how == 0:
        return b""
    if how == 1:
        return b"\xef\xbb\xbf" + data
    if how == 2:
        return data.decode("latin-1").encode("utf-16")
    if how == 3:
        return data[:at] + rng.choice((b"x", b" ", b"@@ -1 +1 @@ ", b"\r", b"\0")) * 20_000 + data[at:]
    if how == 4:
        return data[:at] + rng.choice(("\u2028", "\u0085", "\u200b", "\U0001f600")).encode() + data[at:]
    if how == 5:
        return data.replace(b"\n", b"\n\n")
    return data + rng.choice((b"\n" * 5000, b" \n" * 5000, b"\0" * 500, b"\x1a"))


# Mutations with their weights.
MUTATIONS: dict[Mutation, int] = {
    flip: 8, delete_lines: 8, repeat_lines: 6, swap_lines: 6, trim: 6, count: 8, shift: 10, context: 10, code: 10, path: 12,
    creates: 8, truncate: 5, splice: 7, line_ends: 6, indent: 6, twice: 5, huge: 4, binary: 3, words: 9, reverse: 5, odd: 3}


def mutated(rng: Random, data: bytes, others: Sequence[bytes], times: int) -> bytes:
    for mutate in rng.choices([*MUTATIONS], [*MUTATIONS.values()], k=times):
        data = mutate(rng, data, others)[:2 * MOST]
    return data
