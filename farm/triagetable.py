"""The table patch × pin as values, and as JSON.  Pure; `farm.triage` makes it, `farm.report.triage` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm.findings import Application, Rejected, Status
from farm.hunks import Likeness
from farm.moved import REACH, Movement
from farm.series import Series
from farm.upstream import Evidence, Proof

UPSTREAM, MOVED = "upstream", "clean-but-moved"
ASK = "Ask a person"
GOOD = frozenset({Status.CLEAN.value, Status.OFFSET.value, UPSTREAM, MOVED})


@dataclass(frozen=True)
class TriagePin:
    """A release to triage for: how it was asked for, vLLM's version, its pristine package, and the series meant for it."""

    label: str
    version: str
    package: Path
    series: Series


@dataclass(frozen=True)
class HunkTriage:
    """One hunk on one pin.

    `file` (relative to the package), `number` within it and `line` of its header are the patch's.  `applies`: alone, with
    what came before it in the series, `offset` lines from where it says; None where GNU patch was not asked.
    `likeness` compares it with the pristine.  `there` is the file of the pristine that holds its place, `stands` that
    file's lines from `at` (from 1), and `focus` those (first and end, from 1) in the place of what it changes.  `mapped`:
    found by way of the base pin, else it is the most similar place.  `movement` is what changed near it since the base
    pin.  `lost` are names that its added lines use and that this pin's file no longer has.  `astray` is the line on which
    GNU patch puts its change although its place is another: the same lines stand twice in the file.
    """

    file: str
    number: int
    line: int
    applies: bool | None
    offset: int = 0
    likeness: Likeness | None = None
    there: str | None = None
    at: int | None = None
    stands: tuple[str, ...] = ()
    focus: tuple[int, int] | None = None
    mapped: bool = False
    movement: Movement | None = None
    lost: tuple[str, ...] = ()
    astray: int | None = None


@dataclass(frozen=True)
class Triaged:
    """One patch on one pin.

    `sha256` is of the patch's bytes.  `status` is a word of findings.Status, or UPSTREAM or MOVED.  `base` is the pin that
    it is compared with, one that takes it.  `claim` is the release that the patch's header names as the first to carry it,
    where this pin is that new.  `missing` are earlier patches of the series that are left out here and change a file of
    this one too.
    """

    patch: str
    sha256: str
    pin: str
    status: str
    application: Application
    hunks: tuple[HunkTriage, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    base: str | None = None
    claim: str | None = None
    missing: tuple[str, ...] = ()
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.status in GOOD

    @property
    def moved(self) -> tuple[HunkTriage, ...]:
        """The hunks near which much has changed, whose names are lost, or that land elsewhere."""
        return tuple(h for h in self.hunks if h.lost or h.astray or (h.movement is not None and h.movement.much))

    @property
    def traces(self) -> tuple[str, ...]:
        """What the release's source shows of the change; a claim in the patch's header is no trace."""
        return tuple(e.detail for e in self.evidence if e.proof is not Proof.HEADER)


@dataclass(frozen=True)
class PinRow:
    """A pin of the table: its series' directory and the names that it lists."""

    label: str
    version: str
    package: str
    directory: str
    patches: tuple[str, ...]


@dataclass(frozen=True)
class TriageTable:
    """Pins in the order asked for, patches in that of the first series that lists each, and a cell for each that is listed."""

    pins: tuple[PinRow, ...]
    cells: tuple[Triaged, ...]

    @property
    def patches(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for pin in self.pins for name in pin.patches))

    def cell(self, patch: str, pin: str) -> Triaged | None:
        """None where the pin's series does not list the patch."""
        return next((c for c in self.cells if (c.patch, c.pin) == (patch, pin)), None)

    @property
    def exit_code(self) -> int:
        """0 where every patch applies or is upstream, 1 where one fails on some pin."""
        return 0 if all(cell.good for cell in self.cells) else 1


# --- words ----------------------------------------------------------------------------------


def in_words(cell: Triaged) -> str:
    """What to know of a cell, as sentences; empty for a patch that applies where it says."""
    signs = [_sentence(e.detail) for e in cell.evidence]
    if cell.status == UPSTREAM:
        return " ".join([*signs, f"{ASK} whether the patch can go here."])
    if cell.status == MOVED:
        return " ".join([*(_sentence(_moved(cell, hunk)) for hunk in cell.moved), *signs])
    if cell.application.status.good:
        return " ".join(filter(None, [_sentence(cell.application.detail), *signs]))
    failing = [h for h in cell.hunks if h.applies is False]
    said = [_sentence(_apart(cell, failing))] if failing else []
    if not failing or cell.status != Status.REJECTED.value or any(_there(r) for r in cell.application.rejected):
        said.append(_sentence(cell.application.detail))
    if cell.missing:
        said.append(f"{', '.join(cell.missing)}, left out here before it, changes the same file.")
    for name in dict.fromkeys(name for h in cell.hunks for name in h.lost):
        using = [h for h in cell.hunks if name in h.lost]
        use = "uses" if len(using) == 1 else "use"
        said.append(_sentence(f"{_listed([hunk_name(cell, h) for h in using])} {use} {name}, which the file no longer has"))
    if signs:
        said += [*signs, f"{ASK} whether the rest is needed."]
    if cell.hunks and cell.base is None:
        said.append("No listed pin takes it; list the one that it was made for as well, to see what became of each place.")
    return " ".join(said)


