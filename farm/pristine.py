"""A pin's unpatched `vllm` package on this node, from a wheel or from an interpreter that has it.

Both end as one directory that the farm owns: `vllm/`, `info/` (what the
wheel's dist-info said) and `pristine.json` (facts and manifest), which trees
link from.  Its byte code is compiled here, checked by source hash: such a file
is valid however it is linked or copied, and never stale (a time stamp can lie).
"""

from __future__ import annotations

import base64
import csv
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from farm.errors import EnvironmentBuildError, PinError
from farm.manifest import Manifest, hashes_of, is_bytecode, walk

PACKAGE, INFO, FACTS = "vllm", "info", "pristine.json"
COMPILE_DEADLINE_S = 900.0
_IMPORTABLE = (".py", ".so", ".pyd", ".pyc")
_LOCATE = """
import importlib.metadata as m, json, sys
for name in sys.argv[1:]:
    try:
        d = m.distribution(name)
    except m.PackageNotFoundError:
        continue
    print(json.dumps({"name": name, "version": d.version, "root": str(d.locate_file("")),
          **{f: d.read_text(f) for f in ("RECORD", "METADATA", "entry_points.txt")}}))
    break
"""


@dataclass(frozen=True)
class Pristine:
    """An unpatched package: `package` is the `vllm` directory itself, `info` holds METADATA and entry_points.txt.

    `fingerprint` hashes its content without byte code; `pin` is the name of the pin that asked for it.
    `notes` are findings that change nothing, e.g. files of the wheel that an installed package lacks.
    """

    pin: str
    flavour: str
    version: str
    distribution: str
    package: Path
    info: Path
    fingerprint: str
    notes: tuple[str, ...]
    manifest: Manifest = field(repr=False, compare=False)

    def check(self) -> None:
        """Raise EnvironmentBuildError where a file changed since it came here (by stat, about 30 ms)."""
        if changed := self.manifest.changed(self.package):
            raise EnvironmentBuildError(
                f"pin {self.pin}: its pristine vllm package is not pristine any more: {some(changed)} below {self.package} "
                "changed after it was unpacked, and trees share its files. Find out who wrote there (an in-place edit of a "
                f"tree does it), then: rm -r {self.package.parent} and run again")


@dataclass(frozen=True)
class Installed:
    """A vllm distribution as an interpreter sees it: `root` is its site directory."""

    name: str
    version: str
    root: Path
    record: str
    metadata: str
    entry_points: str


def load(folder: Path, pin: str, flavour: str) -> Pristine | None:
    """The pristine that stands in `folder`, or None."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Pristine(pin, flavour, facts["version"], facts["distribution"], folder / PACKAGE, folder / INFO,
                    facts["fingerprint"], tuple(facts["notes"]), Manifest.from_json(facts["manifest"]))


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """Fill `folder` with the package and dist-info of a wheel, and check both against its RECORD.

    Raises EnvironmentBuildError for a damaged wheel or one without a vllm package.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = archive.infolist()
            tops = {info.filename.split("/", 1)[0] for info in infos}
            dist_info = next(top for top in tops if top.endswith(".dist-info"))
            for info in infos:
                if info.filename.startswith((f"{PACKAGE}/", f"{dist_info}/")):
                    path = archive.extract(info, folder)
                    if info.external_attr >> 16 & 0o111:  # extract() drops the run bits
                        os.chmod(path, 0o755)
    except (zipfile.BadZipFile, StopIteration, EOFError) as error:
        raise EnvironmentBuildError(f"{wheel.name} is damaged ({error or 'no dist-info'}); clear pip's cache "
                                    "(pip cache purge) and run again") from error
    if not (folder / PACKAGE / "__init__.py").is_file():
        raise EnvironmentBuildError(f"{wheel.name} holds no vllm package")
    os.rename(folder / dist_info, folder / INFO)
    changed, missing, added = compare_record((folder / INFO / "RECORD").read_text(encoding="utf-8"), folder)
    if changed or missing or added:
        raise EnvironmentBuildError(f"{wheel.name} is not what its own RECORD says: {some((*changed, *missing, *added))}; "
                                    "clear pip's cache (pip cache purge) and run again")


