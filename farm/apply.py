"""One patch on one package: GNU patch decides what applies, our own parse what is fit to be applied.

GNU patch never runs in the package itself but on copies of the files that the patch names; what it made of them is
taken over when all of it is good.  That breaks the hard links of a tree, and nothing else can be reached.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from farm.faults import find_repeat
from farm.findings import Application, Status
from farm.gnupatch import FORWARD
from farm.patchfile import PatchFile
from farm.records import PatchRow, Reason, Verdict
from farm.refusal import misread, otherwise, refusal
from farm.rooting import root_in
from farm.scratch import workplace
from farm.trial import Run, Trial

_MOST_OFFSETS = 8  # in words; the value has all


def judge(package: Path, patch: PatchFile) -> Application:
    """Apply one patch to a `vllm` package directory at fuzz 0 if its status is good; else leave the directory as it was.

    Rooted at the package (`a/v1/core/…`), or at vLLM's repository (`a/vllm/v1/core/…`): of the latter only what lies
    under `vllm/` reaches the tree; tests, docs and the like are put aside.  Byte code of changed files is removed.
    Bad content never raises; UsageError where there is no GNU patch.
    """
    if fault := patch.fault:
        return Application(fault.status, fault.detail, fault.line)
    rooted = root_in(package, patch)
    if isinstance(rooted, Application):
        return rooted
    with workplace() as folder:
        trial = Trial(package, rooted, Path(folder))
        try:
            run = trial.run(FORWARD, rooted.data)
            if bad := misread(trial, run) or refusal(trial, run) or otherwise(rooted, run):
                again = find_repeat(patch.sections)
                return Application(again.status, again.detail, again.line) if again else bad
        except TimeoutError as error:
            return Application(Status.REJECTED, str(error), rooted.inside[0].line, hunks=rooted.hunks)
    if not run.changed:
        return Application(Status.NO_CHANGE, "it applies and changes no byte, name or mode: no evidence could come of it",
                           rooted.inside[0].line, hunks=rooted.hunks)
    _take_over(package, run)
    offsets = tuple(hunk.offset for hunk in run.report.hunks if hunk.offset)
    return Application(Status.OFFSET if offsets else Status.CLEAN, _in_words(offsets), hunks=rooted.hunks, offsets=offsets,
                       files=run.changed)


def apply_patch(package: Path, patch: PatchFile, position: int = 0) -> PatchRow:
    """Judge one patch and apply it; the row says how it went.

    Raises SeriesError where its status is not good; the directory is then as it was.
    """
    found = judge(package, patch)
    if not found.status.good:
        said = found.detail if found.status is Status.REJECTED else f"{found.status.value}: {found.detail}"
        error = patch.error(said, found.line)
        if found.status is Status.NO_CHANGE:
            error.verdict, error.reason = Verdict.INVALID, Reason.NO_CHANGE
        raise error
    return PatchRow(patch=patch.name, sha256=patch.sha256, position=position, hunks=found.hunks,
                    offset_hunks=len(found.offsets), max_offset=max(map(abs, found.offsets), default=0), files=found.files)


def _in_words(offsets: Sequence[int]) -> str:
    if not offsets:
        return ""
    lines = ", ".join(f"{offset:+}" for offset in offsets[:_MOST_OFFSETS])
    return (f"{len(offsets)} {'hunk stands' if len(offsets) == 1 else 'hunks stand'} on other lines than the patch says, by "
            f"{lines}{' …' if len(offsets) > _MOST_OFFSETS else ''}")


def _take_over(package: Path, run: Run) -> None:
    """Give the package what GNU patch made: gone files first, each other one written beside and renamed."""
    for path in sorted(run.changed, key=lambda path: run.after[path] is not None):
        target, state = package / path, run.after[path]
        if state is None:
            target.unlink()
            _prune(target.parent, package)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(prefix=".farm-", dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(state[0])
            os.chmod(beside, state[1])
            os.replace(beside, target)
        _drop_bytecode(target)


def _drop_bytecode(source: Path) -> None:
    for stale in source.parent.glob(f"__pycache__/{source.stem}.*.pyc") if source.suffix == ".py" else ():
        stale.unlink()


def _prune(folder: Path, package: Path) -> None:
    """Remove directories that a removed file left empty, as GNU patch does."""
    while folder != package and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
