"""Which module has which name: small packages on disk, and overlays on them."""

from pathlib import Path

import pytest

from farm.modules import FactsCache, Reference
from farm.moduletree import Fault, Has, ModuleTree, absolute

PACKAGE = {
    "__init__.py": "MODULE_ATTRS = {}\nif TYPE_CHECKING:\n    from vllm.a import hinted\nelse:\n    def __getattr__(n): pass\n",
    "envs.py": "import os\nif TYPE_CHECKING:\n    VLLM_TYPED: int\nenvironment_variables = {'VLLM_A': lambda: 1}\n"
               "def is_set(n): pass\ndef __getattr__(n): return environment_variables[n]()\n",
    "a.py": "x = 1\n_private = 1\nif TYPE_CHECKING:\n    T = 1\n__all__ = ['x']\n",
    "lazy.py": "def __getattr__(n): pass\n",
    "broken.py": "def f(:\n",
    "pkg/__init__.py": "from .one import *\nfrom .two import *\nfrom .missing_inner import *\ny = 1\n",
    "pkg/one.py": "p = 1\n_q = 1\n",
    "pkg/two.py": "__all__ = ['r']\nr = s = 1\n",
    "pkg/missing_inner.py": "",
    "loop/__init__.py": "from .b import *\n",
    "loop/b.py": "from . import *\nfrom .c import *\n",
    "loop/c.py": "from .b import *\nz = 1\n",
    "foreign.py": "from ctypes import *\n",
    "bare/mod.py": "v = 1\n",
    "native/__init__.py": "",
    "native/fast.abi3.so": "",
}


@pytest.fixture
def package(tmp_path):
    for path, text in PACKAGE.items():
        file = tmp_path / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "vllm"


@pytest.fixture
def tree(package, tmp_path):
    return lambda overlay={}: ModuleTree(package, overlay, FactsCache(tmp_path / "cache"))


@pytest.mark.parametrize("module, there", [
    ("vllm", True), ("vllm.a", True), ("vllm.pkg", True), ("vllm.pkg.one", True), ("vllm.nope", False), ("vllm.a.x", False),
    ("vllm.bare", True), ("vllm.bare.mod", True), ("vllm.native.fast", True), ("vllm.native.slow", False),
    ("vllm._C", True), ("vllm._moe_C_stable_libtorch", True), ("vllm.fs_io_C", True), ("vllm._version", True),
    ("vllm.vllm_flash_attn.layers", True), ("vllm.third_party.any", True), ("vllm.grpc.x_pb2", True),
    ("vllm.model_Config", False), ("vllm.C", False), ("vllm.a_Cat", False)])
def test_modules(tree, module, there):
    assert tree().has_module(module) is there


@pytest.mark.parametrize("overlay, module, there", [
    pytest.param({"new.py": b""}, "vllm.new", True, id="new-file"),
    pytest.param({"deep/er/new.py": b""}, "vllm.deep.er", True, id="new-directory"),
    pytest.param({"a.py": None}, "vllm.a", False, id="deleted"),
    pytest.param({"a.py": None, "a/__init__.py": b""}, "vllm.a", True, id="now-a-package"),
    pytest.param({"bare/mod.py": None}, "vllm.bare", False, id="emptied-directory"),
    pytest.param({"bare/mod.py": None, "bare/other.py": b""}, "vllm.bare", True, id="other-file"),
])
def test_modules_under_an_overlay(tree, overlay, module, there):
    assert tree(overlay).has_module(module) is there


@pytest.mark.parametrize("module, name, has", [
    ("vllm.a", "x", Has.YES), ("vllm.a", "_private", Has.YES), ("vllm.a", "T", Has.NO), ("vllm.a", "nope", Has.NO),
    ("vllm.a", "__doc__", Has.UNKNOWN), ("vllm", "a", Has.SUBMODULE), ("vllm", "anything", Has.UNKNOWN),
    ("vllm.lazy", "x", Has.UNKNOWN), ("vllm.broken", "x", Has.UNKNOWN), ("vllm.nope", "x", Has.UNKNOWN),
    ("vllm.pkg", "y", Has.YES), ("vllm.pkg", "p", Has.YES), ("vllm.pkg", "_q", Has.NO), ("vllm.pkg", "r", Has.YES),
    ("vllm.pkg", "s", Has.NO), ("vllm.pkg", "one", Has.SUBMODULE), ("vllm.loop", "z", Has.YES), ("vllm.loop", "nope", Has.NO),
    ("vllm.foreign", "c_int", Has.UNKNOWN), ("vllm._C", "x", Has.UNKNOWN), ("vllm.bare", "mod", Has.UNKNOWN),
    ("vllm.envs", "VLLM_A", Has.YES), ("vllm.envs", "VLLM_TYPED", Has.NO), ("vllm.envs", "VLLM_B", Has.NO),
    ("vllm.envs", "is_set", Has.YES), ("vllm.envs", "os", Has.YES)])
