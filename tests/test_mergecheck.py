"""The merge race, rebuilt: which combination of branches breaks a series, which one git cannot merge, and who began."""

import json
import os
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from rich.console import Console
from scratch_git import ScratchGit, fingerprint

from farm import gitseries
from farm.errors import UsageError
from farm.mergecheck import MOST_REFS, Outcome, merge_check
from farm.mergereport import render, sentence, to_json

ONE = "".join(f"x{n} = {n}\n" for n in range(1, 41))
GREEN, CONFLICT, BROKEN = Outcome.GREEN, Outcome.CONFLICT, Outcome.BROKEN


def patch(at, after=ONE, new=None):
    """Changes line `at` of v1/one.py as `after` has it, with three lines of context."""
    lines = after.splitlines()
    old = lines[at - 4:at + 3]
    return (f"Words.\n--- a/v1/one.py\n+++ b/v1/one.py\n@@ -{at - 3},7 +{at - 3},7 @@\n" + "".join(f" {x}\n" for x in old[:3])
            + f"-{old[3]}\n+{new or f'x{at} = 0'}\n" + "".join(f" {x}\n" for x in old[4:]))


def listing(*names):
    return "# words\n" + "".join(f"{name}.patch\n" for name in names)


AMZ = {"patches/a.patch": patch(5), "patches/m.patch": patch(20), "patches/z.patch": patch(35)}
LIST = "patches/series"


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "source" / "vllm"
    (root / "v1").mkdir(parents=True)
    for name, content in {"__init__.py": "", "envs.py": "", "v1/__init__.py": "", "v1/one.py": ONE}.items():
        (root / name).write_text(content)
    return root


@pytest.fixture
def repo(tmp_path):
    """main has a series of three patches, far from one another in the list and in the file that they change."""
    made = ScratchGit(tmp_path / "repo")
    made.commit({"README": "words\n", **AMZ, LIST: listing("a", "m", "z")})
    return made


@pytest.fixture
def unlisted_repo(tmp_path):
    """main has patches and no list yet."""
    made = ScratchGit(tmp_path / "repo")
    made.commit({"README": "words\n", **AMZ})
    return made


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Run a merge check; whatever it gives, it leaves no scratch files, and names none."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def run(*refs, base="main", repo=tmp_path / "repo", **options):
        report = merge_check(base, refs, tmp_path / "cache", repo=repo, **options)
        assert list((tmp_path / "tmp").iterdir()) == []
        assert str(tmp_path / "tmp") not in json.dumps(to_json(report))
        return report

    return run


def outcomes(report):
    return {c.label: c.outcome.value for c in report.combinations}


def combination(report, label):
    return next(c for c in report.combinations if c.label == label)


def faults(report, label):
    """{(name, what, where it comes from)} of a combination."""
    return {(f.name, f.what, f.inherited_from) for f in combination(report, label).faults}


def blamed(report):
    return [" + ".join(c.refs) or report.base.ref for c in report.culprits]


# --- the race: each branch alone green ------------------------------------------------------


def test_one_adds_a_patch_and_another_adds_the_list(unlisted_repo, checked):
    """What happened: three branches, each alone green; two merged within seconds, and main is broken."""
    unlisted_repo.branch("adds-patch", {"patches/b.patch": patch(10)})
    unlisted_repo.branch("adds-list", {LIST: listing("a", "m", "z")})
    unlisted_repo.branch("harmless", {"README": "other words\n"})
    report = checked("adds-patch", "adds-list", "harmless")
    assert outcomes(report) == {
        "main": "green", "adds-patch": "green", "adds-list": "green", "harmless": "green", "adds-patch + adds-list": "broken",
        "adds-patch + harmless": "green", "adds-list + harmless": "green", "adds-patch + adds-list + harmless": "broken"}
    assert blamed(report) == ["adds-patch + adds-list"] and report.exit_code == 1
    assert faults(report, "adds-patch + adds-list") == {("b.patch", "unlisted", None)}
    assert faults(report, "adds-patch + adds-list + harmless") == {("b.patch", "unlisted", "adds-patch + adds-list")}
    said = sentence(report.culprits[0], report)
    assert said.startswith("adds-patch and adds-list break the series together, though git merges them cleanly and neither of")
    assert "patches/b.patch unlisted" in said
    assert "Rebase adds-list onto main with adds-patch merged; there list b.patch in patches/series where it belongs" in said


