"""Merges of commits that leave their repository alone.  Thin over git's plumbing; needs git 2.38 or newer.

The merging is done by a second, empty repository in a scratch directory that borrows the objects of the first one.
What a merge makes lands there; the repository itself is only read: no work tree, index, ref, lock, hook or config of
it is used or changed, whatever state it is in (bare, a linked worktree, a submodule, shallow, detached, dirty).
(git may set the time stamp of an object file that a merge would have written again.)  Nor do anybody's settings turn
the outcome: the scratch repository has none but those below, so a merge driver that is a command never runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farm.errors import UsageError

DEADLINE_S = 120.0
NEEDED = (2, 38)  # the first with merge-tree --write-tree
_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
# What finds a repository and says whether it may be read: safe.directory lives in the user's own configuration.
_READING = re.compile(r"HOME|XDG_CONFIG_HOME|SUDO_UID|GIT_CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|(KEY|VALUE)_\d+)|"
                      r"GIT_CEILING_DIRECTORIES|GIT_DISCOVERY_ACROSS_FILESYSTEM")
_PINNED = {"merge.renames": "true", "merge.directoryRenames": "conflict", "merge.renameLimit": "7000",
           "merge.renormalize": "false", "gc.auto": "0", "maintenance.auto": "false"}
_NOBODY = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
           for what, value in (("NAME", "farm"), ("EMAIL", "farm@localhost"), ("DATE", "@0 +0000"))}


class GitFailed(UsageError):
    """git ended with an error; the message holds its own words."""


@dataclass(frozen=True)
class Conflict:
    """A path that git cannot merge, and what it calls the conflict: `contents`, `modify/delete`, `add/add`, …"""

    path: str
    kind: str


@dataclass(frozen=True)
class Merge:
    """The tree of a merge.  With conflicts it holds conflict markers in their paths and the merge in all others."""

    tree: str
    conflicts: tuple[Conflict, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A file of a tree.  `path` is relative to the tree that was asked (odd bytes as surrogates, `os.fsencode`)."""

    path: str
    mode: str  # 100644, 100755, 120000 a symbolic link, 160000 a submodule
    oid: str

    @property
    def is_file(self) -> bool:
        return self.mode.startswith("100")