def hunk_name(cell: Triaged, hunk: HunkTriage) -> str:
    """Its number, and its file where the patch has several."""
    return f"{hunk.number}" if len({h.file for h in cell.hunks}) == 1 else f"{hunk.number} of {hunk.file}"


def _apart(cell: Triaged, failing: Sequence[HunkTriage]) -> str:
    said = f"{len(failing)} of {len(cell.hunks)} hunks {'does' if len(failing) == 1 else 'do'} not apply"
    fits = [f"{hunk_name(cell, h)} ({f'offset {h.offset}' if h.offset else 'where it says'})" for h in cell.hunks if h.applies]
    return f"{said}; by {'itself' if len(fits) == 1 else 'themselves'} {_listed(fits)} would" if fits else said


def _listed(names: Sequence[str]) -> str:
    return f"hunk {names[0]}" if len(names) == 1 else f"hunks {', '.join(names[:-1])} and {names[-1]}"


def _there(rejected: Rejected) -> bool:
    """Whether the hunk's lines are in the file, but for line ends: why it does not apply then needs GNU patch's reason."""
    wanted, stands = ([line.rstrip("\r") for line in lines] for lines in (rejected.wanted, rejected.stands))
    return bool(wanted) and wanted == stands


def _moved(cell: Triaged, hunk: HunkTriage) -> str:
    said = []
    if (move := hunk.movement) is not None and move.much:
        said.append(f"{move.near.changed} code lines within {REACH} of it changed since {cell.base}")
        if move.function_gone:
            said.append(f"{move.function}, around it, is gone by that name")
        elif move.in_function is not None and move.in_function.changed:
            said.append(f"{move.in_function.changed} in {move.function}, which had {move.in_function.of}")
    if hunk.astray is not None:
        said.append(f"it lands on line {hunk.astray}, and its place is line {hunk.focus[0] if hunk.focus else hunk.at}")
    if hunk.lost:
        said.append(f"it uses {', '.join(hunk.lost)}, which the file no longer has")
    return f"hunk {hunk_name(cell, hunk)}: {', '.join(said)}"


def _sentence(text: str) -> str:
    """Begun with a capital, unless with the name of a file or of something in the code."""
    text = text.strip()
    if set("/._") & set(text.partition(" ")[0].rstrip(".,:")):
        return text if text.endswith((".", "!", "?")) else f"{text}."
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}" if text else ""


# --- JSON -----------------------------------------------------------------------------------


def to_json(table: TriageTable) -> dict[str, Any]:
    """One object: `pins`, `patches` (names), `cells` (one for each patch that a pin's series lists) and `exit_code`."""
    return {"pins": [asdict(pin) for pin in table.pins], "patches": list(table.patches),
            "cells": [_cell(cell) for cell in table.cells], "exit_code": table.exit_code}


def _cell(cell: Triaged) -> Mapping[str, Any]:
    told = cell.application
    return {
        "patch": cell.patch, "sha256": cell.sha256, "pin": cell.pin, "status": cell.status, "good": cell.good,
        "detail": cell.detail, "base": cell.base, "claim": cell.claim, "missing": list(cell.missing),
        "application": {"status": told.status.value, "detail": told.detail, "line": told.line, "hunks": told.hunks,
                        "offsets": list(told.offsets), "files": list(told.files), "already": told.already},
        "evidence": [{**asdict(e), "proof": e.proof.value} for e in cell.evidence],
        "hunks": [_hunk(h) for h in cell.hunks],
    }


def _hunk(hunk: HunkTriage) -> Mapping[str, Any]:
    like = hunk.likeness
    return {
        "file": hunk.file, "number": hunk.number, "line": hunk.line, "applies": hunk.applies, "offset": hunk.offset,
        "word": like.word.value if like else None,
        "added": {"there": like.there, "of": like.added} if like else None,
        "removed": {"gone": like.gone, "of": like.removed} if like else None,
        "alike": [asdict(alike) for alike in like.alike] if like else [],
        "there": hunk.there, "at": hunk.at, "stands": list(hunk.stands), "focus": list(hunk.focus) if hunk.focus else None,
        "mapped": hunk.mapped, "lost": list(hunk.lost), "astray": hunk.astray,
        "movement": {**asdict(hunk.movement), "much": hunk.movement.much} if hunk.movement else None,
    }