def test_one_takes_a_patch_away_and_another_lists_it(unlisted_repo, checked):
    unlisted_repo.branch("removes", {"patches/m.patch": None})
    unlisted_repo.branch("lists", {LIST: listing("a", "m", "z")})
    report = checked("removes", "lists")
    assert outcomes(report) == {"main": "green", "removes": "green", "lists": "green", "removes + lists": "broken"}
    assert faults(report, "removes + lists") == {("m.patch", "missing", None)}


def test_both_list_the_same_patch_in_other_places(repo, checked):
    repo.branch("early", {"patches/b.patch": patch(10), LIST: listing("a", "b", "m", "z")})
    repo.branch("late", {"patches/b.patch": patch(10), LIST: listing("a", "m", "b", "z")})
    report = checked("early", "late")
    assert outcomes(report) == {"main": "green", "early": "green", "late": "green", "early + late": "broken"}
    assert faults(report, "early + late") == {("b.patch", "duplicate", None)}
    assert "take one of the lines of b.patch out of patches/series" in sentence(report.culprits[0], report)


@pytest.mark.parametrize("one, other, name, word", [
    ({"patches/b.patch": patch(10), LIST: listing("a", "b", "m", "z")},
     {"patches/c.patch": patch(11), LIST: listing("a", "m", "c", "z")}, "c.patch", "rejected"),
    ({"patches/b.patch": patch(10), LIST: listing("a", "b", "m", "z")},
     {"patches/c.patch": patch(12), LIST: listing("a", "m", "c", "z")}, "c.patch", "fuzz"),
    ({"patches/m.patch": None, LIST: listing("a", "z")},
     {"patches/0.patch": patch(21, ONE.replace("x20 = 20", "x20 = 0")), LIST: "# words\na.patch\nm.patch\nz.patch\n0.patch\n"},
     "0.patch", "rejected"),
    ({"patches/m.patch": patch(30)}, {"patches/c.patch": patch(31), LIST: listing("c", "a", "m", "z")}, "m.patch", "rejected"),
], ids=["next to each other", "near each other", "one needs what the other drops", "one moves a patch to the other's place"])
def test_a_patch_applies_alone_and_not_with_the_other_branch_s(repo, checked, package, one, other, name, word):
    """Git merges them and the list is whole: only on a package does one see that the series is broken."""
    repo.branch("one", one)
    repo.branch("other", other)
    assert set(outcomes(checked("one", "other")).values()) == {"green"}
    report = checked("one", "other", package_for=lambda directory: package)
    assert outcomes(report) == {"main": "green", "one": "green", "other": "green", "one + other": "broken"}
    assert faults(report, "one + other") == {(name, word, None)} and blamed(report) == ["one + other"]
    said = sentence(report.culprits[0], report)
    assert f"patches/{name} {word} (line 4: " in said and f"there rebase {name} with the patches before it applied" in said


def test_what_only_three_break_is_narrowed_down_to_them(tmp_path, checked, package):
    """`uses` fits in two places; `first` takes one of them away and `second` the other."""
    twice = "".join(f"y = {n % 20}\n" for n in range(40))
    (package / "v1" / "one.py").write_text(twice)
    repo = ScratchGit(tmp_path / "repo")
    gaps = {name: f"# {name}\n" for name in "pqrs"}
    whole = "".join(gaps.values())
    repo.commit({LIST: whole})
    for name, gap, change in (("harmless", "p", patch(4, twice)), ("first", "q", patch(11, twice)),
                              ("second", "r", patch(31, twice)), ("uses", "s", patch(10, twice))):
        repo.branch(name, {f"patches/{name}.patch": change.replace("x", "y"),
                           LIST: whole.replace(gaps[gap], gaps[gap] + f"{name}.patch\n")})
    report = checked("harmless", "first", "second", "uses", package_for=lambda directory: package)
    assert blamed(report) == ["first + second + uses"]
    assert faults(report, "first + second + uses") == {("uses.patch", "rejected", None)}
    assert faults(report, "harmless + first + second + uses") == {("uses.patch", "rejected", "first + second + uses")}
    assert len(report.combinations) == 1 + 4 + 6 + 2
    assert "though git merges them cleanly and no part of them has this" in sentence(report.culprits[0], report)


# --- what git cannot merge ------------------------------------------------------------------


