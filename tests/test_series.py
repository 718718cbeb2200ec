"""Series: what is taken, what is refused and where the message points."""

import pickle

import pytest
from packages import diff, indented, new_file

from farm.errors import SeriesError
from farm.series import PatchFile, Series, load_series, series_directory


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
        pytest.param("one.patch\n", {"one": b"Words.\n" + diff("../up.py")}, "one.patch", 2, "out of the tree",
                     id="header-parent"),
        pytest.param("one.patch\n", {"one": b"Words.\n" + diff("etc/x", prefix=("/", "/"))}, "one.patch", 2, "out of the tree",
                     id="header-absolute"),
        pytest.param("one.patch\n", {"one": b"Words.\n" + diff("v1/one.py.orig")}, "one.patch", 2, "left-over", id="orig"),
        pytest.param("one.patch\n", {"one": b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n"
                                            b"@@ -0,0 +1 @@\n+/etc\n"}, "one.patch", 1, "symbolic link", id="symlink"),
        pytest.param("one.patch\r\n", {"one": diff()}, "series", 1, "CRLF", id="crlf"),
        pytest.param("one.patch\n", {"one": diff() + diff()}, "one.patch", 12, "twice", id="diff-twice"),
        pytest.param("one.patch\n", {"one": indented(diff()) + diff()}, "one.patch", 3, "indented copy", id="indented-copy"),
        pytest.param("one.patch\n", {"one": diff()[:-1]}, "one.patch", 9, "cut off", id="cut-off"),
        pytest.param("ghost.patch\none.patch\n", {"one": b""}, "series", 1, "ghost", id="the-list-first"),
    ],
)
def test_refused_series(tmp_path, listing, patches, file, line, says):
    folder = write_series(tmp_path / "s", listing, **patches)
    with pytest.raises(SeriesError, match=says) as caught:
        load_series(folder)
    assert (str(caught.value.file), caught.value.line) == (str(folder / file), line)


def test_a_left_over_beside_the_patches(tmp_path):
    folder = write_series(tmp_path / "s", "one.patch\n", one=new_file("v1/x.py"))
    (folder / "one.patch.orig").write_bytes(b"old")
    with pytest.raises(SeriesError, match="one.patch.orig is a left-over"):
        load_series(folder)


def test_what_is_cached_does_not_travel():
    patch = PatchFile("a.patch", diff())
    assert patch.fault is None and patch.files == ("v1/one.py",)
    assert set(pickle.loads(pickle.dumps(patch)).__dict__) == {"name", "data", "directory"}
