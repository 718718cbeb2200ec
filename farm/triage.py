"""The table patch × pin: what a series does on each of several releases, and what each release has in its place.

Every pin's series is applied patch by patch on a scratch, one that fails left out for the rest.  Then each patch that
does not apply is looked for in that release's pristine package (`farm.upstream`), and each that does is compared with
the nearest older listed release that takes it (`farm.moved`).  A pin without any listed release that takes the patch is
judged by the patch alone.  What is `upstream` a person decides; this shows the evidence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from farm import upstream
from farm.bench import PatchTriage
from farm.errors import UsageError
from farm.hunks import HunkText, Likeness, Place, Word, compare, mapped_place, names_used, similar_place
from farm.moved import LineMap, likeliest, line_map, movement
from farm.records import PatchRow
from farm.rooting import Rooted
from farm.triagetable import MOVED, UPSTREAM, HunkTriage, PinRow, Triaged, TriagePin, TriageTable, in_words
from farm.triagetable import to_json as to_json  # for those who ask triage
from farm.tried import TRIAL, Release, SourceFile, Tried, lay_out, try_series
from farm.upstream import Evidence, Proof

_PAD = 3  # lines shown about a place
_MOST_LINES = 60  # of a place that are kept
_LONGEST = 150  # lines beyond twice a hunk's own: a place that long is none
_AT_ONCE = 8  # pins
_Span = tuple[int, int]  # lines, first and end, from 0


def triage(pins: Sequence[TriagePin]) -> TriageTable:
    """The whole table.  Raises UsageError for a pin named twice, and without GNU patch; never for what is in a patch."""
    labels = [pin.label for pin in pins]
    if twice := [label for at, label in enumerate(labels) if label in labels[:at]]:
        raise UsageError(f"--pin {twice[0]} is given twice; give each pin once")
    rows = tuple(PinRow(p.label, p.version, str(p.package), p.series.directory, p.series.names) for p in pins)
    with tempfile.TemporaryDirectory(prefix="farm-triage-") as folder:
        work = Path(folder)
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # it waits for GNU patch most of the time
            tried = tuple(pool.map(lambda at: _tried(pins[at], work / str(at)), range(len(pins))))
        field = _Field(tuple(pins), tried, work)
        cells = {at: [field.cell(at, one) for one in tried[at]] for at in field.oldest_first}
        return TriageTable(rows, tuple(cell for at in range(len(pins)) for cell in cells[at]))


def of_pin(table: TriageTable, label: str) -> tuple[PatchTriage, ...]:
    """One pin's cells as a job has them, in the order of its series."""
    return tuple(_for_a_job(cell, position) for position, cell in enumerate(c for c in table.cells if c.pin == label))


def _for_a_job(cell: Triaged, position: int) -> PatchTriage:
    told = cell.application
    row = PatchRow(cell.patch, cell.sha256, position, told.hunks, len(told.offsets), max(map(abs, told.offsets), default=0),
                   told.files, cell.status, cell.detail)
    return PatchTriage(row, cell.good and cell.status != UPSTREAM, cell.status == UPSTREAM, cell.status == MOVED, cell.claim,
                       cell.traces)


def _tried(pin: TriagePin, work: Path) -> tuple[Tried, ...]:
    work.mkdir()
    return tuple(try_series(pin.package, pin.version, pin.series.patches, work))


@dataclass(frozen=True)
class _Base:
    """A release that takes the patch: the index of its pin, and how the patch went there."""

    pin: int
    tried: Tried


