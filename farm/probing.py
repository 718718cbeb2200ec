"""Our side of the probe (farm/probe/farm_probe.py): where it is put for a server to load, and what it wrote.

    carried = probing.install(cache)                     # goes on the server's PYTHONPATH
    env |= probing.variables(attest=..., probe=...)      # files of this boot alone; without `probe` it only attests
    probing.check_attested(probing.attested(attest), tree.root)
    reader = probing.Reader(probe)
    mark = reader.mark()
    ...                                                  # a request
    trace = reader.since(mark)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from farm import jsontext
from farm.bench import Card, ProbeTrace
from farm.errors import InvalidMeasurement
from farm.hostfile import open_to_read
from farm.probe import farm_probe
from farm.records import Reason

VERSION = "1"  # of the distribution that vLLM finds the plugin by
PATIENCE_S = 10.0  # for the next step of an engine that still has requests; a chunk on a CPU takes 2 s
POLL_S = 0.005
# What the server itself may have written there is read no further than this, in bytes.
MOST_ATTESTED = 2**20  # a few lines a process
MOST_PROBED = 2**26  # between two looks; an hour of steps is a quarter of it


def install(cache: Path) -> Path:
    """The directory that carries the probe, below `cache`, named by its content; written whole or not at all."""
    info = f"farm_probe-{VERSION}.dist-info"
    files = {
        "farm_probe.py": resources.files("farm.probe").joinpath("farm_probe.py").read_text(encoding="utf-8"),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: farm-probe\nVersion: {VERSION}\n",
        f"{info}/entry_points.txt": "[vllm.general_plugins]\nfarm_probe = farm_probe:load\n",
    }
    store = Path(cache).absolute() / "probe"
    folder = store / hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    store.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=store))
    try:
        for name, text in files.items():
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).write_text(text, encoding="utf-8")
        beside.chmod(0o755)
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def variables(*, attest: Path | None = None, probe: Path | None = None) -> dict[str, str]:
    """What tells the probe where to write; it stays silent about what is not asked for."""
    files = {farm_probe.ATTEST_OUT: attest, farm_probe.PROBE_OUT: probe}
    return {name: str(file) for name, file in files.items() if file is not None}


# --- which package the processes run ------------------------------------------------------------


@dataclass(frozen=True)
class Attestation:
    """What one process said of the vLLM that it had loaded; `files_sha256` as in farm_probe.files_sha256."""

    pid: int
    process: str  # as multiprocessing names it: MainProcess, EngineCore, …
    main: str | None  # module that it was started with
    package: Path
    version: str
    files: int
    files_sha256: str


def attested(path: Path) -> tuple[Attestation, ...]:
    """Every whole attestation in a file, oldest first; none where there is no file.

    Raises InvalidMeasurement (wrong-tree) where a process could not say what it runs.
    """
    wanted = {"pid": int, "process": str, "package": str, "version": str, "files": int, "files_sha256": str}
    lines, _ = _lines(path, 0, MOST_ATTESTED, Reason.WRONG_TREE)
    for line in lines:
        if line.get("event") == "failed":
            raise InvalidMeasurement(f"process {line.get('pid')} could not attest its vLLM: {line.get('detail')} ({path})",
                                     reason=Reason.WRONG_TREE)
    return tuple(
        Attestation(line["pid"], line["process"], line.get("main"), Path(line["package"]), line["version"], line["files"],
                    line["files_sha256"])
        for line in lines
        if line.get("event") == "attest" and all(isinstance(line.get(name), kind) for name, kind in wanted.items()))


def check_attested(attestations: Sequence[Attestation], tree: Path, pids: Collection[int] = ()) -> None:
    """Raise InvalidMeasurement (wrong-tree) unless every process runs the package of `tree`, file by file.

    `pids`: processes that are known to have loaded a vLLM, so that each must have attested.
    """
    package = tree.resolve() / "vllm"
    _, expected = farm_probe.files_sha256(str(package))
    silent = sorted(set(pids) - {a.pid for a in attestations})
    if not attestations or silent:
        whose = f"process {', '.join(map(str, silent))}" if silent else "no process"
        raise _wrong_tree(tree, f"{whose} has {'not ' if silent else ''}attested its vLLM: the farm's plugin was not loaded; "
                          "look for VLLM_PLUGINS or a PYTHONPATH of the profile's own")
    for said in attestations:
        where = f"process {said.pid} ({said.process})"
        if not _is_there(said.package, package):
            raise _wrong_tree(tree, f"{where} has loaded {said.package}; look for another vllm on its PYTHONPATH or in its "
                              "site-packages")
        if said.files_sha256 != expected:
            raise _wrong_tree(tree, f"{where} found other files in {said.package} than there are now; something wrote to the "
                              f"tree since: rm -r {tree}")


def _is_there(said: Path, package: Path) -> bool:
    try:
        return said.resolve() == package
    except (OSError, RuntimeError, ValueError):  # no path at all, or links in a ring
        return False


def _wrong_tree(tree: Path, what: str) -> InvalidMeasurement:
    return InvalidMeasurement(f"the server does not run the tree {tree}: {what}", reason=Reason.WRONG_TREE)


def cards_seen(path: Path) -> tuple[str, ...] | None:
    """UUIDs of the cards that the boot's engines see from inside, as CUDA tells them; None where no engine said."""
    lines, _ = _lines(path, 0, MOST_ATTESTED, Reason.WRONG_CARD)
    said = [line["cards"] for line in lines if line.get("event") == "cards" and isinstance(line.get("cards"), list)]
    return tuple(dict.fromkeys(_uuid(card) for cards in said for card in cards)) if said else None