def locate(python: Path, site: Path | None, names: Iterable[str], cwd: Path) -> Installed | None:
    """What an interpreter has under one of these distribution names.  Raises EnvironmentBuildError if it does not run."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    try:
        done = subprocess.run([str(python), "-c", _LOCATE, *names], capture_output=True, text=True, timeout=60, cwd=cwd,
                              env=environment, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentBuildError(f"{python} cannot be asked for its vllm: {error}") from error
    if not done.stdout.strip():
        return None
    found = json.loads(done.stdout)
    return Installed(found["name"], found["version"], Path(found["root"]), found["RECORD"] or "", found["METADATA"] or "",
                     found["entry_points.txt"] or "")


def check_installed(installed: Installed, version: str, pin: str, file: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare an installed package with its RECORD: (paths from the site that are as recorded, those not there).

    Raises PinError: another version than the pin's, no RECORD, or files that were changed or added by hand.
    """
    if not same_release(installed.version, version):
        raise PinError(f"pin {pin} wants vllm {version}, but {installed.root} has {installed.name} {installed.version}; "
                       "correct the version or the interpreter", file=file)
    if not any(path.startswith(f"{PACKAGE}/") for path, _ in recorded(installed.record)):
        raise PinError(f"pin {pin}: {installed.name} in {installed.root} has no RECORD of a vllm package (an editable "
                       "install?), so nothing shows that it is pristine; install its wheel", file=file)
    changed, missing, added = compare_record(installed.record, installed.root)
    if changed or added:
        words = [f"changed: {some(changed)}"] if changed else []
        words += [f"added: {some(added)}"] if added else []
        raise PinError(f"pin {pin}: vllm in {installed.root} is not what its wheel's RECORD says ({'; '.join(words)}); a "
                       "hand-edited package is no baseline. Reinstall it: pip install --force-reinstall --no-deps "
                       f"{installed.name}=={installed.version}", file=file)
    gone = set(missing)
    return tuple(path for path, digest in recorded(installed.record)
                 if path.startswith(f"{PACKAGE}/") and digest and path not in gone), missing


def take_over(installed: Installed, paths: Iterable[str], folder: Path) -> None:
    """Link (across file systems: copy) these files of an installed package into `folder`."""
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy((installed.root / path).resolve(), target)  # some installers make every file a symbolic link
    (folder / INFO).mkdir()
    for name, text in (("METADATA", installed.metadata), ("entry_points.txt", installed.entry_points),
                       ("RECORD", installed.record)):
        (folder / INFO / name).write_text(text, encoding="utf-8")


def finish(folder: Path, python: Path, version: str, distribution: str, notes: tuple[str, ...] = ()) -> None:
    """Compile byte code, record every file, and write the facts: from here on `load` finds it."""
    # A source that does not compile (a template, say) ends it with status 1 and simply has no byte code.
    subprocess.run([str(python), "-m", "compileall", "-q", "-q", "-j", "0", "--invalidation-mode", "checked-hash", PACKAGE],
                   cwd=folder, timeout=COMPILE_DEADLINE_S, check=False, stdout=subprocess.DEVNULL,
                   env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")})
    manifest = Manifest.of(folder / PACKAGE)
    facts = {"version": version, "distribution": distribution, "fingerprint": manifest.fingerprint, "notes": list(notes),
             "manifest": manifest.to_json()}
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def recorded(record: str) -> list[tuple[str, str]]:
    """(path, hash in hex or "") of a wheel RECORD's lines."""
    rows = []
    for row in csv.reader(record.splitlines()):
        method, _, encoded = row[1].partition("=") if len(row) > 1 else ("", "", "")
        digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex() if method == "sha256" else ""
        rows.append((row[0], digest))
    return rows


def compare_record(record: str, root: Path) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """(changed, missing, added) files of the package below `root/vllm`, against a RECORD.

    Added are files that Python could import; other strays cannot reach a tree, which takes recorded files alone.
    """
    known = {path: digest for path, digest in recorded(record) if path.startswith(f"{PACKAGE}/")}
    hashed = {path.removeprefix(f"{PACKAGE}/"): digest for path, digest in known.items() if digest}
    if not (root / PACKAGE).is_dir():
        return (), tuple(known), ()
    there = {path for path, _ in walk(root / PACKAGE)}
    missing = tuple(f"{PACKAGE}/{path}" for path in hashed if path not in there)
    added = tuple(sorted(f"{PACKAGE}/{path}" for path in there
                         if path.endswith(_IMPORTABLE) and not is_bytecode(path) and f"{PACKAGE}/{path}" not in known))
    facts = hashes_of(root / PACKAGE, [path for path in hashed if path in there])
    return tuple(f"{PACKAGE}/{path}" for path, digest in facts.items() if digest != hashed[path]), missing, added


def same_release(found: str, wanted: str) -> bool:
    """Whether two versions are one release, build labels (`+cpu`) apart."""
    try:
        return Version(found).public == Version(wanted).public
    except InvalidVersion:
        return found == wanted


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A hard link; where the file system refuses one, a copy with the same mtime and mode."""
    try:
        os.link(source, target)
    except OSError:  # another file system, too many links, or a foreign owner's file (protected_hardlinks)
        shutil.copy2(source, target)


def some(names: Iterable[str], most: int = 6) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
