"""GNU patch: is it there, run it, and read what it says.  Thin: one process, one report."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from farm.errors import UsageError

DEADLINE_S = 60.0
_ADVICE = "install GNU patch (apt-get install patch, dnf install patch; on a Mac: brew install gpatch)"
_FILE = re.compile(r"(?:patching|checking) (?:file|symbolic link) (.+?)(?: \((?:renamed|copied|read) from .*\))?$")
_HUNK = re.compile(r"Hunk #(\d+) (succeeded|FAILED|ignored|skipped) at (\d+)"
                   r"(?: with fuzz (?P<fuzz>\d+))?(?: \(offset (?P<offset>-?\d+) lines?\))?")
_MISSING = re.compile(r"can't find file to patch at input line (\d+)")
_MALFORMED = re.compile(r"patch: \*\*\*\* (malformed patch at line (\d+).*|unexpected end.*|.* at line (\d+): .*)")
_FORM = re.compile(r"(?:Hmm\.\.\.)?\s*(?:The next patch looks|Looks) like (?!a unified )(.+?) to me")
_CREATES = re.compile(r"(?:Hmm\.\.\.)?\s*The next patch would create the file (.+),$")
_ALREADY = (("Reversed (or previously applied) patch detected", "its change is there already"),
            ("which already exists!", "it creates a file that exists already"))


@dataclass(frozen=True)
class HunkReport:
    """How one hunk went: its file, its number there (from 1), succeeded | FAILED | ignored | skipped.

    `visit` counts how often the file had come up before: a patch may name one twice.
    """

    file: str
    number: int
    state: str
    visit: int = 0
    offset: int = 0
    fuzz: int = 0


@dataclass(frozen=True)
class PatchReport:
    """What GNU patch said.  Lines are of its input, from 1."""

    code: int
    hunks: tuple[HunkReport, ...]
    malformed: tuple[int | None, str] | None
    missing_file: int | None
    already: str | None
    last_words: str
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


def run_patch(directory: Path, data: bytes, *, strip: int) -> PatchReport:
    """Apply a unified diff below `directory` at fuzz 0, without backups and rejects.

    Never `--batch`, which would silently un-apply a patch that is in already.
    Raises UsageError without GNU patch, TimeoutError past DEADLINE_S seconds.
    """
    command = ["patch", f"-p{strip}", "--unified", "--fuzz", "0", "--forward", "--no-backup-if-mismatch",
               "--reject-file=-", "--quoting-style=literal", "--verbose"]
    try:
        # A session of its own has no terminal: patch would open /dev/tty to ask for a missing file's name.
        done = subprocess.run(command, input=data, cwd=directory, env=_environment(), stdout=subprocess.PIPE,
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
    files: list[str] = ["?"]
    malformed = missing = already = strange = None
    for line in text.splitlines():
        if line.startswith("|"):  # the patch's own words, echoed
            continue
        if match := _FILE.match(line) or _CREATES.match(line):
            files.append(match[1])
        elif match := _HUNK.match(line):
            hunks.append(HunkReport(files[-1], int(match[1]), match[2], files.count(files[-1]) - 1,
                                    int(match["offset"] or 0), int(match["fuzz"] or 0)))
        elif match := _FORM.match(line):
            strange = strange or match[1]
        elif match := _MISSING.match(line):
            missing = missing or int(match[1])
            files.append("?")
        elif match := _MALFORMED.match(line):
            malformed = int(match[2] or match[3]) if match[2] or match[3] else None, match[1]
        else:
            already = already or next((plain for words, plain in _ALREADY if words in line), None)
    words = [line for line in text.splitlines() if line.strip() and not line.startswith("|")]
    return PatchReport(code, tuple(hunks), malformed, missing, already, words[-1] if words else "it said nothing",
                       strange)


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