def test_a_conflict_is_told_apart_from_a_broken_series(repo, checked):
    repo.branch("one", {"patches/b.patch": patch(10), LIST: listing("a", "b", "m", "z")})
    repo.branch("other", {"patches/c.patch": patch(12), LIST: listing("a", "c", "m", "z")})
    repo.branch("late", {"patches/b.patch": patch(10), LIST: listing("a", "m", "b", "z")})
    report = checked("one", "other", "late")
    assert outcomes(report) == {"main": "green", "one": "green", "other": "green", "late": "green", "one + other": "conflict",
                                "one + late": "broken", "other + late": "green", "one + other + late": "conflict"}
    pair, whole = combination(report, "one + other"), combination(report, "one + other + late")
    assert [(c.path, c.kind) for c in pair.conflicts] == [(LIST, "contents")]
    assert (pair.stopped_at, pair.inherited_from) == ("other", None)
    assert (whole.stopped_at, whole.inherited_from) == ("other", "one + other")
    assert blamed(report) == ["one + other", "one + late"] and report.exit_code == 1
    assert sentence(pair, report).startswith(
        "one and other do not merge with each other: git finds a conflict in patches/series (contents). Rebase other onto main")


@pytest.mark.parametrize("one, other, conflicts", [
    ({"patches/b.patch": patch(10), LIST: listing("a", "m", "z", "b")},
     {"patches/c.patch": patch(12), LIST: listing("a", "m", "z", "c")}, {(LIST, "contents")}),
    ({"patches/b.patch": patch(10), LIST: listing("a", "m", "z", "b")},
     {"patches/b.patch": patch(12), LIST: listing("a", "m", "z", "b")}, {("patches/b.patch", "contents")}),
    ({"patches/m.patch": patch(21)},
     {"patches/m.patch": None, LIST: listing("a", "z")}, {("patches/m.patch", "modify/delete")}),
], ids=["both append to the list", "two patches of one name", "one changes what the other removes"])
def test_a_pair_that_conflicts(repo, checked, one, other, conflicts):
    repo.branch("one", one)
    repo.branch("other", other)
    report = checked("one", "other")
    assert outcomes(report)["one + other"] == "conflict" and report.exit_code == 2
    assert {(c.path, c.kind) for c in combination(report, "one + other").conflicts} == conflicts
    assert combination(report, "one + other").faults == ()


def test_a_branch_that_conflicts_with_base_is_the_one_to_blame(repo, checked):
    repo.branch("stale", {LIST: listing("a", "m", "z", "b"), "patches/b.patch": patch(10)})
    repo.commit({LIST: listing("a", "m", "z", "c"), "patches/c.patch": patch(12)})
    repo.branch("fresh", {"README": "other words\n"})
    report = checked("fresh", "stale")
    assert outcomes(report) == {"main": "green", "fresh": "green", "stale": "conflict", "fresh + stale": "conflict"}
    assert blamed(report) == ["stale"] and combination(report, "fresh + stale").inherited_from == "stale"
    assert sentence(report.culprits[0], report).startswith("stale does not merge onto main: git finds a conflict in patches/s")


def test_a_conflict_elsewhere_does_not_hide_a_broken_series(unlisted_repo, checked):
    unlisted_repo.branch("adds", {"patches/b.patch": patch(10), "README": "one\n"})
    unlisted_repo.branch("lists", {LIST: listing("a", "m", "z"), "README": "other\n"})
    unlisted_repo.branch("harmless", {"patches/tests/x": "x"})
    report = checked("adds", "lists", "harmless")
    pair = combination(report, "adds + lists")
    assert pair.outcome is CONFLICT and [c.path for c in pair.conflicts] == ["README"]
    assert faults(report, "adds + lists") == {("b.patch", "unlisted", None)} and report.exit_code == 1
    assert combination(report, "adds + lists + harmless").judged == ()  # the third was never merged
    assert "Beside the conflict the series is broken, too: patches/b.patch unlisted" in sentence(pair, report)


# --- who began ------------------------------------------------------------------------------


