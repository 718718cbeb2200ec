"""A change below a root is seen, however it was made."""

import os

import pytest

from farm.manifest import Manifest


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    (folder / "sub" / "__pycache__").mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "sub" / "b.py").write_text("b = 1\n")
    (folder / "sub" / "__pycache__" / "b.cpython-311.pyc").write_bytes(b"code")
    return folder


def _write_through_a_link(root):
    os.link(root / "a.py", root.parent / "link.py")
    (root.parent / "link.py").write_text("a = 2\n")


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        pytest.param(lambda root: None, (), id="nothing"),
        pytest.param(lambda root: os.link(root / "a.py", root.parent / "l"), (), id="one-more-link"),
        pytest.param(_write_through_a_link, ("a.py",), id="write-through-a-link"),
        pytest.param(lambda root: (root / "a.py").chmod(0o755), ("a.py",), id="mode"),
        pytest.param(lambda root: (root / "sub/b.py").unlink(), ("sub/b.py",), id="removed"),
        pytest.param(lambda root: (root / "new.py").touch(), ("new.py",), id="added"),
        pytest.param(lambda root: (root / "sub/__pycache__/b.cpython-311.pyc").write_bytes(b"evil"),
                     ("sub/__pycache__/b.cpython-311.pyc",), id="byte-code"),
        pytest.param(lambda root: (root / "sub/__pycache__/b.cpython-313.pyc").touch(), (), id="byte-code-added"),
    ],
)
def test_changed(root, change, seen):
    manifest = Manifest.of(root)
    change(root)
    assert manifest.changed(root) == seen


def test_only_reading_shows_a_change_that_hides_its_time(root):
    manifest = Manifest.of(root)
    stat = (root / "a.py").stat()
    (root / "a.py").write_text("a = 9\n")
    os.utime(root / "a.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert manifest.changed(root) == () and manifest.rehashed(root) == ("a.py",)
    assert manifest.rehashed(root, ["sub/b.py"]) == ()


def test_fingerprint_is_of_content_without_byte_code(root):
    before = Manifest.of(root).fingerprint
    (root / "sub/__pycache__/b.cpython-311.pyc").write_bytes(b"other interpreter")
    os.utime(root / "a.py")
    assert Manifest.of(root).fingerprint == before
    (root / "a.py").rename(root / "c.py")
    assert Manifest.of(root).fingerprint != before


def test_round_trip(root):
    manifest = Manifest.of(root)
    assert Manifest.from_json(manifest.to_json()) == manifest