def check_cards(seen: tuple[str, ...] | None, card: Card) -> None:
    """Raise InvalidMeasurement (wrong-card) unless what an engine sees is the card that it was given, and that alone."""
    if seen is not None and seen != (card.uuid,):
        raise InvalidMeasurement(f"the server was given {card.name} {card.uuid}, but its engine sees "
                                 f"{', '.join(seen) or 'no card'}; look for CUDA_VISIBLE_DEVICES in its profile or start "
                                 "script, and compare nvidia-smi -L", reason=Reason.WRONG_CARD)


def _uuid(said: Any) -> str:
    """As NVML writes it: torch leaves the prefix out.  What is no UUID is shown as it was said."""
    if not isinstance(said, str) or not said.isprintable():
        return f"{said!a:.80}"
    return said if said.startswith(("GPU-", "MIG-")) else f"GPU-{said}"


# --- what the engines held --------------------------------------------------------------------------


@dataclass
class _Engine:
    """One engine's lines so far."""

    pool_blocks: int
    lines: int = 0
    told_at: float = 0.0  # t of its last line
    busy: bool = False  # whether it had requests then


@dataclass(frozen=True)
class _Moment:
    t: float
    engine: str
    used: int
    tokens: int
    retired: tuple[tuple[str, int | None, int | None], ...]