def test_what_base_has_is_inherited_and_what_a_branch_mends_is_gone(repo, checked):
    repo.commit({"patches/stray.patch": patch(10)})
    repo.branch("mends", {"patches/stray.patch": None})
    repo.branch("harmless", {"README": "other words\n"})
    repo.branch("strays", {"patches/second.patch": patch(12)})
    report = checked("mends", "harmless", "strays")
    stray = ("stray.patch", "unlisted")
    assert faults(report, "main") == {(*stray, None)} and faults(report, "mends") == set()
    assert faults(report, "harmless") == {(*stray, "main")}
    assert faults(report, "strays") == {(*stray, "main"), ("second.patch", "unlisted", None)}
    assert faults(report, "harmless + strays") == {(*stray, "main"), ("second.patch", "unlisted", "strays")}
    assert faults(report, "mends + harmless") == set()
    assert faults(report, "mends + strays") == {("second.patch", "unlisted", "strays")}
    assert blamed(report) == ["main", "strays"] and report.exit_code == 1
    assert sentence(report.culprits[0], report).startswith("main is broken by itself: patches/stray.patch unlisted")
    assert sentence(report.culprits[1], report).startswith("strays breaks the series by itself, merged onto main")


def test_a_fault_that_two_branches_have_alike_comes_from_the_first(repo, checked):
    for name in ("one", "other", "third"):
        repo.branch(name, {"patches/stray.patch": patch(10), name: "x"})
    report = checked("one", "other", "third")
    assert blamed(report) == ["one", "other", "third"]
    for pair, origin in (("one + other", "one"), ("other + third", "other"), ("one + other + third", "one")):
        assert faults(report, pair) == {("stray.patch", "unlisted", origin)}


def test_the_attributes_that_base_keeps_count(repo, checked):
    """`merge=union` turns a conflict in the list into a merge, and what it makes is judged."""
    repo.commit({".gitattributes": "series merge=union\n"})
    for name in ("b", "c"):
        repo.branch(name, {f"patches/{name}.patch": patch(10), LIST: listing("a", "m", "z", name)})
    repo.branch("worse", {"patches/c.patch": patch(10), LIST: listing("a", "m", "c", "z")})
    report = checked("b", "c", "worse")
    assert outcomes(report)["b + c"] == "green" and faults(report, "c + worse") == {("c.patch", "duplicate", None)}


# --- lists that go, and every version's own -------------------------------------------------


@pytest.mark.parametrize("change, expected, gone", [
    ({LIST: None}, {("patches", "series", "no-series")}, ()),
    ({LIST: None, **dict.fromkeys(AMZ)}, {("patches", "series", "no-series")}, ()),
    ({"patches/0.28.0/series": None}, {("patches/0.28.0", "series", "no-series")}, ()),
    ({"patches/0.28.0/series": None, "patches/0.28.0/a.patch": None}, set(), ("patches/0.28.0",)),
    ({"patches/0.28.0/a.patch": None}, {("patches/0.28.0", "a.patch", "missing")}, ()),
    ({"patches/0.29.0/series": listing("n")}, {("patches/0.29.0", "n.patch", "missing")}, ()),
    ({"patches/tests/deep/series": ""}, set(), ()),
    ({"patches/sub/s.patch": patch(10), LIST: listing("a", "m", "z", "sub/s")}, set(), ()),
], ids=["list", "list and patches", "a version's list", "a whole version", "a version's patch", "new version", "deep",
        "sub-folder"])
def test_each_series_directory_is_judged(repo, checked, change, expected, gone):
    repo.commit({"patches/0.28.0/a.patch": patch(5), "patches/0.28.0/series": listing("a")})
    repo.branch("changes", change)
    repo.branch("harmless", {"README": "other words\n"})
    report = checked("changes", "harmless")
    for label in ("changes", "changes + harmless"):
        found = combination(report, label)
        assert {(f.directory, f.name, f.what) for f in found.faults} == expected and found.gone == gone
    assert outcomes(report)["harmless"] == "green"


def test_the_last_series_must_not_go(unlisted_repo, checked):
    """A version may go with its directory, but not every list there is."""
    unlisted_repo.git("rm", "-q", *AMZ)
    unlisted_repo.commit({f"patches/{version}/series": "" for version in ("0.28.0", "0.29.0")})
    unlisted_repo.branch("drops-28", {"patches/0.28.0/series": None})
    unlisted_repo.branch("drops-29", {"patches/0.29.0/series": None})
    report = checked("drops-28", "drops-29")
    assert outcomes(report) == {"main": "green", "drops-28": "green", "drops-29": "green", "drops-28 + drops-29": "broken"}
    assert faults(report, "drops-28 + drops-29") == {("series", "no-series", None)}


