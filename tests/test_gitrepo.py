"""Merges beside a repository: what they give, that nothing of it changes, and whose settings count."""

import os
import re
import shutil
import subprocess
from pathlib import PurePosixPath

import pytest
from scratch_git import ENVIRONMENT, ScratchGit, fingerprint

from farm.errors import UsageError
from farm.gitrepo import Conflict, Entry, GitFailed, GitRepository

TOP = PurePosixPath(".")
TEN = "".join(f"{n}\n" for n in range(10))


@pytest.fixture
def repo(tmp_path):
    """main holds list (ten lines); `left` changes its first line and adds a file, `right` its last, `clash` its first."""
    made = ScratchGit(tmp_path / "repo")
    made.commit({})
    made.commit({"list": TEN, "dir/kept": "kept\n"})
    made.branch("left", {"list": TEN.replace("0", "left"), "dir/new": "new\n"})
    made.branch("right", {"list": TEN.replace("9", "right")})
    made.branch("clash", {"list": TEN.replace("0", "clash")})
    return made


@pytest.fixture
def opened(repo, tmp_path):
    return open_beside(repo.root, tmp_path)


def open_beside(directory, tmp_path, name="scratch"):
    (tmp_path / name).mkdir()
    return GitRepository(directory, tmp_path / name)


def merged(repository, *refs):
    """Merge commits by name one after the other; returns the last Merge."""
    at, *others = map(repository.commit_of, refs)
    for other in others:
        merge = repository.merge(at, other)
        at = repository.commit(merge.tree, (at, other))
    return merge


def files(repository, merge, folder=TOP):
    entries = repository.entries(merge.tree, folder)
    contents = repository.blobs(entry.oid for entry in entries)
    return {entry.path: contents[entry.oid].decode() for entry in entries}


BOTH = {"list": TEN.replace("0", "left").replace("9", "right"), "dir/kept": "kept\n", "dir/new": "new\n"}


# --- merging --------------------------------------------------------------------------------


def test_a_clean_merge_holds_both_sides(opened):
    merge = merged(opened, "main", "left", "right")
    assert merge.conflicts == ()
    assert files(opened, merge) == BOTH


def test_a_pair_gives_the_same_tree_in_both_orders(opened):
    assert merged(opened, "main", "left", "right").tree == merged(opened, "main", "right", "left").tree


@pytest.mark.parametrize("one, other, conflict", [
    ({"list": "a\n"}, {"list": "b\n"}, Conflict("list", "contents")),
    ({"list": None}, {"list": TEN + "more\n"}, Conflict("list", "modify/delete")),
    ({"both": "a\n"}, {"both": "b\n"}, Conflict("both", "contents")),
    ({"dir/kept": None, "dir": "a file now\n"}, {"dir/more": "x\n"}, Conflict("dir~THEIRS", "file/directory")),
    ({"a\tb\nc": "a\n"}, {"a\tb\nc": "b\n"}, Conflict("a\tb\nc", "contents")),
], ids=["same line", "one deletes", "both add", "file against folder", "odd name"])
def test_a_conflict_names_its_path_and_kind(repo, tmp_path, one, other, conflict):
    for name, change in (("one", one), ("other", other)):
        repo.git("checkout", "-q", "-b", name, "main")
        if "dir" in change:
            repo.git("rm", "-q", "-r", "dir")
            change = {"dir": change["dir"]}
        repo.commit(change)
    repository = open_beside(repo.root, tmp_path)
    found = merged(repository, "other", "one").conflicts
    expected = conflict.path.replace("THEIRS", repository.commit_of("one"))
    assert [(c.path, c.kind) for c in found] == [(expected, conflict.kind)]


def test_the_rest_of_a_conflicting_merge_is_there(opened):
    merge = merged(opened, "left", "clash")
    assert merge.conflicts == (Conflict("list", "contents"),)
    assert files(opened, merge)["dir/new"] == "new\n"


@pytest.mark.parametrize("whole, part, answer", [("left", "main", True), ("main", "left", False), ("left", "left", True)])
def test_contains(opened, whole, part, answer):
    assert opened.contains(opened.commit_of(whole), opened.commit_of(part)) is answer