@dataclass
class Reader:
    """Reads the probe's file of one boot while the server writes it.

    An engine writes a step's line before it hands the step's outputs on, so the file holds all of a
    request whose reply has come.  Only where requests go on (of others, or aborted) must `since` wait for the
    step that was being done, and it does so for `patience_s` at most.
    """

    path: Path
    patience_s: float = PATIENCE_S
    _offset: int = 0
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _moments: list[_Moment] = field(default_factory=list)
    _faults: list[str] = field(default_factory=list)

    def mark(self) -> float:
        """Now, on the clock that the probe uses too."""
        return time.monotonic()

    def check(self) -> None:
        """Raise InvalidMeasurement where the server, once healthy, has no engine that is watched."""
        self._read()
        if not self._engines:
            says = "names none" if self.path.exists() else "is not there"
            raise _no_samples(f"the probe watches no engine: {self.path} {says}. The farm's plugin was not loaded (look for "
                              "VLLM_PLUGINS in the profile) or the scheduler is not vLLM's own (--scheduler-cls)")

    def since(self, mark: float) -> ProbeTrace | None:
        """What was seen from `mark` to now; None where the server was booted without the probe (there is no file).

        Several engines count as one pool, and their peak is that of the sum at any moment.  Raises
        InvalidMeasurement (no-samples) where the file cannot hold everything: the probe gave up or does not know
        this vLLM, lines are missing, or a busy engine said nothing for `patience_s`.
        """
        until = time.monotonic()
        if not self.path.exists():
            return None
        self.check()
        while late := [name for name, engine in self._engines.items() if engine.busy and engine.told_at < until]:
            if time.monotonic() - until > self.patience_s:
                raise _no_samples(f"engine {late[0]} has requests but told of no step for {self.patience_s:g} s ({self.path}); "
                                  "look at the server's log")
            time.sleep(POLL_S)
            self._read()
        return self._trace(mark, until)

    def _trace(self, mark: float, until: float) -> ProbeTrace:
        used = dict.fromkeys(self._engines, 0)
        inside, peak = [], 0
        for moment in sorted(self._moments, key=lambda m: m.t):
            if moment.t > until:
                break
            if moment.t >= mark:
                peak = max(peak, sum(used.values()))  # what was held when it began
                inside.append(moment)
            used[moment.engine] = moment.used
            if moment.t >= mark:
                peak = max(peak, sum(used.values()))
        retired = [entry for moment in inside for entry in moment.retired]
        return ProbeTrace(
            steps=sum(moment.tokens > 0 for moment in inside),
            pool_blocks=sum(engine.pool_blocks for engine in self._engines.values()),
            peak_blocks=peak if inside else sum(used.values()),
            retained_before=max((b for _, b, _ in retired if b is not None), default=None),
            retained_after=max((a for _, _, a in retired if a is not None), default=None),
            requests=len({request for request, _, _ in retired}),
        )

    def _read(self) -> None:
        lines, self._offset = _lines(self.path, self._offset, MOST_PROBED, Reason.NO_SAMPLES)
        for line in lines:
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError):
                continue  # none of the probe's: were it a broken one of its own, the count of the next would tell
        if self._faults:
            raise _no_samples(f"the probe gave up: {'; '.join(self._faults)} ({self.path}); teach farm/probe/farm_probe.py, or "
                              "boot without it")

    def _take(self, line: Mapping[str, Any]) -> None:
        match line.get("event"):
            case "engine":
                self._engines[jsontext.text(line["engine"])] = _Engine(jsontext.whole(line["pool_blocks"]))
            case "unknown-api" | "failed" as event:
                self._faults.append(f"{event} in process {line['pid']} of vLLM {line['version']}: {line['detail']}")
            case None:
                self._take_step(line)

    def _take_step(self, line: Mapping[str, Any]) -> None:
        name = line["engine"]
        engine = self._engines[name]
        if line["n"] != engine.lines:
            self._faults.append(f"engine {name} wrote line {line['n']} after line {engine.lines - 1}: lines are lost")
        moments = [_moment(name, t, used, tokens, retired) for t, used, tokens, retired in line["steps"]]
        moments.append(last := _moment(name, line["t"], line["used"], 0, line["retired"]))
        engine.lines, engine.told_at, engine.busy = line["n"] + 1, last.t, bool(line["running"] or line["waiting"])
        self._moments += moments


def _moment(engine: str, t: Any, used: Any, tokens: Any, retired: Any) -> _Moment:
    """Raises TypeError, ValueError."""
    return _Moment(jsontext.number(t), engine, jsontext.whole(used), jsontext.whole(tokens),
                   tuple((jsontext.text(request), _blocks(before), _blocks(after)) for request, before, after in retired))


def _blocks(said: Any) -> int | None:
    return None if said is None else jsontext.whole(said)


@dataclass
class Window:
    """See farm.bench.Probing."""

    _trace: ProbeTrace | None = None

    def trace(self) -> ProbeTrace | None:
        return self._trace


@contextmanager
def probed(reader: Reader | None) -> Iterator[Window]:
    """Take what the probe sees while the block runs.  Raises, at its end, what Reader.since does."""
    window = Window()
    mark = time.monotonic() if reader is None else reader.mark()
    yield window
    if reader is not None:
        window._trace = reader.since(mark)


def _no_samples(what: str) -> InvalidMeasurement:
    return InvalidMeasurement(what, reason=Reason.NO_SAMPLES)


def _lines(path: Path, offset: int, most: int, reason: Reason) -> tuple[list[Mapping[str, Any]], int]:
    """The JSON objects among the whole lines from `offset` on, and where the next line begins; a torn last one is left.

    A patch under test may have put there what it likes.  Raises InvalidMeasurement for what is no file, or longer than `most`.
    """
    try:
        fd = open_to_read(path)
        if fd is None:
            return [], offset
        with open(fd, "rb") as file:
            file.seek(offset)
            if os.fstat(fd).st_size - offset > most:
                raise InvalidMeasurement(f"{path} has grown by more than {most / 2**20:.0f} MiB: that is not the probe's; does "
                                         "the tree write to it?", reason=reason)
            whole, newline, _ = file.read(most).rpartition(b"\n")
    except OSError as error:
        raise InvalidMeasurement(f"{path} is no file of the probe's any more ({error}); does the tree write to it?",
                                 reason=reason) from error
    found = []
    for raw in whole.split(b"\n"):
        try:
            line = jsontext.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found, offset + len(whole) + len(newline)


__all__ = ["Attestation", "Reader", "Window", "attested", "cards_seen", "check_attested", "check_cards", "install", "probed",
           "variables"]