def test_each_directory_has_the_package_that_the_caller_names_and_is_asked_once(repo, checked, package):
    repo.commit({"patches/0.28.0/a.patch": patch(5), "patches/0.28.0/series": listing("a")})
    repo.branch("one", {"patches/0.28.0/a.patch": patch(6, ONE.replace("x6", "y6"))})
    repo.branch("other", {"patches/a.patch": patch(6, ONE.replace("x6", "y6"))})
    asked = []

    def package_for(directory):
        asked.append(directory)
        return package if directory.name == "0.28.0" else None

    report = checked("one", "other", package_for=package_for)
    assert sorted(asked) == [PurePosixPath("patches"), PurePosixPath("patches/0.28.0")]
    assert outcomes(report) == {"main": "green", "one": "broken", "other": "green", "one + other": "broken"}
    trees = {j.directory: j.tree is not None for j in combination(report, "main").judged}
    assert trees == {"patches": False, "patches/0.28.0": True}


def test_the_same_series_is_checked_once(repo, checked, monkeypatch):
    seen = []
    real = gitseries.check
    monkeypatch.setattr(gitseries, "check", lambda *arguments: seen.append(arguments) or real(*arguments))
    repo.branch("adds", {"patches/b.patch": patch(10), LIST: listing("a", "b", "m", "z")})
    for number in range(5):
        repo.branch(f"harmless{number}", {f"file{number}": "x", f"patches/tests/test_{number}.py": "x"})
    report = checked("adds", *(f"harmless{n}" for n in range(5)))
    assert len(report.combinations) == 1 + 6 + 15 + 1 and len(seen) == 2


# --- treacherous content --------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../secret.patch", "a.patch", "nowhere"])
@pytest.mark.parametrize("name", ["patches/m.patch", "patches/series", "patches/new.patch"])
def test_a_symbolic_link_is_unreadable_and_never_followed(repo, checked, tmp_path, name, target):
    (tmp_path / "secret.patch").write_text(patch(20))
    repo.git("checkout", "-q", "-b", "links")
    (repo.root / name).unlink(missing_ok=True)
    (repo.root / name).symlink_to(target)
    repo.commit({})
    report = checked("links")
    assert (PurePosixPath(name).name, "unreadable", None) in faults(report, "links")
    assert not {what for _, what, _ in faults(report, "links")} & {"missing", "no-series"}


def test_a_listed_link_is_unreadable_on_its_line_whatever_it_is_called(repo, checked):
    repo.git("checkout", "-q", "-b", "links")
    (repo.root / "patches" / "plain").symlink_to("a.patch")
    (repo.root / "patches" / "beside").symlink_to("a.patch")
    repo.commit({LIST: "a.patch\nplain\nm.patch\nz.patch\n"})
    found = combination(checked("links"), "links").faults
    assert [(f.name, f.what, f.line) for f in found] == [("plain", "unreadable", 2)]


def test_a_submodule_in_the_place_of_a_patch_is_unreadable(repo, checked):
    repo.git("checkout", "-q", "-b", "links")
    repo.git("rm", "-q", "patches/m.patch")
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{repo.git('rev-parse', 'main')},patches/m.patch")
    repo.git("commit", "-q", "-m", "words")
    repo.git("checkout", "-q", "-f", "main")
    assert faults(checked("links"), "links") == {("m.patch", "unreadable", None)}


def test_a_tree_with_a_way_out_is_refused(repo, checked, tmp_path):
    blob = repo.git("hash-object", "-w", "--stdin", said=b"evil\n")
    inner = repo.git("mktree", said=f"100644 blob {blob}\tseries\n".encode())
    raw = b"40000 ..\0" + bytes.fromhex(inner)
    outer = repo.git("hash-object", "-w", "-t", "tree", "--stdin", "--literally", said=raw)
    top = repo.git("mktree", said=f"040000 tree {outer}\tpatches\n".encode())
    repo.git("update-ref", "refs/heads/evil", repo.git("commit-tree", top, "-p", "main", "-m", "evil"))
    with pytest.raises(UsageError, match="leads out of it; run git fsck"):
        checked("evil")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_names_of_odd_bytes(repo, checked):
    repo.git("checkout", "-q", "-b", "odd")
    for name in (b"x\xff.patch", b"tab\t\x1b[31m\n.patch", "é ü.patch".encode()):
        Path(os.fsdecode(os.fsencode(repo.root) + b"/patches/" + name)).write_text(patch(10))
    repo.commit({})
    report = checked("odd")
    names = ("x\\xff.patch", "tab\\t\\x1b[31m\\n.patch", "é ü.patch")
    assert faults(report, "odd") == {(name, "unlisted", None) for name in names}
    assert "\x1b" not in printed(report) and "x\\xff.patch" in printed(report)
    json.dumps(to_json(report), ensure_ascii=False).encode()


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"a.patch\r\nm.patch\r\nz.patch\r\n", b"../../../etc/passwd\n", b"\0\n"])
def test_a_list_of_rubbish_is_broken(repo, checked, content):
    repo.branch("rubbish", {LIST: content})
    assert outcomes(checked("rubbish")) == {"main": "green", "rubbish": "broken"}