def test_unrelated_histories_are_told(repo, opened):
    repo.git("checkout", "-q", "--orphan", "stranger")
    repo.commit({"x": "x"})
    assert not opened.related(opened.commit_of("main"), opened.commit_of("stranger"))
    assert opened.related(opened.commit_of("left"), opened.commit_of("right"))
    with pytest.raises(GitFailed, match="unrelated histories"):
        merged(opened, "main", "stranger")


# --- names of commits -----------------------------------------------------------------------


def test_every_usual_name_of_a_commit_is_taken(repo, opened):
    repo.git("tag", "-a", "v1", "-m", "words", "left")
    left = repo.git("rev-parse", "left")
    for name in ("left", "refs/heads/left", "v1", left, left[:10], "v1^{commit}", "left~0"):
        assert opened.commit_of(name) == left, name


@pytest.mark.parametrize("name", [
    "nowhere", "", " ", "--all", "-h", "--help", "main..left", "^main", "main^{tree}", "main:list", "@{upstream}", "a\nb",
    "a\0b", "0" * 40, "--end-of-options", "--", ".", "..", "main left", "\udcff"])
def test_what_names_no_commit_is_refused(opened, name):
    with pytest.raises(UsageError):
        opened.commit_of(name)


def test_an_unknown_name_is_answered_with_the_known_ones(opened):
    with pytest.raises(UsageError, match="'nowhere' names no commit .* it has: clash, left, main, right"):
        opened.commit_of("nowhere")


def test_a_branch_called_like_an_option_is_a_branch(repo, opened):
    repo.git("update-ref", "refs/heads/--output=x", "left")
    assert opened.commit_of("--output=x") == repo.git("rev-parse", "left")
    assert not (repo.root / "x").exists()


def test_a_name_of_two_refs_is_refused(repo, opened):
    repo.git("tag", "left", "right")
    with pytest.raises(UsageError, match="several refs"):
        opened.commit_of("left")
    assert opened.commit_of("heads/left") == repo.git("rev-parse", "refs/heads/left")


def test_a_repository_without_a_commit_says_so(tmp_path):
    ScratchGit(tmp_path / "empty")
    with pytest.raises(UsageError, match="has no branch yet; commit first"):
        open_beside(tmp_path / "empty", tmp_path).commit_of("HEAD")


# --- every form of repository ---------------------------------------------------------------


def bare(repo, tmp_path):
    repo.git("clone", "-q", "--bare", ".", str(tmp_path / "bare.git"))
    return tmp_path / "bare.git"


def linked_worktree(repo, tmp_path):
    repo.git("worktree", "add", "-q", str(tmp_path / "linked"), "left")
    return tmp_path / "linked"


def own_alternates(repo, tmp_path):
    for folder, origin in (("second", "."), ("third", "../second")):
        repo.git("clone", "-q", "--shared", "--mirror", origin, str(tmp_path / folder))
    return tmp_path / "third"


def relative_alternates(repo, tmp_path):
    repo.git("clone", "-q", "--shared", "--mirror", ".", str(tmp_path / "mirror"))
    (tmp_path / "mirror" / "objects" / "info" / "alternates").write_text("../../repo/.git/objects\n")
    return tmp_path / "mirror"


def sub_directory(repo, tmp_path):
    return repo.root / "dir"


def git_directory(repo, tmp_path):
    return repo.root / ".git"


def detached(repo, tmp_path):
    repo.git("checkout", "-q", "--detach", "right")
    return repo.root


def half_merged(repo, tmp_path):
    repo.git("checkout", "-q", "left")
    subprocess.run(["git", "merge", "-q", "clash"], cwd=repo.root, env=ENVIRONMENT, capture_output=True, timeout=60)
    assert (repo.root / ".git" / "MERGE_HEAD").exists()
    return repo.root


def dirty(repo, tmp_path):
    (repo.root / "list").write_text("changed\n")
    (repo.root / "dir" / "new").write_text("untracked\n")
    (repo.root / "staged").write_text("staged\n")
    repo.git("add", "staged")
    return repo.root


