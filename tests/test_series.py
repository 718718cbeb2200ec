"""Series and patches: what is taken, what is refused and where the message points."""

import os
import pickle

import pytest

from farm.errors import SeriesError, UsageError
from farm.records import PatchRow, Reason, Verdict
from farm.series import PatchFile, Series, apply_patch, load_series, series_directory

ONE = "".join(f"line {n}\n" for n in range(1, 21))


def diff(path="v1/one.py", old="line 10", new="line ten", at=8, prefix=("a/", "b/")) -> bytes:
    """A one-hunk patch of a file like ONE."""
    number = at + 2
    return (f"Words.\n--- {prefix[0]}{path}\n+++ {prefix[1]}{path}\n@@ -{at},5 +{at},5 @@\n line {number - 2}\n"
            f" line {number - 1}\n-{old}\n+{new}\n line {number + 1}\n line {number + 2}\n").encode()


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "vllm"
    (root / "v1" / "__pycache__").mkdir(parents=True)
    for name in ("one", "two"):
        (root / "v1" / f"{name}.py").write_text(ONE)
        (root / "v1" / "__pycache__" / f"{name}.cpython-311.pyc").write_bytes(b"byte code")
    return root


def write_series(folder, listing, **patches):
    folder.mkdir(exist_ok=True)
    if listing is not None:
        (folder / "series").write_text(listing)
    for name, data in patches.items():
        (folder / f"{name}.patch").write_bytes(data)
    return folder


# --- reading --------------------------------------------------------------------------------


def test_quilt_form(tmp_path):
    folder = write_series(tmp_path / "s", "# first\n\none.patch   # why\n  two.patch\n", one=diff(), two=diff("v1/two.py"))
    series = load_series(folder)
    assert series.names == ("one.patch", "two.patch")
    assert series.patches[1].files == ("v1/two.py",) and series.patches[1].hunks == 1
    assert series.select(["two.patch"]).names == series.without(["one.patch"]).names == ("two.patch",)
    assert pickle.loads(pickle.dumps(series)) == series and len(pickle.dumps(series)) < 2000


def test_hashes_follow_order_and_content():
    a, b = PatchFile("a.patch", diff()), PatchFile("b.patch", diff("v1/two.py"))
    assert Series((a, b)).sha256 != Series((b, a)).sha256
    assert Series((a,)).sha256 != Series((PatchFile("a.patch", diff(new="other")),)).sha256
    assert Series((a, b)).sha256 == Series((PatchFile("a.patch", diff(), "elsewhere"), b)).sha256


def test_own_directory_of_a_version(tmp_path):
    (tmp_path / "0.28.0").mkdir()
    assert series_directory(tmp_path, "0.28.0") == tmp_path / "0.28.0"
    assert series_directory(tmp_path, "0.29.0") == tmp_path


def test_unknown_name_lists_the_known(tmp_path):
    series = Series((PatchFile("a.patch", diff()),), str(tmp_path))
    with pytest.raises(SeriesError, match="no patch b.patch here; listed are: a.patch"):
        series.without(["b.patch"])


@pytest.mark.parametrize(
    ("listing", "patches", "file", "line", "says"),
    [
        pytest.param(None, {}, "series", None, "no series file", id="no-series"),
        pytest.param("one.patch\nghost.patch\n", {"one": diff()}, "series", 2, "ghost.patch is listed but", id="missing"),
        pytest.param("one.patch\n\none.patch\n", {"one": diff()}, "series", 3, "listed twice, first on line 1", id="twice"),
        pytest.param("one.patch\n./one.patch\n", {"one": diff()}, "series", 2, "listed twice", id="twice-other-spelling"),
        pytest.param("one.patch\n", {"one": diff(), "two": diff()}, "series", None, "two.patch lies in", id="unlisted"),
        pytest.param("# one.patch\n", {"one": diff()}, "series", None, "one.patch lies in", id="commented-out"),
        pytest.param("one.patch -p2\n", {"one": diff()}, "series", 1, r"has options \(-p2\)", id="strip-option"),
        pytest.param("../one.patch\n", {}, "series", 1, "outside", id="parent"),
        pytest.param("/tmp/one.patch\n", {}, "series", 1, "outside", id="absolute"),
        pytest.param("one.patch\n", {"one": b""}, "one.patch", None, "0 bytes", id="empty"),
        pytest.param("one.patch\n", {"one": b"words\n"}, "one.patch", None, "no unified diff", id="no-diff"),
        pytest.param("one.patch\n", {"one": b"x\nGIT binary patch\n"}, "one.patch", 2, "binary", id="binary"),
        pytest.param("one.patch\n", {"one": diff("../up.py")}, "one.patch", 2, "out of the tree", id="header-parent"),
        pytest.param("one.patch\n", {"one": diff("etc/x", prefix=("/", "/"))}, "one.patch", 2, "out of the tree",
                     id="header-absolute"),
        pytest.param("one.patch\n", {"one": diff("v1/one.py.orig")}, "one.patch", 2, "left-over", id="orig"),
        pytest.param("one.patch\n", {"one": b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n"
                                            b"@@ -0,0 +1 @@\n+/etc\n"}, "one.patch", 1, "symbolic link", id="symlink"),
    ],
)
def test_refused_series(tmp_path, listing, patches, file, line, says):
    folder = write_series(tmp_path / "s", listing, **patches)
    with pytest.raises(SeriesError, match=says) as caught:
        load_series(folder)
    assert (str(caught.value.file), caught.value.line) == (str(folder / file), line)