# --- any repository, left as it was ---------------------------------------------------------


def test_a_dirty_work_tree_is_neither_read_nor_touched(repo, checked):
    repo.branch("one", {"patches/b.patch": patch(10), LIST: listing("a", "b", "m", "z")})
    repo.branch("other", {"patches/b.patch": patch(10), LIST: listing("a", "m", "b", "z")})
    repo.branch("third", {"patches/c.patch": patch(10), LIST: listing("a", "c", "m", "z")})
    (repo.root / LIST).write_text("nonsense.patch\n")
    (repo.root / "patches" / "stray.patch").write_text("x")
    (repo.root / "staged").write_text("x")
    repo.git("add", "staged")
    (repo.root / ".git" / "index.lock").write_text("")
    before = fingerprint(repo.root)
    report = checked("one", "other", "third")
    assert fingerprint(repo.root) == before
    assert outcomes(report)["main"] == "green"
    assert [outcomes(report)[f"{pair}"] for pair in ("one + other", "one + third")] == ["broken", "conflict"]


def test_a_bare_repository_a_sub_directory_and_a_detached_head(repo, checked, tmp_path):
    repo.branch("adds", {"patches/stray.patch": patch(10)})
    repo.git("clone", "-q", "--bare", ".", str(tmp_path / "bare.git"))
    repo.git("checkout", "-q", "--detach", "main")
    expected, inside = {"adds": "broken"}, repo.root / "patches"
    for options in ({"repo": tmp_path / "bare.git"}, {"repo": inside}, {"repo": inside, "series": "."}, {"series": "."},
                    {"repo": repo.root, "series": "./patches/"}, {"repo": repo.root / ".git"}):
        report = checked("adds", **options)
        assert outcomes(report) == {"main": "green", **expected}, options
    assert outcomes(checked("adds", base="HEAD")) == {"HEAD": "green", **expected}


def test_a_project_in_a_sub_directory_has_its_own_patches(repo, checked):
    repo.commit({"project/patches/series": listing("gone"), "project/src/x": "x"})
    repo.branch("mends", {"project/patches/series": ""})
    report = checked("mends", repo=repo.root / "project")
    assert (report.series, outcomes(report)) == ("project/patches", {"main": "broken", "mends": "green"})
    assert checked("mends", repo=repo.root / "project" / "src").series == "patches"


def test_a_ref_that_is_called_like_an_option(repo, checked):
    repo.branch("plain", {"patches/stray.patch": patch(10)})
    repo.git("update-ref", "refs/heads/--exec=x", "plain")
    repo.git("update-ref", "refs/heads/-m", "main")
    report = checked("--exec=x", base="-m")
    assert outcomes(report) == {"-m": "green", "--exec=x": "broken"}


def test_nothing_to_merge_is_said_and_judged(repo, checked):
    repo.git("branch", "old", "main")
    repo.commit({"patches/stray.patch": patch(10)})
    repo.branch("new", {"README": "new\n"})
    repo.git("branch", "twin", "new")
    report = checked("old", "new", "twin")
    assert [side.note for side in report.refs] == ["main holds old already: nothing of it is left to merge", "",
                                                   "twin is the same commit as new"]
    assert set(outcomes(report).values()) == {"broken"} and blamed(report) == ["main"]