def packed(repo, tmp_path):
    repo.git("gc", "-q")
    return repo.root


def locked(repo, tmp_path):
    (repo.root / ".git" / "index.lock").write_text("")
    return repo.root


def submodule(repo, tmp_path):
    around = ScratchGit(tmp_path / "around")
    around.git("submodule", "--quiet", "add", str(repo.root), "sub")
    for name in ("left", "right", "clash"):
        ScratchGit(around.root / "sub").git("branch", "-q", name, f"origin/{name}")
    return around.root / "sub"


def odd_place(repo, tmp_path):
    return shutil.move(repo.root, tmp_path / 'o"d\n:pl\\ace é')


@pytest.mark.parametrize("form", [
    bare, linked_worktree, own_alternates, relative_alternates, sub_directory, git_directory, detached, half_merged, dirty,
    packed, locked, submodule, odd_place], ids=lambda form: form.__name__)
def test_every_form_of_repository_merges_and_stays_as_it_was(repo, tmp_path, form):
    directory = form(repo, tmp_path)
    before = fingerprint(tmp_path)
    repository = open_beside(directory, tmp_path)
    assert files(repository, merged(repository, "main", "left", "right")) == BOTH
    assert merged(repository, "left", "clash").conflicts
    shutil.rmtree(tmp_path / "scratch")
    assert fingerprint(tmp_path) == before


def test_sha256_repositories(tmp_path):
    made = ScratchGit(tmp_path / "repo", "--object-format=sha256")
    made.commit({"list": TEN})
    made.branch("left", {"list": TEN.replace("0", "left"), "dir/new": "new\n", "dir/kept": "kept\n"})
    made.branch("right", {"list": TEN.replace("9", "right")})
    before = fingerprint(made.root)
    repository = open_beside(made.root, tmp_path)
    assert len(repository.commit_of("left")) == 64
    assert files(repository, merged(repository, "main", "left", "right")) == BOTH
    assert fingerprint(made.root) == before


def test_a_shallow_clone_merges_where_its_history_reaches(repo, tmp_path):
    repo.commit({"later": "x"})
    url = f"file://{repo.root}"
    repo.git("clone", "-q", "--depth=2", "--no-single-branch", url, str(tmp_path / "deep"))
    repo.git("clone", "-q", "--depth=1", "--no-single-branch", url, str(tmp_path / "flat"))
    deep, flat = open_beside(tmp_path / "deep", tmp_path), open_beside(tmp_path / "flat", tmp_path, "scratch2")
    assert deep.shallow and flat.shallow
    refs = ("origin/main", "origin/left", "origin/right")
    assert files(deep, merged(deep, *refs)) == {**BOTH, "later": "x"}
    assert not flat.related(*map(flat.commit_of, refs[1:]))


def test_a_partial_clone_is_not_filled_up(repo, tmp_path):
    repo.git("config", "uploadpack.allowFilter", "true")
    repo.git("clone", "-q", "--filter=blob:none", "--no-checkout", f"file://{repo.root}", str(tmp_path / "partial"))
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/fetched\n")
    trap.chmod(0o755)
    ScratchGit(tmp_path / "partial").git("config", "remote.origin.uploadpack", str(trap))
    before = fingerprint(tmp_path / "partial")
    repository = open_beside(tmp_path / "partial", tmp_path)
    with pytest.raises(GitFailed, match="partial clone"):
        merged(repository, "origin/main", "origin/left", "origin/right")
    with pytest.raises(UsageError, match="fetch it"):
        repository.commit_of("1" * 40)
    with pytest.raises(UsageError, match="names no commit"):
        repository.commit_of("1" * 40 + "^{commit}")
    assert not (tmp_path / "fetched").exists()
    assert fingerprint(tmp_path / "partial") == before


def test_the_prefix_is_where_the_directory_lies(repo, tmp_path):
    assert open_beside(repo.root, tmp_path, "s1").prefix == TOP
    assert open_beside(repo.root / "dir", tmp_path, "s2").prefix == PurePosixPath("dir")
    assert open_beside(bare(repo, tmp_path), tmp_path, "s3").prefix == TOP


