"""Does a release carry a patch's change already?  Evidence for a person, who decides.  Pure but for `reverses`.

Four kinds: the patch can be taken out of the pristine package; each of its hunks is there (`farm.hunks`); what it
defines is defined there; its own header says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from farm.gnupatch import REVERSED, run_patch
from farm.hunks import HunkText, Likeness, Word
from farm.moved import Scope, innermost
from farm.rooting import Rooted

_DEFINES = re.compile(r"(\s*)(?:async +)?(class|def) +(\w+)")


class Proof(str, Enum):
    """A kind of evidence that a release carries a patch's change."""

    REVERSES = "reverses"  # GNU patch takes the patch out of the pristine package
    SAME_CHANGE = "same-change"
    DEFINITION = "definition"  # what the patch defines is defined there
    HEADER = "header"  # Applied-Upstream in the patch itself: a person's word


@dataclass(frozen=True)
class Evidence:
    """One sign that a release carries a change.  `enough`: the verdict may rest on it, else it is a hint.

    `file` is relative to the package and `line` (from 1) a line of it, where the sign has a place.
    """

    proof: Proof
    enough: bool
    detail: str
    file: str | None = None
    line: int | None = None


# --- (c) what it defines ----------------------------------------------------------------------


def defines(hunk: HunkText) -> bool:
    """Whether one of its added lines looks like a definition."""
    return any(kind == "+" and _DEFINES.match(text) for kind, text in hunk.lines)


def added_definitions(before: Iterable[Scope], after: Iterable[Scope]) -> tuple[str, ...]:
    """Qualified names of classes, their methods and functions that a patched file has and the file before had not.

    What is defined within a function is nobody's to name, and left out.
    """
    known = {scope.name for scope in before}
    scopes = tuple(after)
    functions = tuple(f"{scope.name}." for scope in scopes if scope.is_function)
    return tuple(dict.fromkeys(s.name for s in scopes if s.name not in known and not s.name.startswith(functions)))


def named_definitions(hunk: HunkText, around: Sequence[Scope], at: int | None) -> tuple[str, ...]:
    """The same read from a hunk alone: its lines, its header, else the class at that line (from 1) of the release."""
    found: list[str] = []
    owner = match[1] if (match := re.match(r"class (\w+)", hunk.heading)) else None
    for kind, text in hunk.lines:
        match = _DEFINES.match(text)
        if not match:
            continue
        if not match[1]:
            owner = match[3] if match[2] == "class" else None
        if kind != "+":
            continue
        if match[1] and owner is None and at is not None:
            scope = innermost(around, at, at, kinds=(False,))
            owner = scope.name if scope else None
        if not match[1]:
            found.append(match[3])
        elif owner is not None and len(match[1].expandtabs()) <= 4:
            found.append(f"{owner}.{match[3]}")
    removed = {m[3] for kind, text in hunk.lines if kind == "-" and (m := _DEFINES.match(text))}
    return tuple(name for name in dict.fromkeys(found) if name.rsplit(".", 1)[-1] not in removed)


def defined_there(names: Sequence[tuple[str, str]], found: Mapping[tuple[str, str], int], version: str,
                  takers: Mapping[str, bool]) -> Evidence | None:
    """What the definitions that a patch adds say, each a (file, qualified name); `found` has those of the release, by line.

    `takers` are the pins that take the patch, and whether one of them is defined there before it.  Enough only where all
    are found here and none there: a name alone may have been there always.
    """
    if not found:
        return None
    told = list(dict.fromkeys(name for _, name in found))
    some = ", ".join(told[:5]) + (f" and {len(told) - 5} more" if len(told) > 5 else "")
    share = "" if len(found) == len(set(names)) else f" ({len(found)} of the {len(set(names))} that it adds)"
    having = [pin for pin, has in takers.items() if has]
    since = (f", and in {', '.join(having)}, which takes the patch all the same" if having else
             f" and not in {', '.join(takers)}" if takers else "; since when, no listed pin shows")
    file, line = next((file, line) for (file, _), line in found.items())
    return Evidence(Proof.DEFINITION, bool(takers) and not having and not share,
                    f"{some}, which the patch adds{share}, is defined in {version} ({file}:{line}){since}", file, line)


def claimed(release: str, applies: bool, traces: bool) -> Evidence:
    """A person's word in the patch's header, and whether the source bears it out."""
    borne = "" if traces else ", and nothing in the source was found to show it"
    still = "; the patch still applies here" if applies else ""
    return Evidence(Proof.HEADER, True, f"the patch's own header says so (Applied-Upstream: {release}), which a person wrote"
                                        f"{borne}{still}")


def all_there(hunks: Sequence[tuple[int, str, Likeness]], *, sure: bool) -> Evidence | None:
    """What the hunks (number, file, likeness) say together; hunks without code count for nothing.

    `sure`: each was compared at its own place, found by way of a release that takes the patch, and not at a similar one.
    """
    told = [hunk for hunk in hunks if hunk[2].is_code]
    same = [(number, file) for number, file, like in told if like.word is Word.SAME]
    if not same:
        return None
    files = {file for _, file, _ in hunks}
    names = [f"{number}" if len(files) == 1 else f"{number} of {file}" for number, file in same]
    which = f"hunk{'' if len(same) == 1 else 's'} {', '.join(names[:6])}{' and others' if len(same) > 6 else ''}"
    if len(same) == len(told):
        return Evidence(Proof.SAME_CHANGE, sure, f"every hunk that changes code is there already ({which})")
    return Evidence(Proof.SAME_CHANGE, False, f"of its {len(told)} hunks that change code {len(same)} "
                                              f"{'is' if len(same) == 1 else 'are'} there already ({which})")


def reverses(rooted: Rooted, folder: Path) -> bool:
    """Whether GNU patch takes the patch out of the pristine files of which `folder` has copies, every hunk at fuzz 0.

    Never asked under another patch.  The copies are changed.
    """
    before = [_content(folder / name) for name in rooted.paths]
    try:
        report = run_patch(folder, rooted.reversed_data, strip=rooted.strip, how=REVERSED)
    except TimeoutError:
        return False
    return (report.code == 0 and len(report.hunks) == rooted.hunks and not report.failed and not report.fuzzy
            and before != [_content(folder / name) for name in rooted.paths])


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
