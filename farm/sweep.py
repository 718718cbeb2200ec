"""What an earlier life of the farm left on this host: ours is ended and removed, all else is named and left alone.

A supervisor ends its tree whatever becomes of its caller; only where both were killed is anything left.  Each wrote a
record when it started (farm.supervisor), in a folder of this user alone; a record that is still there, of a caller
that is gone, says what to look for: the supervisor and its child by id and start time, and their family by the record's
mark (farm.family).  So nothing is touched of a farm that lives, nor a process that somebody started with a copy of our
environment.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm import folders, jsontext
from farm.diffhead import printable
from farm.family import Process, family, kill
from farm.hostfile import read
from farm.processid import ProcessId
from farm.supervisor import GRACE_S, MARK, REGIONS, STUBBORN_S, parents, regions, remove_regions, started, world

_TOLD = ".told"  # end of the name of a note, among the records, of who told a run what was left alone


@dataclass(frozen=True)
class Life:
    """The record of one supervised tree; `owners` is who started it, then its ancestors up to init."""

    file: Path
    mark: str
    run: str | None
    world: str
    owners: tuple[Process, ...]
    supervisor: Process
    child: Process | None = None
    regions: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Life | None:
        """None where the file is no record: half of one cannot be, but somebody may have written there by hand."""
        try:
            said: Mapping[str, Any] = jsontext.loads(read(file) or "")
            child, run = said.get("child"), said.get("run")
            return cls(file, jsontext.word(said["mark"]), None if run is None else jsontext.word(run),
                       jsontext.word(said["world"]), tuple(_process(p) for p in said["owners"]), _process(said["supervisor"]),
                       None if child is None else _process(child), tuple(map(jsontext.word, said.get("regions", ()))))
        except (OSError, AttributeError, KeyError, TypeError, ValueError):
            return None

    @property
    def over(self) -> bool:
        """Whether who started it is gone, so that nobody but us can come back for what is left."""
        return bool(self.owners) and ProcessId(self.world, *self.owners[0]).gone


@dataclass(frozen=True)
class Swept:
    """What a sweep did and what it left alone, a sentence each, but one alone for folders that are alike."""

    ended: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((*self.ended, *self.untouched))


def records(state: Path) -> Path:
    """The folder of this user's records below the host's state folder.  Raises OSError where it is somebody else's."""
    folder = state / f"lives-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    there = folder.lstat()
    if there.st_uid != os.getuid() or not stat.S_ISDIR(there.st_mode):
        raise PermissionError(f"{folder} is not ours: remove it, or set FARM_HOST_STATE to another folder")
    return folder


def sweep(state: Path, temporary: Iterable[str | Path] | None = None) -> Swept:
    """End and remove what earlier lives left; `state` as for `records`, `temporary` where private folders were made.

    Waits up to GRACE_S + STUBBORN_S seconds for supervisors that are still ending their trees.  Raises OSError.
    """
    ended: list[str] = []
    untouched: list[str] = []
    for life in filter(None, map(Life.read, sorted(records(state).glob("*.json")))):
        if life.over:
            _end(life, ended, untouched)
    for note in records(state).glob(f"*{_TOLD}"):
        if (teller := folders.written_by(note)) is not None and teller.gone:
            note.unlink(missing_ok=True)
    _name_regions(untouched)
    for place in dict.fromkeys(map(str, temporary or (tempfile.gettempdir(), "/tmp"))):
        _clear(Path(place), ended, untouched)
    # Names in a shared folder may be what no terminal should see, and no file of rows takes.
    return Swept(tuple(map(printable, ended)), tuple(map(printable, untouched)))


def first_to_tell(state: Path, run: str) -> bool:
    """Whether no process of this run that is still there has told yet what was left alone on this host; the caller now has.

    What an actor ended itself it tells itself; what all of them see, one tells.  Raises OSError.
    """
    folder = records(state)
    with tempfile.NamedTemporaryFile("w", prefix=".new-", dir=folder, encoding="utf-8") as note:
        json.dump(asdict(ProcessId.here()), note)
        note.flush()
        try:
            os.link(note.name, folder / f"{run}{_TOLD}")  # whole at once: whoever sweeps meanwhile reads it
        except FileExistsError:
            return False
    return True


