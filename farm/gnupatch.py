"""GNU patch: is it there, run it, and read what it says.  Thin: one process, one report."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.errors import UsageError

DEADLINE_S = 10.0
# How to run it.  Never `--batch`, which would silently un-apply a patch that is in already.
FORWARD = ("--fuzz", "0", "--forward")
FUZZY = ("--fuzz", "2", "--forward")  # what `patch` does unasked
EACH = ("--fuzz", "0", "--force")  # goes on where a part looks as if it were in already, hunk by hunk
REVERSED = ("--reverse", "--fuzz", "0", "--force")
_ADVICE = "install GNU patch (apt-get install patch, dnf install patch; on a Mac: brew install gpatch)"
_GARBAGE = "Ignoring the trailing garbage."
_PART = re.compile(rf"Hmm\.\.\.(?!\s*{re.escape(_GARBAGE)})")
_FILE = re.compile(r"(?:patching|checking) (?:file|symbolic link) (.+?)(?: \((?:renamed|copied|read) from .*\))?$")
_HUNK = re.compile(r"Hunk #(\d+) (succeeded|FAILED|ignored|skipped) at (\d+)"
                   r"(?: with fuzz (?P<fuzz>\d+))?(?: \(offset (?P<offset>-?\d+) lines?\))?"
                   r"(?P<ends> \(different line endings\))?")
_MISSING = re.compile(r"can't find file to patch at input line (\d+)")
_MALFORMED = re.compile(r"patch: \*\*\*\* (malformed patch at line (\d+).*|unexpected end.*|.* at line (\d+): .*)")
_FORM = re.compile(r"(?:Hmm\.\.\.)?\s*(?:The next patch looks|Looks) like (?!a unified )(.+?) to me")
_CREATES = re.compile(r"(?:Hmm\.\.\.)?\s*The next patch would create the file (.+),$")
_ALREADY = (("Reversed (or previously applied) patch detected", "its change is there already"),
            ("which already exists!", "it creates a file that exists already"))


@dataclass(frozen=True)
class HunkReport:
    """How one hunk went: its file, its number there (from 1), succeeded | FAILED | ignored | skipped.

    `part` is the place of the file's part among those that GNU patch saw (from 0): a patch may name a file twice.
    """

    file: str
    number: int
    state: str
    part: int = 0
    offset: int = 0
    fuzz: int = 0
    line_ends: bool = False  # it failed for CRLF against LF


@dataclass(frozen=True)
class PatchReport:
    """What GNU patch said.  Lines are of its input, from 1."""

    code: int
    hunks: tuple[HunkReport, ...]
    malformed: tuple[int | None, str] | None
    missing_file: int | None
    already: str | None
    last_words: str
    parts: int = 0  # how many files' parts it saw
    strange_form: str | None = None  # a part that GNU patch read as something else than a unified diff

    @property
    def failed(self) -> tuple[HunkReport, ...]:
        return tuple(h for h in self.hunks if h.state != "succeeded")

    @property
    def fuzzy(self) -> tuple[HunkReport, ...]:
        return tuple(h for h in self.hunks if h.fuzz)


def require_gnu_patch() -> str:
    """Version of GNU patch on this machine, e.g. `2.7.6`.  Raises UsageError where there is none."""
    program = shutil.which("patch")
    if program is None:
        raise UsageError(f"GNU patch is not installed: no `patch` on PATH; {_ADVICE}")
    try:
        said = subprocess.run([program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              timeout=10, env=_environment()).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{program} --version failed: {error}; {_ADVICE}") from error
    if match := re.match(r"GNU patch (\S+)", said):
        return match[1]
    said = (said.splitlines() or ["nothing"])[0]
    raise UsageError(f"{program} is not GNU patch, it says of itself: {said}; {_ADVICE}")


def run_patch(directory: Path, data: bytes, *, strip: int, how: Sequence[str] = FORWARD) -> PatchReport:
    """Apply a unified diff below `directory`, without backups and rejects; `how` is FORWARD or one of its neighbours.

    Raises UsageError without GNU patch, TimeoutError past DEADLINE_S seconds.
    """
    command = ["patch", f"-p{strip}", "--unified", *how, "--no-backup-if-mismatch",
               "--reject-file=-", "--quoting-style=literal", "--verbose"]
    environment = {**_environment(), "TMPDIR": str(directory.absolute())}  # where its temporary files go with the copies
    try:
        # A session of its own has no terminal: patch would open /dev/tty to ask for a missing file's name.
        done = subprocess.run(command, input=data, cwd=directory, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=DEADLINE_S, start_new_session=True)
    except FileNotFoundError:
        require_gnu_patch()
        raise
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"GNU patch did not finish within {DEADLINE_S:.0f} s") from error
    return read_report(done.returncode, done.stdout.decode("utf-8", errors="replace"))


def read_report(code: int, text: str) -> PatchReport:
    """Parse the output of `patch --verbose` under LC_ALL=C."""
    hunks: list[HunkReport] = []
    part, file, taken = -1, "?", False
    malformed = missing = already = strange = None
    for line in text.splitlines():
        if line.startswith("|"):  # the patch's own words, echoed
            continue
        if _PART.match(line):
            part, file, taken = part + 1, "?", False
        elif line.strip() == _GARBAGE:  # said apart from its Hmm where the patch ends without a newline
            part -= 1
        if match := _CREATES.match(line):
            file = match[1]
        elif match := _FILE.match(line):
            part, file, taken = part + (taken or part < 0), match[1], True
        elif match := _HUNK.match(line):
            hunks.append(HunkReport(file, int(match[1]), match[2], max(part, 0), int(match["offset"] or 0),
                                    int(match["fuzz"] or 0), match["ends"] is not None))
        elif match := _FORM.match(line):
            strange = strange or match[1]
        elif match := _MISSING.match(line):
            missing = missing or int(match[1])
        elif match := _MALFORMED.match(line):
            malformed = int(match[2] or match[3]) if match[2] or match[3] else None, match[1]
        else:
            already = already or next((plain for words, plain in _ALREADY if words in line), None)
    words = [line for line in text.splitlines() if line.strip() and line != "done" and not line.startswith("|")]
    return PatchReport(code, tuple(hunks), malformed, missing, already, words[-1] if words else "it said nothing", part + 1,
                       strange)


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