class GitRepository:
    """The repository around a directory, and a scratch one in which merges are made.

    `scratch` is an empty directory of the caller's, who removes it.  `prefix` is where `directory` lies below the
    repository's root, `.` at the root and in a bare one.

    Raises UsageError: no git or one before 2.38, no repository there, or one that git refuses to read.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self._git, self._directory, self._scratch = _modern_git(), directory, scratch
        if not directory.is_dir():
            raise UsageError(f"--repo {directory} is no directory; name one inside of a git repository")
        objects = self._ask("rev-parse", "--path-format=absolute", "--git-path", "objects")
        self.prefix = PurePosixPath(self._ask("rev-parse", "--show-prefix"))
        self.shallow = self._ask("rev-parse", "--is-shallow-repository") == "true"
        self._blobs: dict[str, bytes] = {}
        (scratch / "files").mkdir()
        self._run("init", "--quiet", "--template=", "--object-format", self._ask("rev-parse", "--show-object-format"))
        alternates = scratch / "git" / "objects" / "info" / "alternates"
        alternates.parent.mkdir(exist_ok=True)
        alternates.write_bytes(_quoted(objects))
        if self.shallow:
            shutil.copyfile(self._ask("rev-parse", "--path-format=absolute", "--git-path", "shallow"),
                            scratch / "git" / "shallow")

    def commit_of(self, ref: str) -> str:
        """Object id of the commit that a branch, tag, id or expression such as `HEAD~2` names.  Raises UsageError."""
        try:
            done = self._read("rev-parse", "--verify", "--end-of-options", ref)
        except ValueError as error:  # a NUL
            raise UsageError(f"{ref!a} is no name of a commit") from error
        said, found = _text(done.stderr), _text(done.stdout)
        if "is ambiguous" in said and "refname" in said:
            raise UsageError(f"{ref} is the name of several refs of {self._directory}; write refs/heads/… or refs/tags/…")
        if done.returncode or not _OID.fullmatch(found):
            raise UsageError(f"{ref!r} names no commit of {self._directory}{self._known_refs()}")
        # Peeled over there, since a full id is taken unseen, and a partial clone would go and fetch it.
        peeled = self._try("rev-parse", "--verify", "--quiet", f"{found}^{{commit}}")
        if peeled.returncode:
            raise UsageError(f"{ref} is no commit that {self._directory} has ({found}); fetch it, or name a branch")
        return _text(peeled.stdout)

    def contains(self, whole: str, part: str) -> bool:
        """Whether the history of commit `whole` holds commit `part` already."""
        return self._yes("merge-base", "--is-ancestor", part, whole)

    def related(self, one: str, other: str) -> bool:
        """Whether two commits have an ancestor in common, as far as this clone goes back."""
        return self._yes("merge-base", one, other)

    def heed_attributes(self, tree: str) -> None:
        """Merge as a checkout of this tree would: its .gitattributes say what is binary and what is united by lines."""
        shutil.rmtree(self._scratch / "files")
        (self._scratch / "files").mkdir()
        wanted = [e for e in self.entries(tree, PurePosixPath(".")) if PurePosixPath(e.path).name == ".gitattributes"]
        self.write(wanted, self._scratch / "files")

    def merge(self, ours: str, theirs: str) -> Merge:
        """Merge commit `theirs` into commit `ours`, as `git merge` does with its default strategy and settings."""
        done = self._try("merge-tree", "--write-tree", "--name-only", "--messages", "-z", ours, theirs)
        if done.returncode not in (0, 1):
            raise self._failed("git merge-tree", done)
        tree, *rest = os.fsdecode(done.stdout).split("\0")
        if done.returncode == 0:
            return Merge(tree)
        paths = rest[:rest.index("")]
        kinds = _kinds(rest[len(paths) + 1:])
        return Merge(tree, tuple(Conflict(path, kinds.get(path, "conflict")) for path in paths) or (Conflict("", "conflict"),))

    def commit(self, tree: str, parents: Sequence[str]) -> str:
        """A commit of the scratch repository."""
        return self._run("commit-tree", tree, *(word for parent in parents for word in ("-p", parent)), "-m", "merge")

    def tree_of(self, commit: str) -> str:
        return self._run("rev-parse", "--verify", f"{commit}^{{tree}}")

    def entries(self, tree: str, folder: PurePosixPath) -> tuple[Entry, ...]:
        """All files below a folder of a tree, their paths relative to the folder; none where it is no folder.

        Raises GitFailed for a tree made by hand with `..` in it, which git would not check out either.
        """
        named = "" if folder == PurePosixPath(".") else f"{folder}/"
        done = self._try("ls-tree", "-r", "-z", "--full-tree", tree, *([named] if named else []))
        if done.returncode:
            raise self._failed("git ls-tree", done)
        found = tuple(_entry(record, len(os.fsencode(named))) for record in done.stdout.split(b"\0") if record)
        if wild := next((entry.path for entry in found if _leads_out(entry.path)), None):
            raise GitFailed(f"{self._directory} has a tree with the path {wild!a}, which leads out of it; run git fsck there")
        return found

    def kind_of(self, tree: str, path: PurePosixPath) -> str | None:
        """Mode of what a tree has at a path (040000 is a folder), None where there is nothing."""
        if path == PurePosixPath("."):
            return "040000"
        said = self._run("ls-tree", "-z", "--full-tree", tree, str(path))
        return said.split(" ", 1)[0] if said else None

    def blobs(self, oids: Iterable[str]) -> Mapping[str, bytes]:
        """Contents by object id, kept for the next time."""
        wanted = tuple(dict.fromkeys(oids))
        lacking = [oid for oid in wanted if oid not in self._blobs]
        if lacking:
            done = self._try("cat-file", "--batch", said="\n".join(lacking).encode() + b"\n")
            if done.returncode:
                raise self._failed("git cat-file", done)
            self._blobs.update(zip(lacking, self._contents(done.stdout), strict=True))
        return {oid: self._blobs[oid] for oid in wanted}

    def write(self, entries: Sequence[Entry], folder: Path) -> dict[str, str]:
        """Write files below a folder, as they lie in git.  Returns {path: why} of those that cannot be.

        Symbolic links and submodules are left out, and so is a path that leads out of the folder: git's own checks
        are not on the way of somebody who makes a tree by hand.
        """
        refused = {e.path: why for e in entries if (why := _unwritable(e))}
        contents = self.blobs(e.oid for e in entries if e.path not in refused)
        for entry in entries:
            if entry.path not in refused:
                try:
                    target = folder / entry.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with open(target, "xb") as out:
                        out.write(contents[entry.oid])
                except OSError as error:
                    refused[entry.path] = f"cannot be written here: {error.strerror}"
        return refused

    # --- processes --------------------------------------------------------------------------

    def _ask(self, *arguments: str) -> str:
        done = self._read(*arguments)
        if done.returncode:
            said = _text(done.stderr)
            if "not a git repository" in said:
                raise UsageError(f"{self._directory} is in no git repository; name one with --repo DIR")
            raise GitFailed(f"git refuses to read the repository of {self._directory}: {said.removeprefix('fatal: ')}")
        return os.fsdecode(done.stdout).removesuffix("\n")

    def _read(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run git on the repository itself, for what reads refs and paths alone."""
        kept = {name: value for name, value in os.environ.items() if _READING.fullmatch(name)}
        return self._spawn(["-c", "core.warnAmbiguousRefs=true", "-c", "core.fsmonitor=false", *arguments],
                           self._directory, kept)

    def _try(self, *arguments: str, said: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run git on the scratch repository."""
        settings = [word for name, value in _PINNED.items() for word in ("-c", f"{name}={value}")]
        own = {"HOME": str(self._scratch), "GIT_DIR": str(self._scratch / "git"), "GIT_WORK_TREE": str(self._scratch / "files"),
               "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", **_NOBODY}
        return self._spawn([*settings, *arguments], self._scratch / "files", own, said)

    def _run(self, *arguments: str) -> str:
        done = self._try(*arguments)
        if done.returncode:
            raise self._failed(f"git {arguments[0]}", done)
        return _text(done.stdout)

    def _yes(self, *arguments: str) -> bool:
        done = self._try(*arguments)
        if done.returncode not in (0, 1):
            raise self._failed(f"git {arguments[0]}", done)
        return done.returncode == 0

    def _spawn(self, arguments: Sequence[str], folder: Path, extra: Mapping[str, str],
               said: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        # No fetching of what a partial clone lacks: by name where git knows it, by forbidding every transport elsewhere.
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0",
                       "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_LITERAL_PATHSPECS": "1",
                       "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none", **extra}
        try:
            return subprocess.run([self._git, *arguments], cwd=folder, env=environment, input=said, capture_output=True,
                                  timeout=DEADLINE_S, start_new_session=True, check=False)
        except subprocess.TimeoutExpired as error:
            raise GitFailed(f"git {arguments[-1]} did not finish within {DEADLINE_S:.0f} s in {self._directory}") from error

    def _failed(self, what: str, done: subprocess.CompletedProcess[bytes]) -> GitFailed:
        said = _text(done.stderr) or f"status {done.returncode}"
        return GitFailed(f"{what} failed on {self._directory}: {said}. Is its object database whole (git fsck), and no "
                         "partial clone (git clone --filter=…), whose missing objects are not fetched here?")

    def _known_refs(self) -> str:
        done = self._read("for-each-ref", "--count=12", "--format=%(refname:short)", "refs/heads", "refs/remotes", "refs/tags")
        names = _text(done.stdout).split("\n")
        return f"; it has: {', '.join(names)}" if names != [""] else ", which has no branch yet; commit first"

    def _contents(self, said: bytes) -> Iterator[bytes]:
        """Read the answer of cat-file --batch: `OID blob SIZE`, a line end, the bytes, a line end."""
        at = 0
        while at < len(said):
            end = said.index(b"\n", at)
            words = said[at:end].split()
            if words[-1] == b"missing":
                raise GitFailed(f"{self._directory} lacks the object {words[0].decode()}: its clone is partial (git clone "
                                "--filter=…) or damaged. Run this in a full clone")
            size = int(words[-1])
            yield said[end + 1:end + 1 + size]
            at = end + size + 2


def _modern_git() -> str:
    program = shutil.which("git")
    if program is None:
        raise UsageError("git is not installed: no `git` on PATH; install it (apt-get install git)")
    try:
        said = subprocess.run([program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=10,
                              check=False, env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{program} --version failed: {error}") from error
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < NEEDED:
        raise UsageError(f"merge-check needs git 2.38 or newer (git merge-tree --write-tree); {program} says: "
                         f"{said or 'nothing'}. Install a newer one, or put it first on PATH")
    return program


def _quoted(path: str) -> bytes:
    """A path as objects/info/alternates takes it whatever is in it: in C's quotes."""
    plain = (b"\\%03o" % byte if byte < 32 or byte in b'"\\' else bytes([byte]) for byte in os.fsencode(path))
    return b'"' + b"".join(plain) + b'"\n'


def _kinds(messages: Sequence[str]) -> dict[str, str]:
    """Conflict by path, of merge-tree's messages: a count, that many paths, a type, a text, and so on."""
    kinds: dict[str, str] = {}
    words = iter(messages)
    for count in words:
        if not count.isdigit():
            break
        paths = [next(words) for _ in range(int(count))]
        kind, text = next(words), next(words)
        if kind.startswith("CONFLICT"):
            for path in paths:
                kinds.setdefault(path, kind.removeprefix("CONFLICT").strip(" ()") or text.strip())
    return kinds


def _entry(record: bytes, cut: int) -> Entry:
    facts, path = record.split(b"\t", 1)
    mode, _, oid = facts.decode().split()
    return Entry(os.fsdecode(path[cut:]), mode, oid)


def _unwritable(entry: Entry) -> str | None:
    if entry.mode == "120000":
        return "is a symbolic link, which is not followed; put the file itself there"
    if not entry.is_file:
        return "is a submodule; put the file itself there"
    return "is a path that leads out of its folder" if _leads_out(entry.path) else None


def _leads_out(path: str) -> bool:
    return any(part in ("", ".", "..") for part in path.split("/"))


def _text(said: bytes) -> str:
    return said.decode("utf-8", errors="backslashreplace").strip()
