"""Why a patch that is well formed does not apply to a tree: in already, only with fuzz, or rejected, hunk by hunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from farm.diffhead import printable
from farm.findings import Application, Rejected, Status
from farm.gnupatch import EACH, FUZZY, REVERSED, HunkReport, PatchReport
from farm.nearest import Places
from farm.outcome import applied
from farm.rooting import Rooted
from farm.trial import Run, Trial
from farm.unidiff import FilePatch, Hunk

MOST_COMPARED = 60  # rejected hunks for which the most similar place is sought
_TELLING = 12  # characters of a line that hardly stands in a file by chance
_MOST_NAMED = 6  # in words; the value has all


def misread(trial: Trial, run: Run) -> Application | None:
    """What GNU patch read otherwise than our parse did; None where the two agree."""
    report, rooted = run.report, trial.rooted
    if report.strange_form is not None:
        return Application(Status.MALFORMED, f"GNU patch took a part of it for {report.strange_form}, which it applies too; a "
                           "patch holds unified diffs alone")
    if report.malformed is not None:
        line, said = report.malformed
        return Application(Status.MALFORMED, f"GNU patch calls it malformed here ({said}). Write the patch anew with diff",
                           line)
    if report.code > 1:
        return Application(Status.REJECTED, f"GNU patch gave up: {report.last_words}", rooted.inside[0].line,
                           hunks=rooted.hunks)
    written = [len(section.hunks) for section in rooted.inside]
    seen = [sum(hunk.part == part for hunk in report.hunks) for part in range(report.parts)]
    same = len(seen) == len(written) and all(s == w or (s < w and report.code) for s, w in zip(seen, written, strict=True))
    if run.strays:
        return Application(Status.MALFORMED, f"GNU patch wrote {printable(min(run.strays))}, which no part of the patch names: "
                           "it takes words that begin with `--- ` or `+++ ` for a name. Quote those words with `> `",
                           rooted.inside[0].line)
    if not same:
        return Application(Status.MALFORMED, f"GNU patch saw {report.parts} files with {len(report.hunks)} hunks where the "
                           f"patch's own diff has {len(written)} with {rooted.hunks}: it reads the headers, or the words "
                           "between, otherwise. Write the patch anew with diff", rooted.inside[0].line)
    return None


def refusal(trial: Trial, run: Run) -> Application | None:
    """Why GNU patch does not apply it at fuzz 0, tried out on fresh copies; None where it does."""
    if not run.report.code and not run.report.failed:
        return None
    rooted = trial.rooted
    back = trial.run(REVERSED, rooted.reversed_data)
    if back.report.code == 0 and back.changed and len(back.report.hunks) == rooted.hunks:
        file, line = _first(rooted, run.report)
        return Application(Status.REJECTED, f"its change is there already ({file}), from this pin or an earlier patch; take it "
                           "out of the series for this pin", line, hunks=rooted.hunks, already=True)
    fuzzy = trial.run(FUZZY, rooted.data)
    if fuzzy.report.code == 0 and not misread(trial, fuzzy):
        return _fuzz(rooted, run, fuzzy.report)
    each = run.report
    if any(hunk.state != "FAILED" for hunk in each.failed):  # passed over with the rest of its part
        again = trial.run(EACH, rooted.data)
        each = each if misread(trial, again) else again.report
    last = len(rooted.inside) - 1
    there = frozenset((last - hunk.part, hunk.number) for hunk in back.report.hunks if hunk.state == "succeeded")
    return _rejection(rooted, run, each if each.failed else run.report, there)


def otherwise(rooted: Rooted, run: Run) -> Application | None:
    """A file of which GNU patch made something else than the patch's own lines say; None where all are as they say.

    Files that several parts name, or that move, are taken at GNU patch's word.
    """
    names = Counter(name for section in rooted.inside for name in rooted.names(section))
    for part, section in enumerate(rooted.inside):
        name, *others = rooted.names(section)
        if not section.hunks or others or names[name] > 1:
            continue
        moves = [hunk.offset for hunk in run.report.hunks if hunk.part == part]
        before, after = run.before[name], run.after[name]
        made = applied(before[0] if before else b"", list(zip(section.hunks, moves, strict=False)))
        if made != (after[0] if after else b""):
            return Application(Status.MALFORMED, f"what GNU patch made of {name} is not what the patch says. Write the patch "
                               "anew with diff, and look at what `patch` is on this machine", section.line)
    return None


def _added_already(run: Run, file: str, hunk: Hunk) -> bool:
    """Whether every run of lines that a hunk adds stands in the file, one of them long enough to say something."""
    state = run.before.get(file)
    by_sign = groupby(hunk.body, key=lambda line: line[:1])
    runs = [b"\n".join(line[1:] for line in lines) for sign, lines in by_sign if sign == b"+"]
    telling = any(len(line.strip()) >= _TELLING for text in runs for line in text.split(b"\n"))
    return state is not None and telling and all(b"\n" + text + b"\n" in b"\n" + state[0] + b"\n" for text in runs)


def _fuzz(rooted: Rooted, run: Run, report: PatchReport) -> Application:
    words = _in_words((_file(rooted, hunk), hunk.number) for hunk in report.fuzzy)
    line = min(_hunk(rooted, hunk).line for hunk in report.fuzzy)
    rejected = _rejected(rooted, run, report.fuzzy, frozenset())
    return Application(Status.FUZZ, f"{words} would apply only with fuzz, that is, with context lines left out."
                       f"{_reasons(rooted, run, rejected, report.fuzzy)} Rebase the patch onto this tree", line,
                       hunks=rooted.hunks, rejected=rejected)


def _rejection(rooted: Rooted, run: Run, report: PatchReport, there: frozenset[tuple[int, int]]) -> Application:
    rejected = _rejected(rooted, run, report.failed, there)
    file, line = _first(rooted, report)
    failing = [rooted.inside[part] for part in sorted({hunk.part for hunk in report.failed})]
    detail, already = f"GNU patch does not apply it: {run.report.last_words}", False
    if failing and all(_absent(rooted, run, section) for section in failing):
        detail = f"it cannot make {file}: something else than a plain file or a directory for it stands there"
        if not failing[0].creates:
            line, detail = failing[0].line, f"{file} is not in this pin's package; rebase the patch onto this pin"
    elif failing and all(section.creates and not _absent(rooted, run, section) for section in failing):
        already = True
        detail = f"it makes {file}, which exists already, from this pin or an earlier patch; take that part out for this pin"
    elif rejected:
        detail = (f"{_in_words((r.file, r.hunk) for r in rejected)} {'does' if len(rejected) == 1 else 'do'} not apply at fuzz "
                  f"0 ({rooted.hunks} hunks in all).{_reasons(rooted, run, rejected, report.failed)} Open the patch there and "
                  f"rebase it onto this pin's {file}, with the patches before it applied")
    return Application(Status.REJECTED, detail, line, hunks=rooted.hunks, rejected=rejected, already=already)


def _reasons(rooted: Rooted, run: Run, rejected: Sequence[Rejected], failed: Sequence[HunkReport]) -> str:
    """What is known of why, as sentences."""
    words = []
    if already := [(r.file, r.hunk) for r in rejected if r.already]:
        words.append(f"{_in_words(already)} {'is' if len(already) == 1 else 'are'} there already.")
    if added := [(r.file, r.hunk) for r, hunk in zip(rejected[:MOST_COMPARED], failed, strict=False)
                 if not r.already and _added_already(run, r.file, _hunk(rooted, hunk))]:
        words.append(f"The lines that {_in_words(added)} would add stand in the file already, though not as the patch has "
                     "them: with fuzz they would stand there twice.")
    if any(hunk.line_ends for hunk in failed):
        words.append("Line ends differ: one of patch and file has CRLF, the other LF.")
    if bound := [(r.file, r.hunk) for r, hunk in zip(rejected, failed, strict=True)
                 if r.wanted and r.stands == r.wanted and _bound_to_the_end(_hunk(rooted, hunk))]:
        words.append(f"The lines of {_in_words(bound)} are in the file, but with less context after its change than before GNU "
                     "patch takes a hunk at the end of a file alone: give it as much after.")
    return "".join(f" {word[0].upper()}{word[1:]}" for word in words)


def _bound_to_the_end(hunk: Hunk) -> bool:
    before, after = hunk.context
    return after < before


def _rejected(rooted: Rooted, run: Run, failed: Sequence[HunkReport],
              there: frozenset[tuple[int, int]]) -> tuple[Rejected, ...]:
    places: dict[str, Places] = {}
    found = []
    for report in failed:
        names, hunk = rooted.names(rooted.inside[report.part]), _hunk(rooted, report)
        name = next((name for name in names if run.before[name] is not None), None)
        at, stands = None, ()
        if name is not None and len(found) < MOST_COMPARED:
            if name not in places:
                places[name] = Places(_lines(run, name))
            at, stands = places[name].nearest(hunk.wanted, hunk.old[0])
        found.append(Rejected(names[-1], report.number, hunk.line, _texts(hunk.wanted), _texts(stands), at,
                              (report.part, report.number) in there))
    return tuple(found)


def _lines(run: Run, name: str) -> list[bytes]:
    state = run.before[name]
    lines = state[0].split(b"\n") if state else []
    return lines[:-1] if lines and not lines[-1] else lines


def _absent(rooted: Rooted, run: Run, section: FilePatch) -> bool:
    return all(run.before[name] is None for name in rooted.names(section))


def _first(rooted: Rooted, report: PatchReport) -> tuple[str, int]:
    """(file, line in the patch) of the first thing that failed."""
    for hunk in report.failed:
        return _file(rooted, hunk), _hunk(rooted, hunk).line
    return rooted.names(rooted.inside[0])[-1], rooted.inside[0].line


def _file(rooted: Rooted, hunk: HunkReport) -> str:
    return rooted.names(rooted.inside[hunk.part])[-1]


def _hunk(rooted: Rooted, report: HunkReport) -> Hunk:
    return rooted.inside[report.part].hunks[report.number - 1]


def _in_words(hunks: Iterable[tuple[str, int]]) -> str:
    """hunk #1 of a.py, hunks #2, #3 of b.py"""
    numbers: dict[str, list[str]] = {}
    for file, number in hunks:
        numbers.setdefault(file, []).append(f"#{number}")
    words = [f"hunk{'' if len(n) == 1 else 's'} {', '.join(n[:_MOST_NAMED])}{' …' if len(n) > _MOST_NAMED else ''} of {file}"
             for file, n in numbers.items()]
    more = f" and of {len(words) - _MOST_NAMED} more files" if len(words) > _MOST_NAMED else ""
    return ", ".join(words[:_MOST_NAMED]) + more


def _texts(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", errors="replace") for line in lines)