# --- refusals -------------------------------------------------------------------------------


def test_no_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="is in no git repository; name one with --repo"):
        open_beside(tmp_path, tmp_path)
    with pytest.raises(UsageError, match="is no directory"):
        open_beside(tmp_path / "nowhere", tmp_path, "s2")


def fake_git(folder, says):
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{says}\n")
    (folder / "git").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("says, words", [
    ("echo git version 2.37.9", "needs git 2.38 or newer .* says: git version 2.37.9"),
    ("echo git version 1.99", "needs git 2.38"),
    ("echo hello", "says: hello"),
    ("exit 1", "says: nothing"),
])
def test_a_git_that_is_too_old(repo, tmp_path, monkeypatch, says, words):
    monkeypatch.setenv("PATH", fake_git(tmp_path / "bin", says))
    with pytest.raises(UsageError, match=words):
        open_beside(repo.root, tmp_path)


def test_no_git(repo, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="git is not installed"):
        open_beside(repo.root, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a repository of somebody else's")
def test_a_stranger_s_repository_is_refused_until_it_is_declared_safe(repo, tmp_path, monkeypatch):
    for path in (repo.root, repo.root / ".git"):
        os.chown(path, 12345, 12345)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(GitFailed, match="dubious ownership[^$]*safe.directory"):
        open_beside(repo.root, tmp_path, "s1")
    (home / ".gitconfig").write_text(f"[safe]\ndirectory = {repo.root}\n")
    assert open_beside(repo.root, tmp_path, "s2").commit_of("main") == subprocess.run(
        ["git", "rev-parse", "main"], cwd=repo.root, env={**ENVIRONMENT, "GIT_CONFIG_GLOBAL": str(home / ".gitconfig")},
        capture_output=True, text=True, timeout=60).stdout.strip()


# --- whose settings count -------------------------------------------------------------------


def test_nothing_that_a_repository_or_a_user_has_configured_runs(repo, tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    (tmp_path / "home").mkdir()
    settings = (f"[core]\nfsmonitor = {trap}\nhooksPath = {tmp_path}/hooks\npager = {trap}\nalternateRefsCommand = {trap}\n"
                f"attributesFile = {tmp_path}/attributes\n[merge]\nrenames = false\ndefault = trap\n"
                f"[merge \"trap\"]\ndriver = {trap}\n[filter \"trap\"]\nclean = {trap}\nsmudge = {trap}\nprocess = {trap}\n"
                f"[diff \"trap\"]\ntextconv = {trap}\ncommand = {trap}\n[alias]\nmerge-tree = !{trap}\n"
                "[user]\nuseConfigOnly = true\n[commit]\ngpgSign = true\n")
    (tmp_path / "home" / ".gitconfig").write_text(settings)
    with open(repo.root / ".git" / "config", "a") as config:
        config.write(settings)
    (tmp_path / "attributes").write_text("* merge=trap filter=trap diff=trap\n")
    (repo.root / ".git" / "info" / "attributes").write_text("* merge=trap filter=trap diff=trap\n")
    (repo.root / ".gitattributes").write_text("* merge=trap filter=trap diff=trap\n")
    (tmp_path / "hooks").mkdir()
    for hook in ("reference-transaction", "post-index-change", "pre-merge-commit", "post-checkout"):
        shutil.copy(trap, tmp_path / "hooks" / hook)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in {"GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere", "GIT_OBJECT_DIRECTORY": "/nowhere",
                        "GIT_WORK_TREE": "/nowhere", "GIT_EXTERNAL_DIFF": str(trap), "GIT_PAGER": str(trap),
                        "GIT_TRACE2_EVENT": str(tmp_path / "sprung"), "GIT_NAMESPACE": "x"}.items():
        monkeypatch.setenv(name, value)
    repository = open_beside(repo.root, tmp_path)
    repository.heed_attributes(repository.tree_of(repository.commit_of("main")))
    assert files(repository, merged(repository, "main", "left", "right")) == BOTH
    assert merged(repository, "left", "clash").conflicts
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("attribute, conflicts, united", [
    ("list merge=union", (), True),
    ("list -merge", (Conflict("list", "binary"),), False),
    ("list merge=made-up", (), False),
    ("*.patch merge=union", (), False),
])
def test_attributes_of_the_tree_count_and_those_of_the_work_tree_do_not(tmp_path, attribute, conflicts, united):
    made = ScratchGit(tmp_path / "repo")
    made.commit({"list": TEN, ".gitattributes": f"{attribute}\n"})
    made.branch("left", {"list": TEN.replace("0", "left")})
    made.branch("right", {"list": TEN.replace("9", "right")})
    made.branch("clash", {"list": TEN.replace("0", "clash")})
    (made.root / ".gitattributes").write_text("list -merge\n" if united else "list merge=union\n")
    repository = open_beside(made.root, tmp_path)
    repository.heed_attributes(repository.tree_of(repository.commit_of("main")))
    assert merged(repository, "main", "left", "right").conflicts == conflicts
    clash = merged(repository, "left", "clash")
    assert (clash.conflicts == ()) is united
    if united:
        assert files(repository, clash)["list"].startswith("left\nclash\n1\n")


# --- files of a tree ------------------------------------------------------------------------


def test_entries_below_a_folder(repo, opened):
    repo.git("checkout", "-q", "left")
    (repo.root / "dir" / "link").symlink_to("/etc/passwd")
    os.symlink("new", os.fsencode(repo.root) + b"/dir/odd\xff\n")
    (repo.root / "dir" / "new").chmod(0o755)
    repo.commit({"dir/deep/er": "x", "dirt/no": "x"})
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{opened.commit_of('main')},dir/sub")
    repo.git("commit", "-q", "-m", "sub")
    tree = opened.tree_of(opened.commit_of("left"))
    found = {entry.path: entry.mode for entry in opened.entries(tree, PurePosixPath("dir"))}
    assert found == {"deep/er": "100644", "kept": "100644", "link": "120000", "new": "100755", "odd\udcff\n": "120000",
                     "sub": "160000"}
    assert opened.entries(tree, PurePosixPath("dir/kept")) == ()
    assert opened.entries(tree, PurePosixPath(":(literal)dir")) == ()
    kinds = [opened.kind_of(tree, PurePosixPath(p)) for p in ("dir", "dir/link", "dir/sub", "dir/new", "no", ".", "d*")]
    assert kinds == ["040000", "120000", "160000", "100755", None, "040000", None]


def test_write_puts_files_as_they_lie_in_git_and_nothing_else(repo, tmp_path, opened):
    """No filter, no line ends turned, no link made, and no way out of the folder."""
    repo.commit({".gitattributes": "* text eol=crlf ident\n", "dir/crlf": b"a\n$Id$\n", "dir/odd \t": b"\x00\xff"})
    oid = repo.git("hash-object", "-w", "--stdin", said=b"evil")
    out = tmp_path / "out"
    out.mkdir()
    escapes = [Entry(path, "100644", oid) for path in ("../evil", "dir/../../evil", "/evil", "a//b", "x" * 300)]
    special = [Entry("link", "120000", oid), Entry("sub", "160000", oid)]
    whole = opened.entries(opened.tree_of(opened.commit_of("main")), TOP)
    twice = [Entry("list", "100644", oid), Entry("list/below", "100644", oid)]
    refused = opened.write([*escapes, *special, *whole, *twice], out)
    assert list(refused) == [*(e.path for e in escapes[:4]), "link", "sub", "x" * 300, "list", "list/below"]
    assert {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()} == {
        "list": TEN.encode(), "dir/kept": b"kept\n", "dir/crlf": b"a\n$Id$\n", "dir/odd \t": b"\x00\xff",
        ".gitattributes": b"* text eol=crlf ident\n"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "repo", "scratch"]
    assert re.search("link.*not followed", f"link {refused['link']}") and "submodule" in refused["sub"]


def test_a_missing_object_is_named(opened):
    with pytest.raises(GitFailed, match=f"lacks the object {'1' * 40}"):
        opened.blobs(["1" * 40])
