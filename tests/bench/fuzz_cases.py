"""One input of the fuzzer: a series directory of a few patches, computed from a seed and a number alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz_corpus import OUTSIDE, Corpus
from fuzz_mutations import mutated

TOO_LONG = 16 << 20  # bytes: what no patch may have
_NAMES = (
    b"../x.patch", b"../../tree/vllm/link.py", b"/etc/hostname", OUTSIDE + b"/canary.py", b"sub/../1.patch", b"./1.patch",
    b"1.patch/", b"//1.patch", b".", b"..", b"/", b"~", b"series", b"sub", b"sub/in.patch", b"fifo.patch", b"folder.patch",
    b"away.patch", b"dangling.patch", b"loop.patch", b"zero.patch", b"ghost.patch", b"1.patc", b"x" * 255 + b".patch",
    b"d/" * 3000, b"y" * 100_000, "flicken-größe.patch".encode(), b"\xff.patch", b"\xe2\x80\xae.patch", b"\x1b[31m.patch",
    b"[red].patch", b"a\0b.patch", b"\x07", b"-p1", b"--help", b"1.patch,2.patch", b"\"1.patch\"", b"'1.patch'",
    b"1.patch;true", b"*.patch", b"#", b"\xef\xbb\xbf1.patch", b"1.patch\xc2\xa0", b"\xe2\x80\xa81.patch", b"\x0b1.patch",
    b"1.patch\x85")
_AFTER = (b" -p0", b" -p1 -R", b" # why", b"\t# why", b"#why", b"  ", b"\t", b" \\", b" 2.patch", b"\r", b" -p1\r", b" #\r",
          b"\xc2\xa0# why")
# What may lie beside the patches: name -> content, or how to make it.
_BESIDE: tuple[tuple[bytes, bytes | str], ...] = (
    (b"old.orig", b"x"), (b"1.patch.rej", b"x"), (b"unlisted.patch", b"x"), (b"unlisted.diff", b""), (b"README.md", b"words"),
    (b"fifo.patch", "fifo"), (b"folder.patch", "folder"), (b"away.patch", "link @OUTSIDE@/canary.py"),
    (b"dangling.patch", "link nothing"), (b"loop.patch", "link loop.patch"), (b"zero.patch", "link /dev/zero"),
    (b"sub/in.patch", b"x"), (b"\xff.patch", b"x"), (b"\x1b[31m.patch", b"x"), (b"[red].patch", b"x"),
    (b"new\nline.patch", b"x"), ("flicken-größe.patch".encode(), b"x"), (b".patch", b""), (b"x" * 249 + b".patch", b"x"),
    (b"SERIES", b"1.patch\n"), (b"old.orig", "folder"))


@dataclass(frozen=True)
class Case:
    """A series directory: relative name -> content, or `fifo`, `folder`, `link TARGET`; and what was done to make it."""

    number: int
    entries: dict[bytes, bytes | str]
    made: str

    def lay_out(self, folder: Path, outside: Path) -> Path:
        """Make it as `folder`, which is not there yet, with the place of the canaries put in."""
        place = os.fsencode(outside)
        os.makedirs(folder)
        for name, what in self.entries.items():
            path = os.path.join(os.fsencode(folder), name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if isinstance(what, bytes):
                with open(path, "wb") as file:
                    file.write(what.replace(OUTSIDE, place))
            elif what == "fifo":
                os.mkfifo(path)
            elif what == "folder":
                os.mkdir(path)
            else:
                os.symlink(what.removeprefix("link ").encode().replace(OUTSIDE, place), path)
        return folder


def make_case(corpus: Corpus, seed: int, number: int) -> Case:
    """The input of this number: the same bytes on every machine with the same Python and the same patches of the repo."""
    rng = Random(f"{seed}-{number}")
    others = [*corpus.patches.values()]
    chosen = rng.choices([*corpus.patches], k=rng.choice((1, 1, 2, 2, 3)))
    if rng.random() < 0.1:
        chosen = ["plain", *chosen[1:], "STACK-on-plain"]
    entries: dict[bytes, bytes | str] = {}
    made = []
    for position, name in enumerate(chosen, 1):
        times = rng.choices((0, 1, 2, 3, 5), (25, 40, 20, 10, 5))[0]
        entries[b"%d.patch" % position] = mutated(rng, corpus.patches[name], others, times)
        made.append(f"{name} x{times}")
    if rng.random() < 0.0005:
        entries[b"1.patch"] = (others[0] * (TOO_LONG // len(others[0]) + 2))[:TOO_LONG + rng.choice((0, 1, 100))]
        made.append("too long")
    listed = b"".join(name + b"\n" for name in entries)
    if rng.random() < 0.35:
        listed = _mutated_list(rng, [*entries])
        made.append("list")
        for name, what in rng.choices(_BESIDE, k=rng.choice((0, 0, 1, 2, 4))):
            entries.setdefault(name, what)
        _odd_list(rng, entries, listed)
    else:
        entries[b"series"] = listed
    return Case(number, entries, ", ".join(made))


def _odd_list(rng: Random, entries: dict[bytes, bytes | str], listed: bytes) -> None:
    """The list, which in a few cases is no plain file, or is not there."""
    what = rng.choices((listed, "folder", "fifo", "link 1.patch", "link nothing", "link series", None),
                       (100, 1, 1, 1, 1, 1, 3))[0]
    if what is not None:
        entries[b"series"] = what


def _mutated_list(rng: Random, names: Sequence[bytes]) -> bytes:
    lines = [*names]
    steps: list[Callable[[], object]] = [
        lambda: lines.pop(rng.randrange(len(lines))) if lines else None,
        lambda: lines.insert(rng.randrange(len(lines) + 1), rng.choice(names)),
        lambda: lines.insert(rng.randrange(len(lines) + 1), rng.choice(_NAMES)),
        lambda: lines.insert(rng.randrange(len(lines) + 1), rng.choice((b"", b" ", b"\t", b"# words", b"  # words", b"#",
                                                                        b"\x0c"))),
        lambda: _set(rng, lines, lambda line: line + rng.choice(_AFTER)),
        lambda: _set(rng, lines, lambda line: rng.choice((b" ", b"\t", b"./", b"#", b"\xef\xbb\xbf")) + line),
        lambda: rng.shuffle(lines),
        lambda: _set(rng, lines, lambda line: rng.choice(_NAMES) + rng.choice((b"", *_AFTER))),
    ]
    for step in rng.choices(steps, k=rng.choice((1, 1, 2, 3, 6))):
        step()
    listed = rng.choices((b"\n", b"\r\n", b"\r", b"\n\n"), (80, 12, 4, 4))[0].join([*lines, b""])
    how = rng.randrange(30)
    if how == 0:
        return listed[:-1]
    if how == 1:
        return rng.choice((b"", b"\n", listed * 500, b"\0" * 40, b"\xff\xfe" + listed,
                           listed.decode("latin-1").encode("utf-16"), rng.randbytes(300), b"x" * 3_000_000,
                           b"ghost.patch\n" * 3000, b"\n" * 50_000, b"".join(b"%d.patch\n" % n for n in range(3000))))
    return listed


def _set(rng: Random, lines: list[bytes], change: Callable[[bytes], bytes]) -> None:
    if lines:
        at = rng.randrange(len(lines))
        lines[at] = change(lines[at])
