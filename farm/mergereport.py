"""A merge check for a reader: a table of combinations, a sentence and a next step for each culprit; and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from farm.findings import Problem, Status
from farm.gitseries import Fault
from farm.mergecheck import Combination, MergeReport, Outcome
from farm.tables import print_table

_SAID = 4  # faults that a sentence or a cell names; the rest is counted
_NEXT = {
    Problem.UNLISTED.value: "list {name} in {directory}/series where it belongs in the order, or take the file away",
    Problem.MISSING.value: "put {name} into {directory} again, or take its line out of {directory}/series",
    Problem.DUPLICATE.value: "take one of the lines of {name} out of {directory}/series",
    Problem.NO_SERIES.value: "write {directory}/series again",
    Status.REJECTED.value: "rebase {name} with the patches before it applied",
    Status.FUZZ.value: "rebase {name} with the patches before it applied",
}
_MEND = "mend {directory}/{name}"


def render(report: MergeReport, console: Console) -> None:
    """Print the table, the sentences and the notes."""
    print_table(console, ("merge", "outcome", "what", "comes from"), [
        (c.label, c.outcome.value, _what(c), _origin(c)) for c in report.combinations])
    lines = [*(sentence(c, report) for c in report.culprits), *(f"Note: {note}." for note in report.notes),
             *(f"Judged by: {how}" for how in _judged(report)), _verdict(report)]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def to_json(report: MergeReport) -> dict[str, Any]:
    """Everything, in plain values; `culprits` are the combinations to blame, each with its sentence."""
    return {
        "base": asdict(report.base), "refs": [asdict(side) for side in report.refs], "series": report.series,
        "exit_code": report.exit_code, "notes": list(report.notes),
        "combinations": [_combination(c) for c in report.combinations],
        "culprits": [{"refs": list(c.refs), "sentence": sentence(c, report)} for c in report.culprits],
    }


def sentence(culprit: Combination, report: MergeReport) -> str:
    """Who breaks what, and what to do, of a combination that makes trouble of its own."""
    base, names = report.base.ref, " and ".join(culprit.refs)
    said = []
    if culprit.own_conflict:
        where = _listed([f"{c.path} ({c.kind})" if c.path else c.kind for c in culprit.conflicts])
        said.append(f"{names} {_do(culprit)} not merge{_onto(culprit, base)}: git finds a conflict in {where}. "
                    f"Rebase {_one_of(culprit, base)}, settle it by hand, and check again: only then can it be judged.")
    if faults := culprit.own_faults:
        words = _listed([_words(fault) for fault in faults])
        steps = _listed(list(dict.fromkeys(_step(fault) for fault in faults)))
        if culprit.own_conflict:
            said.append(f"Beside the conflict the series is broken, too: {words}. Then {steps}.")
        elif not culprit.refs:
            said.append(f"{base} is broken by itself: {words}. Mend it first: {steps}.")
        elif len(culprit.refs) == 1:
            said.append(f"{names} breaks the series by itself, merged onto {base}: {words}. On its branch, {steps}.")
        else:
            alone = "no part of them" if len(culprit.refs) > 2 else "neither of them alone"
            said.append(f"{names} break the series together, though git merges them cleanly and {alone} has this: {words}. "
                        f"Rebase {_one_of(culprit, base)}; there {steps}.")
    return " ".join(said)


def _combination(c: Combination) -> dict[str, Any]:
    return {"label": c.label, "refs": list(c.refs), "outcome": c.outcome.value, "culprit": c.culprit,
            "faults": [asdict(fault) for fault in c.faults], "conflicts": [asdict(conflict) for conflict in c.conflicts],
            "stopped_at": c.stopped_at, "inherited_from": c.inherited_from, "gone": list(c.gone),
            "judged": [{"directory": j.directory, "tree": j.tree, "patches": j.patches} for j in c.judged]}


def _what(c: Combination) -> str:
    conflicts = [f"{x.path} ({x.kind})" if x.path else x.kind for x in c.conflicts]
    faults = [f"{f.directory}: {f.name} {f.what}" for f in c.faults]
    none = () if c.judged or c.conflicts else ("no series",)
    return _listed([*conflicts, *faults, *(f"{gone} is gone" for gone in c.gone), *none])


def _origin(c: Combination) -> str:
    """Which combination the trouble begins with; empty where there is none."""
    origins = [c.inherited_from or "itself"] if c.conflicts else []
    return ", ".join(dict.fromkeys([*origins, *(fault.inherited_from or "itself" for fault in c.faults)]))


def _words(fault: Fault) -> str:
    at = "" if fault.line is None else f"line {fault.line}: "
    why = f"{at}{fault.detail.rstrip('.') or ', '.join(fault.places)}".removesuffix(": ")
    return f"{fault.directory}/{fault.name} {fault.what}" + (f" ({why})" if why else "")


def _step(fault: Fault) -> str:
    return _NEXT.get(fault.what, _MEND).format(name=fault.name, directory=fault.directory)


def _listed(words: Sequence[str]) -> str:
    rest = len(words) - _SAID
    return "; ".join(words[:_SAID]) + (f"; and {rest} more" if rest > 0 else "")


def _do(c: Combination) -> str:
    return "does" if len(c.refs) == 1 else "do"


def _onto(c: Combination, base: str) -> str:
    return f" onto {base}" if len(c.refs) == 1 else " with each other"


def _one_of(c: Combination, base: str) -> str:
    if len(c.refs) == 1:
        return f"it onto {base}"
    return f"{c.refs[-1]} onto {base} with {' and '.join(c.refs[:-1])} merged"


def _judged(report: MergeReport) -> list[str]:
    how = {j.directory: j.tree for c in report.combinations for j in c.judged}
    return [f"{directory}: {tree or 'list and syntax alone, no package; give --pin or --source to apply the patches'}"
            for directory, tree in sorted(how.items())]


def _verdict(report: MergeReport) -> str:
    count = len(report.combinations)
    if report.exit_code == 0:
        return f"All {count} green: {report.base.ref} and every merge onto it."
    bad = sum(c.outcome is not Outcome.GREEN for c in report.combinations)
    unseen = " What all refs give together is not known before the conflict is settled." if (
        report.combinations[-1].conflicts and len(report.refs) > 2) else ""
    return f"{bad} of {count} not green. A pair is merged in one order; a merge without conflict is the same in both.{unseen}"