def _end(life: Life, ended: list[str], untouched: list[str]) -> None:
    _await_supervisor(life)
    mapped = set(life.regions)
    until = time.monotonic() + STUBBORN_S
    told: dict[Process, str] = {}  # also those that end, and so carry no mark any more
    while True:
        found = of_life(life)
        told |= {process: _words(process[0]) for process in found if process not in told}
        mapped |= regions([pid for pid, _ in found])
        for process in found:
            kill(process)
        found = [(pid, began) for pid, began in told if started(pid) == began]
        if not found or time.monotonic() > until:
            break
        time.sleep(0.05)
    whose = f"of run {life.run}" if life.run else "of an earlier life"
    for process, words in told.items():
        if process not in found:
            ended.append(f"ended process {process[0]} ({words}) {whose}, whose farm is gone")
    if found:
        untouched.append(f"processes {', '.join(str(pid) for pid, _ in found)} {whose} outlive SIGKILL; look at them with "
                         "`ps -o pid,stat,wchan,args`: state D is a kernel or driver wait")
        return
    there = {path for path in mapped if os.path.lexists(path)}
    kept = remove_regions(there)
    ended += [f"removed {path} {whose}" for path in sorted(there - set(kept))]
    life.file.unlink(missing_ok=True)


def _await_supervisor(life: Life) -> None:
    until = time.monotonic() + GRACE_S + STUBBORN_S
    while _here(life) and started(life.supervisor[0]) == life.supervisor[1] and time.monotonic() < until:
        time.sleep(0.05)


def of_life(life: Life) -> list[Process]:
    """The processes of a life that are there now, as the module says."""
    if not _here(life):
        return []
    heads = [process for process in (life.supervisor, life.child) if process is not None]
    return family(MARK, life.mark, since=life.supervisor[1], ancestors=life.owners, heads=heads)


def _here(life: Life) -> bool:
    return world() == life.world


def _words(pid: int) -> str:
    """What a process calls itself."""
    with suppress(OSError):
        return Path("/proc", str(pid), "comm").read_text(encoding="utf-8", errors="replace").strip()
    return "?"


def _name_regions(untouched: list[str]) -> None:
    folder, _, start = REGIONS.rpartition("/")
    found = sorted(str(path) for path in Path(folder).glob(f"{start}*"))
    if not found:
        return
    mapped = regions(list(parents()))
    for path in found:  # each by its name: they are few, and large, and somebody must look at each
        with suppress(FileNotFoundError):
            there = os.lstat(path)
            state = "in use" if path in mapped else f"mapped by no process that user {_user(os.getuid())} can see"
            untouched.append(f"{path} ({there.st_size / 2**20:.0f} MiB) of user {_user(there.st_uid)} is {state}, and none of "
                             "ours by record: left alone")


def _clear(place: Path, ended: list[str], untouched: list[str]) -> None:
    strangers: dict[str, list[Path]] = {}
    for folder in sorted(place.glob(f"{folders.PREFIX}*")):
        try:
            there = folder.lstat()
        except OSError:
            continue
        if not stat.S_ISDIR(there.st_mode):
            continue
        owner = folders.owner(folder)
        if there.st_uid != os.getuid():
            strangers.setdefault(f"of user {_user(there.st_uid)}", []).append(folder)
        elif owner is None:
            strangers.setdefault("without a note of whose they are", []).append(folder)
        elif owner.gone:
            shutil.rmtree(folder, ignore_errors=True)
            ended.append(f"removed {folder} of process {owner.pid}, which is gone")
    for whose, found in strangers.items():
        what = f"{found[0]} and {len(found) - 1} more folders" if len(found) > 1 else f"{found[0]}, a folder"
        untouched.append(f"{what} {whose}: left alone")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _process(said: Sequence[int]) -> Process:
    pid, began = said
    return jsontext.whole(pid), jsontext.whole(began)