# --- applying -------------------------------------------------------------------------------


def test_apply_leaves_only_the_change(package):
    twin = package / "twin.py"
    os.link(package / "v1/one.py", twin)
    patch = PatchFile("one.patch", diff())
    assert apply_patch(package, patch, position=3) == PatchRow("one.patch", patch.sha256, 3, 1, 0, 0, ("v1/one.py",))
    assert "line ten\n" in (package / "v1/one.py").read_text()
    assert twin.read_text() == ONE  # replaced, never written through the link
    assert sorted(p.name for p in package.rglob("*") if p.is_file()) == ["one.py", "twin.py", "two.cpython-311.pyc", "two.py"]


def test_offsets_are_counted_not_refused(package):
    (package / "v1/one.py").write_text("new\nnew\n" + ONE)
    row = apply_patch(package, PatchFile("one.patch", diff()))
    assert (row.hunks, row.offset_hunks, row.max_offset) == (1, 1, 2)


def test_cumulative(package):
    """A patch may stand on a line that an earlier one made."""
    apply_patch(package, PatchFile("one.patch", diff()))
    row = apply_patch(package, PatchFile("two.patch", diff(old="line ten", new="line X")))
    assert row.files == ("v1/one.py",)


def test_new_and_deleted_files(package):
    new = b"--- /dev/null\n+++ b/v1/new/three.py\n@@ -0,0 +1 @@\n+x = 1\n"
    gone = b"--- a/v1/two.py\n+++ /dev/null\n@@ -1,20 +0,0 @@\n" + b"".join(b"-" + s for s in ONE.encode().splitlines(True))
    assert apply_patch(package, PatchFile("new.patch", new)).files == ("v1/new/three.py",)
    assert apply_patch(package, PatchFile("gone.patch", gone)).files == ("v1/two.py",)
    assert (package / "v1/new/three.py").read_text() == "x = 1\n"
    assert not (package / "v1/two.py").exists() and not (package / "v1/__pycache__/two.cpython-311.pyc").exists()


def test_repository_rooted(package):
    """a/vllm/… reaches the tree; the tests that come with it are put aside."""
    both = diff("tests/v1/test_one.py") + diff("vllm/v1/one.py")
    assert apply_patch(package, PatchFile("repo.patch", both)).files == ("v1/one.py",)
    assert not (package / "tests").exists() and not (package.parent / "tests").exists()


def _failing(package, case):
    two = diff() + diff("v1/two.py", old="line eleven?")
    cases = {
        "hunk": (two, 14, r"hunk #1 of v1/two.py does not apply at fuzz 0 \(2 hunks in all\)"),
        "needs-fuzz": (diff().replace(b" line 8\n", b" line eight\n"), 4, "hunk #1 of v1/one.py does not apply at fuzz 0"),
        "missing": (diff() + diff("v1/ghost.py"), 12, "v1/ghost.py is not in this pin's package"),
        "exists": (b"--- /dev/null\n+++ b/v1/two.py\n@@ -0,0 +1 @@\n+x\n", 3, "exists already"),
        "twice": (diff() + diff(), 14, "its change is there already"),
        "malformed": (diff().replace(b"@@ -8,5 +8,5 @@", b"@@ -8,6 +8,6 @@") + diff("v1/two.py"), 11, "malformed"),
        "cut-off": (diff().replace(b"@@ -8,5 +8,5 @@", b"@@ -8,9 +8,9 @@"), None, "malformed .*unexpected end"),
        "no-prefix": (diff("one.py", prefix=("", "")), 2, "no leading directory"),
        "csrc": (diff("csrc/ops.cu"), 2, "needs-compile"),
        "csrc-of-repository": (diff("vllm/v1/one.py") + diff("csrc/ops.cu"), 12, "needs-compile"),
        "indented-copy": (b"".join(b"    " + s for s in diff("v1/two.py").splitlines(True)) + diff(), None, "2 hunks where"),
    }
    return cases[case]


@pytest.mark.parametrize("case", ["hunk", "needs-fuzz", "missing", "exists", "twice", "malformed", "cut-off", "no-prefix",
                                  "csrc", "csrc-of-repository", "indented-copy"])
def test_refused_patch(package, case):
    data, line, says = _failing(package, case)
    patch = PatchFile("bad.patch", data, "patches")
    with pytest.raises(SeriesError, match=says) as caught:
        apply_patch(package, patch)
    assert str(caught.value).startswith("patches/bad.patch:")
    assert caught.value.line == line
    assert not [p for p in package.rglob("*") if p.suffix in (".rej", ".orig")]


@pytest.mark.parametrize("data", [
    pytest.param(diff("tests/v1/test_one.py"), id="only-tests"),
    pytest.param(diff(new="line 10"), id="same-line"),
])
def test_a_patch_that_changes_nothing_is_invalid(package, data):
    with pytest.raises(SeriesError, match="no-change") as caught:
        apply_patch(package, PatchFile("null.patch", data))
    assert (caught.value.verdict, caught.value.reason) == (Verdict.INVALID, Reason.NO_CHANGE)


def test_without_gnu_patch(package, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="GNU patch is not installed"):
        apply_patch(package, PatchFile("one.patch", diff()))