def test_names(tree, module, name, has):
    assert tree().look(module, name) is has


def test_names_for_type_checkers(tree):
    assert tree().look("vllm.a", "T", typing=True) is Has.YES
    assert tree().look("vllm.envs", "VLLM_TYPED", typing=True) is Has.YES


def test_a_registry_that_is_not_literal_is_not_judged(tree):
    envs = b"environment_variables = {'VLLM_A': 1, **more()}\ndef __getattr__(n): pass\n"
    assert tree({"envs.py": envs}).look("vllm.envs", "VLLM_B") is Has.UNKNOWN
    assert tree({"envs.py": b"def __getattr__(n): pass\n"}).look("vllm.envs", "VLLM_B") is Has.UNKNOWN


def test_a_chain_of_star_imports_is_followed_so_far_and_no_further(tree):
    chain = {f"s{i}.py": f"from .s{i + 1} import *\n".encode() for i in range(3000)}
    assert tree(chain).look("vllm.s0", "x") is Has.UNKNOWN
    assert tree({**chain, "s20.py": b"x = 1\n"}).look("vllm.s0", "x") is Has.YES


@pytest.mark.parametrize("path, level, module, expected", [
    ("a.py", 0, "vllm.b", "vllm.b"), ("a.py", 1, "b", "vllm.b"), ("a.py", 1, "", "vllm"), ("p/a.py", 1, "b", "vllm.p.b"),
    ("p/__init__.py", 1, "b", "vllm.p.b"), ("p/q/a.py", 2, "b.c", "vllm.p.b.c"), ("__init__.py", 1, "b", "vllm.b"),
    ("a.py", 2, "b", None), ("p/a.py", 3, "", None), ("p/a.py", 2, "", "vllm")])
def test_what_dots_mean(path, level, module, expected):
    assert absolute(path, level, module) == expected


FAULTS = [
    ("import", Reference(1, "vllm.a"), None),
    ("import-missing", Reference(1, "vllm.nope.er"), Fault("vllm.nope.er", None, True)),
    ("from", Reference(1, "vllm.a", 0, "x"), None),
    ("from-missing", Reference(1, "vllm.a", 0, "y"), Fault("vllm.a", "y", True)),
    ("from-missing-module", Reference(1, "vllm.nope", 0, "y"), Fault("vllm.nope", None, True)),
    ("submodule", Reference(1, "vllm.pkg", 0, "two"), None),
    ("star", Reference(1, "vllm.a", 0, "*"), None),
    ("star-missing", Reference(1, "vllm.nope", 0, "*"), Fault("vllm.nope", None, True)),
    ("typed-name-at-run-time", Reference(1, "vllm.a", 0, "T"), Fault("vllm.a", "T", True)),
    ("typed-name-under-typing", Reference(1, "vllm.a", 0, "T", (), True), None),
    ("relative", Reference(1, "one", 1, "p"), None),
    ("relative-missing", Reference(1, "one", 1, "q"), Fault("vllm.pkg.one", "q", True)),
    ("too-many-dots", Reference(1, "x", 4, "q"), Fault("....x", None, True, too_high=True)),
    ("attribute", Reference(1, "vllm.a", attrs=("x", "whatever")), None),
    ("attribute-missing", Reference(1, "vllm.a", attrs=("y",)), Fault("vllm.a", "y", False)),
    ("attribute-of-a-member", Reference(1, "vllm", 0, "a", ("y",)), Fault("vllm.a", "y", False)),
    ("attribute-of-an-object", Reference(1, "vllm.a", 0, "x", ("y",)), None),
    ("attribute-through-packages", Reference(1, "vllm", attrs=("pkg", "one", "y")), Fault("vllm.pkg.one", "y", False)),
    ("attribute-of-what-is-missing", Reference(1, "vllm.nope", attrs=("y",)), None),
    ("attribute-of-a-missing-name", Reference(1, "vllm.a", 0, "y", ("z",)), None),
    ("not-ours", Reference(1, "torch", attrs=("y",)), None),
]


@pytest.mark.parametrize("reference, fault", [pytest.param(r, f, id=i) for i, r, f in FAULTS])
def test_faults(tree, reference, fault):
    assert tree().fault("pkg/user.py", reference) == fault


def test_python_files(tree, package):
    found = [*tree({"a.py": None, "new.py": b"", "pkg/one.py": b"", "data.json": b""}).python_files()]
    assert found == sorted({p for p in PACKAGE if p.endswith(".py")} - {"a.py"} | {"new.py"})
    assert Path(package, "a.py").is_file()