class _Field:
    """All pins with their series tried; keeps what was compared already.  Its cells are to be asked for oldest pin first."""

    def __init__(self, pins: tuple[TriagePin, ...], tried: tuple[tuple[Tried, ...], ...], work: Path) -> None:
        self.pins, self.tried, self.work = pins, tried, work
        self.releases = [Release(pin.package) for pin in pins]
        self._rank = _ranks([pin.version for pin in pins])
        self.oldest_first = sorted(range(len(pins)), key=lambda at: self._rank[at])
        self._moved: set[tuple[int, str]] = set()  # pin and patch
        self._became: dict[tuple[int, SourceFile], SourceFile | None] = {}
        self._maps: dict[tuple[SourceFile, SourceFile], LineMap] = {}

    def cell(self, at: int, tried: Tried) -> Triaged:
        """One patch on one pin, by the pin's index."""
        base = self._base(at, tried)
        hunks = tuple(self._hunk(at, tried, base, number) for number in range(len(tried.hunks)))
        evidence = tuple(self._evidence(at, tried, base, hunks))
        cell = Triaged(
            patch=tried.patch.name, sha256=tried.patch.sha256, pin=self.pins[at].label, status=tried.application.status.value,
            application=tried.application, hunks=hunks, evidence=evidence,
            base=None if base is None else self.pins[base.pin].label, claim=tried.claim, missing=tried.missing)
        status = UPSTREAM if any(e.enough for e in evidence) else MOVED if tried.applies and cell.moved else cell.status
        if status == MOVED:
            self._moved.add((at, cell.patch))
        cell = replace(cell, status=status)
        return replace(cell, detail=in_words(cell))

    def _takers(self, tried: Tried, at: int) -> list[_Base]:
        return [_Base(i, other) for i, all_tried in enumerate(self.tried) if i != at for other in all_tried
                if other.applies and (other.diff == tried.diff or other.patch.name == tried.patch.name)]

    def _base(self, at: int, tried: Tried) -> _Base | None:
        """The nearest listed release that takes this patch, by its bytes or its name, an older one before a newer.

        For a patch that applies: the nearest older one that takes the same diff (another was made anew by a person) and is
        not itself one where the code has moved: what a person has yet to look at is nothing to compare with.
        """
        takers = self._takers(tried, at)
        if tried.applies:
            takers = [b for b in takers if self._rank[b.pin] < self._rank[at] and b.tried.diff == tried.diff
                      and (b.pin, b.tried.patch.name) not in self._moved]
        return min(takers, key=lambda b: (abs(self._rank[b.pin] - self._rank[at]), self._rank[b.pin]), default=None)

    def _map(self, old: SourceFile, new: SourceFile) -> LineMap:
        if (old, new) not in self._maps:
            self._maps[old, new] = line_map(old.lines, new.lines)
        return self._maps[old, new]

    # --- a hunk's place ---------------------------------------------------------------------

    def _hunk(self, at: int, tried: Tried, base: _Base | None, number: int) -> HunkTriage:
        text, report = tried.hunks[number], tried.reports[number]
        told = HunkTriage(text.name, text.number, text.line,
                          None if report is None else report.state == "succeeded" and not report.fuzz,
                          report.offset if report else 0)
        if tried.applies and base is None:
            return told
        older = self._older(base, tried, number)
        file = self._newer(at, text, older[0] if older else None)
        if file is None:
            word = Word.SAME if text.becomes is None else Word.ABSENT if text.file is None else Word.NO_FILE
            return replace(told, likeness=Likeness(word))
        told = replace(told, there=file.path)
        if text.file is None:
            return _shown(replace(told, likeness=compare(text, Place((), file.lines, 0, frozenset(range(len(file.lines)))))),
                          file, 0, 0)
        if older:
            lines = self._map(older[0], file)
            (first, end), change = older[1], older[2]
            focus = lines.between(*change)
            if focus[1] - focus[0] <= _LONGEST + 2 * len(text.old):
                told = replace(told, likeness=compare(text, mapped_place(lines, first, end)), mapped=True,
                               lost=self._lost(text, older[0], file, tried.before.get(text.name)))
                if tried.applies:
                    told = replace(told, movement=movement(lines, *change, older[0].scopes, file.scopes),
                                   astray=self._astray(base, tried, number))
                return _shown(told, file, *focus)
        start = self._similar(at, tried, number)
        if start is None:
            return replace(told, likeness=Likeness(Word.UNKNOWN))
        first, end = text.change
        return _shown(replace(told, likeness=compare(text, similar_place(text, file.lines, start))), file,
                      start + first, start + end)

    def _older(self, base: _Base | None, tried: Tried, number: int) -> tuple[SourceFile, _Span, _Span] | None:
        """Where a hunk stands in the base pin's pristine file: (file, first and end line, those that it changes) from 0."""
        if base is None:
            return None
        text = tried.hunks[number]
        twin = number if base.tried.diff == tried.diff else _twin(text, base.tried.hunks, number)
        if twin is None or text.file is None or (report := base.tried.reports[twin]) is None:
            return None
        pristine, before = self.releases[base.pin].file(text.file), base.tried.before.get(text.file)
        if pristine is None or before is None:
            return None
        start = base.tried.hunks[twin].start + report.offset
        spans = [(start + first, start + end) for first, end in ((0, len(text.old)), text.change)]
        if before.data != pristine.data:  # earlier patches changed it: back to the release's own lines
            lines = self._map(before, pristine)
            spans = [lines.between(*span) for span in spans]
        return pristine, spans[0], spans[1]

    def _astray(self, base: _Base, tried: Tried, number: int) -> int | None:
        """The line on which GNU patch puts a hunk's change, where most of its lines are kept and stand elsewhere; else None."""
        text, here, there = tried.hunks[number], tried.reports[number], base.tried.reports[number]
        older, newer = base.tried.before.get(text.name), tried.before.get(text.name)
        if older is None or newer is None or here is None or there is None:
            return None
        start, landed = base.tried.hunks[number].start + there.offset, text.start + here.offset
        shifts = [to - at for at, to in enumerate(self._map(older, newer).to[start:start + len(text.old)], start) if to >= 0]
        if 2 * len(shifts) <= len(text.old) or landed - start in shifts:
            return None
        return landed + text.change[0] + 1

    def _newer(self, at: int, text: HunkText, older: SourceFile | None) -> SourceFile | None:
        """The pin's pristine file for a hunk: of its name, of its name after a renaming, or where the release moved it."""
        release = self.releases[at]
        file = release.file(text.name) or (release.file(text.becomes) if text.becomes else None)
        if file is not None or older is None:
            return file
        if (at, older) not in self._became:
            namesakes = release.namesakes(text.name)
            found = likeliest(older.lines, {name: other.lines for name, other in namesakes.items()})
            self._became[at, older] = namesakes[found[0]] if found else None
        return self._became[at, older]

    def _similar(self, at: int, tried: Tried, number: int) -> int | None:
        """Index in the pin's pristine file of a hunk's likeliest place without a base pin: GNU patch's, or the most similar."""
        text, report = tried.hunks[number], tried.reports[number]
        pristine = self.releases[at].file(text.name)
        before = tried.before.get(text.name)
        if pristine is None or before is None:
            return None
        if report is not None and report.state == "succeeded":
            start = text.start + report.offset
        else:
            rejected = next((r for r in tried.application.rejected if r.line == text.line), None)
            if rejected is None or rejected.at is None:
                return None
            start = rejected.at - 1
        return start if before.data == pristine.data else self._map(before, pristine).between(start, start + 1)[0]

    def _lost(self, text: HunkText, older: SourceFile, newer: SourceFile, here: SourceFile | None) -> tuple[str, ...]:
        """Names that the hunk's added lines use, that the older file binds and that this pin's (`here` patched) does not."""
        if not newer.path.endswith(".py"):
            return ()
        maybe = [name for name in names_used(text) if name in older.free and name not in newer.free]
        return tuple(name for name in maybe if name in older.bound and name not in newer.bound
                     and (here is None or name not in here.bound))

    # --- evidence ---------------------------------------------------------------------------

    def _evidence(self, at: int, tried: Tried, base: _Base | None, hunks: Sequence[HunkTriage]) -> list[Evidence]:
        """What speaks for the release having the change.

        Of a patch that applies none of it is enough but its own header; or that its change is there, and it lands elsewhere.
        """
        found: list[Evidence | None] = []
        if tried.rooted is not None and tried.hunks:
            if not tried.applies and self._reverses(at, tried, tried.rooted):
                found.append(Evidence(Proof.REVERSES, True,
                                      f"GNU patch takes it out of {self.pins[at].version} as it is, every hunk at fuzz 0"))
            defined = self._definitions(at, tried, base, hunks)
            untouched = any(h.likeness and h.likeness.word is Word.STANDS and h.likeness.removed for h in hunks)
            found.append(defined and replace(defined, enough=defined.enough and not untouched))  # else a name's coincidence
            if len(hunks) == tried.rooted.hunks:
                sure = all(h.mapped or text.file is None or text.becomes is None
                           for text, h in zip(tried.hunks, hunks, strict=True))
                found.append(upstream.all_there([(h.number, h.file, h.likeness) for h in hunks if h.likeness], sure=sure))
        elsewhere = bool(hunks) and all(h.astray for h in hunks if h.likeness and h.likeness.is_code)
        told = [replace(e, enough=e.enough and (not tried.applies or (elsewhere and e.proof is Proof.SAME_CHANGE)))
                for e in found if e]
        if tried.claim is not None:
            told.append(upstream.claimed(tried.claim, tried.applies, bool(told)))
        return told

    def _reverses(self, at: int, tried: Tried, rooted: Rooted) -> bool:
        pristine = {name: self.releases[at].file(name) for name in rooted.paths}
        if not tried.application.already and pristine == tried.before:
            return False  # tried by `judge` already, on the same files
        lay_out(folder := self.work / str(at) / TRIAL, pristine)
        return upstream.reverses(rooted, folder)

    def _definitions(self, at: int, tried: Tried, base: _Base | None, hunks: Sequence[HunkTriage]) -> Evidence | None:
        """Whether what the patch defines is defined in this release, and in none of those that take the patch."""
        if not any(upstream.defines(text) for text in tried.hunks):
            return None
        names: list[tuple[str, str, str]] = []  # file of the patch, file of the release, qualified name
        for file in dict.fromkeys(h.file for h in hunks):
            there = next((h.there for h in hunks if h.file == file and h.there), file)
            mine = [(text, h) for text, h in zip(tried.hunks, hunks, strict=True) if h.file == file]
            here = self.releases[at].file(there)
            if base is not None and (after := base.tried.after.get(mine[0][0].becomes or file)):
                before = base.tried.before.get(file)
                added = upstream.added_definitions(before.scopes if before else (), after.scopes)
            else:
                added = tuple(name for text, h in mine
                              for name in upstream.named_definitions(text, here.scopes if here else (), h.at))
            names += [(file, there, name) for name in added]
        found = {(there, name): self._defined(at, there)[name] for _, there, name in names if name in self._defined(at, there)}
        before = {self.pins[b.pin].label: any(name in self._defined(b.pin, file) for file, _, name in names)
                  for b in self._takers(tried, at)}
        return upstream.defined_there([(there, name) for _, there, name in names], found, self.pins[at].version, before)

    def _defined(self, at: int, path: str) -> dict[str, int]:
        file = self.releases[at].file(path)
        return {scope.name: scope.first for scope in file.scopes} if file else {}


def _ranks(versions: Sequence[str]) -> list[int]:
    """Each pin's place among all by version; as given where one of them is no version that can be ordered."""
    try:
        order = sorted(range(len(versions)), key=lambda i: (Version(versions[i]), i))
    except InvalidVersion:
        return list(range(len(versions)))
    ranks = [0] * len(versions)
    for rank, at in enumerate(order):
        ranks[at] = rank
    return ranks


def _twin(text: HunkText, others: Sequence[HunkText], number: int) -> int | None:
    """Which of another patch's hunks makes the same change to the same file; the nearest by number."""
    wanted = [line for line in text.lines if line[0] != " "]
    same = [i for i, other in enumerate(others) if other.file == text.file
            and [line for line in other.lines if line[0] != " "] == wanted]
    return min(same, key=lambda i: abs(i - number), default=None)


def _shown(told: HunkTriage, file: SourceFile, first: int, end: int) -> HunkTriage:
    """With the lines about file.lines[first:end], indices from 0."""
    low = max(0, min(first, len(file.lines)) - _PAD)
    high = min(len(file.lines), end + _PAD, low + _MOST_LINES)
    return replace(told, at=low + 1, stands=file.lines[low:high], focus=(first + 1, end + 1))