@pytest.mark.parametrize("refs, options, words", [
    ((), {}, "no REF"),
    (("one", "nowhere"), {}, "'nowhere' names no commit .* it has: main, one, stranger"),
    (("one",), {"base": "nowhere"}, "'nowhere' names no commit"),
    (("one", "one"), {}, "one is named twice"),
    (("stranger",), {}, "main and stranger have no history in common"),
    (tuple(f"r{n}" for n in range(MOST_REFS + 1)), {}, "41 refs make 820 pairs; give 40 refs at most"),
    (("one",), {"series": "../.."}, "--series ../.. leads out of the repository"),
    (("one",), {"series": "/etc"}, "--series /etc leads out of the repository"),
    (("one",), {"series": "patches/series"}, "a file called series below patches/series"),
    (("one",), {"series": "docs"}, "neither main nor a REF has a file called series below docs. Name the directory"),
], ids=lambda value: str(value)[:24])
def test_a_request_that_is_refused(repo, checked, refs, options, words):
    repo.branch("one", {"README": "one\n"})
    repo.git("checkout", "-q", "--orphan", "stranger")
    repo.commit({"strange": "x"})
    repo.git("checkout", "-q", "main")
    with pytest.raises(UsageError, match=words):
        checked(*refs, **options)


def test_a_series_directory_that_is_a_link_says_so(tmp_path, checked):
    repo = ScratchGit(tmp_path / "repo")
    (repo.root / "patches").symlink_to("real")
    repo.commit({"real/series": ""})
    repo.branch("one", {"README": "x"})
    with pytest.raises(UsageError, match="below patches .it is a symbolic link there"):
        checked("one")
    assert checked("one", series="real").exit_code == 0


def test_no_commits_and_no_repository(tmp_path, checked, monkeypatch):
    ScratchGit(tmp_path / "repo")
    with pytest.raises(UsageError, match="has no branch yet; commit first"):
        checked("one", base="HEAD")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    with pytest.raises(UsageError, match="in no git repository"):
        checked("one", repo=tmp_path / "plain")


# --- for the reader -------------------------------------------------------------------------


def printed(report, **options):
    console = Console(width=100, **options)
    with console.capture() as capture:
        render(report, console)
    return capture.get()


@pytest.fixture
def mixed(unlisted_repo, checked):
    unlisted_repo.branch("adds", {"patches/b.patch": patch(10)})
    unlisted_repo.branch("lists", {LIST: listing("a", "m", "z")})
    unlisted_repo.branch("lists-too", {LIST: listing("z", "a", "m")})
    return checked("adds", "lists", "lists-too")


def test_a_pipe_gets_a_line_for_each_combination_and_a_sentence_for_each_culprit(mixed):
    lines = printed(mixed).splitlines()
    assert lines[:8] == [
        "merge\toutcome\twhat\tcomes from", "main\tgreen\tno series\t", "adds\tgreen\tno series\t", "lists\tgreen\t\t",
        "lists-too\tgreen\t\t", "adds + lists\tbroken\tpatches: b.patch unlisted\titself",
        "adds + lists-too\tbroken\tpatches: b.patch unlisted\titself",
        "lists + lists-too\tconflict\tpatches/series (contents)\titself"]
    assert lines[8] == "adds + lists + lists-too\tconflict\tpatches/series (contents)\tlists + lists-too"
    assert [line.split(" ", 3)[:3] for line in lines[9:12]] == [["adds", "and", "lists"], ["adds", "and", "lists-too"],
                                                                ["lists", "and", "lists-too"]]
    assert lines[12].startswith("Judged by: patches: list and syntax alone")
    assert lines[13].startswith("4 of 8 not green. A pair is merged in one order")
    assert lines[13].endswith("What all refs give together is not known before the conflict is settled.")


def test_a_terminal_gets_a_table(mixed):
    assert "│ adds + lists " in printed(mixed, force_terminal=True, color_system=None)


def test_all_green_is_one_sentence(repo, checked):
    repo.branch("one", {"README": "x\n"})
    assert printed(checked("one")).splitlines()[-1] == "All 2 green: main and every merge onto it."


def test_json_names_the_pair_and_why(mixed):
    found = json.loads(json.dumps(to_json(mixed)))
    assert found["exit_code"] == 1 and found["series"] == "patches" and found["base"]["ref"] == "main"
    assert [c["refs"] for c in found["culprits"]] == [["adds", "lists"], ["adds", "lists-too"], ["lists", "lists-too"]]
    pair = next(c for c in found["combinations"] if c["label"] == "adds + lists")
    assert pair["outcome"] == "broken" and pair["culprit"] is True and pair["conflicts"] == []
    assert [(f["name"], f["what"], f["inherited_from"]) for f in pair["faults"]] == [("b.patch", "unlisted", None)]
    clash = found["combinations"][-2]
    assert clash["outcome"] == "conflict" and clash["conflicts"] == [{"path": "patches/series", "kind": "contents"}]
