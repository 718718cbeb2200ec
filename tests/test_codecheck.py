"""Code that applies, judged in its tree: small packages, what one patch makes of them, and what is told about it."""

import os
import time

import pytest

from farm.codecheck import MOST, SYSTEM_VARIABLES, code_findings
from farm.findings import Kind

PACKAGE = {
    "__init__.py": "def __getattr__(n): pass\n",
    "envs.py": "import os, typing\nif typing.TYPE_CHECKING:\n    VLLM_A: int\n"
               "environment_variables = {'VLLM_A': lambda: os.getenv('VLLM_A')}\n"
               "def is_set(n): pass\ndef __getattr__(n): return environment_variables[n]()\n",
    "core/__init__.py": "",
    "core/blocks.py": "import os, typing\nBLOCK = 16\nclass Block: pass\ndef free(b): pass\n"
                      "if typing.TYPE_CHECKING:\n    Hint = 1\n"
                      "def knob(): return os.getenv('OLD_NOISE')\n",
    "core/pool.py": "from vllm.core.blocks import Block, free\nimport vllm.core.blocks as blocks\n"
                    "def get(): return Block(blocks.BLOCK), free\n",
    "core/tables.py": "from .blocks import BLOCK\n",
    "names/__init__.py": "from .one import *\n__all__ = ['first', 'sub', 'one']\n",
    "names/one.py": "first = 1\n",
    "names/sub.py": "",
    "star.py": "from vllm.names import *\nprint(first)\n",
    "noisy.py": "from vllm.gone import x\nimport vllm.core.blocks as b\nprint(missing, b.nothing)\n",
    "old.py": "print 'python 2'\n",
}
USER = "core/user.py"


class Tree:
    def __init__(self, root, cache):
        self.package, self.cache = root / "vllm", cache
        for path, text in PACKAGE.items():
            file = self.package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def patch(self, changes, overlay=None, before=None):
        """Findings of a patch that leaves these files so (None: deleted)."""
        after = {path: text.encode() if isinstance(text, str) else text for path, text in changes.items()}
        was = {path: (self.package / path).read_bytes() if (self.package / path).is_file() else None for path in after}
        was |= {path: text.encode() for path, text in (before or {}).items()}
        return code_findings(was, after, self.package, {**(overlay or {}), **after}, self.cache)

    def told(self, changes, **more):
        return [(f.kind.value, f.file, f.line, f.name) for f in self.patch(changes, **more)]


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path, tmp_path / "cache")


def grown(path, *lines):
    return {path: PACKAGE.get(path, "") + "".join(f"{line}\n" for line in lines)}


CLEAN = [
    ("nothing", {}),
    ("no-python", {"a.json": "{", "b.txt": "print(x)"}),
    ("new-file", {"new.py": "import os\nfrom vllm.core.blocks import Block\n"}),
    ("deleted-unused", {"names/sub.py": None, "names/__init__.py": "from .one import *\n"}),
    ("submodule", {USER: "from vllm.core import blocks\nfrom . import pool\nblocks.BLOCK, pool.get\n"}),
    ("new-module-and-its-user", {USER: "from vllm.core.fresh import z\n", "core/fresh.py": "z = 1\n"}),
    ("new-name-and-its-user", {**grown("core/blocks.py", "new = 1"), USER: "from .blocks import new\n"}),
    ("new-knob-and-its-reader", {"envs.py": PACKAGE["envs.py"] + "environment_variables['VLLM_B'] = 1\n",
                                 USER: "import os\nfrom vllm import envs\nos.getenv('VLLM_B')\nenvs.VLLM_B\n"}),
    ("guarded-import", {USER: "try:\n    from vllm.gone import x\nexcept ImportError:\n    x = None\n"}),
    ("typing-only", {USER: "import typing\nif typing.TYPE_CHECKING:\n    from vllm.core.blocks import Hint\n"}),
    ("compiled", {USER: "import vllm._C\nfrom vllm._moe_C import x\nfrom vllm.vllm_flash_attn import f\n"}),
    ("from-the-lazy-root", {USER: "from vllm import LLM\n"}),
    ("not-ours", {USER: "from torch.nope import x\nimport torch\ntorch.y\n"}),
    ("star", {USER: "from vllm.names import *\nprint(first)\n"}),
    ("foreign-star", {USER: "from ctypes import *\nprint(c_int)\n"}),
    ("system-variables", {USER: "import os\nos.environ['HOME'], os.getenv('CUDA_VISIBLE_DEVICES'), 'RANK' in os.environ\n"}),
    ("all-of-a-package-lists-submodules", {"names/__init__.py": PACKAGE["names/__init__.py"] + "x = __path__\n"}),
    ("lazy-all", {"core/__init__.py": "__all__ = ['lazy']\ndef __getattr__(n): pass\n"}),
]


@pytest.mark.parametrize("changes", [pytest.param(c, id=i) for i, c in CLEAN])
def test_no_alarm(tree, changes):
    assert tree.patch(changes) == ()


FAULTS = [
    ("syntax", {USER: "a = 1\ndef f(:\n"}, [("does-not-compile", USER, 2, "")]),
    ("null-byte", {USER: "a = 1\x00\n"}, None),
    ("made-broken", grown("core/blocks.py", "print 'x'"), [("does-not-compile", "core/blocks.py", 8, "")]),
    ("undefined", {USER: "def f():\n    return use_eagle\n"}, [("undefined-name", USER, 2, "use_eagle")]),
    ("undefined-once", {USER: "def f():\n    return a\n    a_ = a\nprint(a)\n"}, [("undefined-name", USER, 2, "a")]),
    ("import-taken-away", {"core/pool.py": PACKAGE["core/pool.py"].replace(", free", "", 1)},
     [("undefined-name", "core/pool.py", 3, "free")]),
    ("in-all", {USER: "__all__ = ['a']\n"}, [("undefined-name", USER, 1, "a")]),
    ("not-in-the-star", {USER: "from vllm.names import *\nprint(second)\n"}, [("undefined-name", USER, 2, "second")]),
    ("too-early", {USER: "a = 1\ndef f():\n    print(a)\n    a = 2\n"}, [("undefined-name", USER, 3, "a")]),
    ("module", {USER: "import vllm.core.gone\n"}, [("unresolved-import", USER, 1, "vllm.core.gone")]),
    ("module-of-names", {USER: "from vllm.core.gone import (\n    a,\n    b,\n)\n"},
     [("unresolved-import", USER, 2, "vllm.core.gone")]),
    ("name", {USER: "from vllm.core.blocks import (\n    Block,\n    Blok,\n)\n"},
     [("unresolved-import", USER, 3, "vllm.core.blocks.Blok")]),
    ("relative", {USER: "from .gone import a\nfrom ..core.blocks import b\nfrom .... import c\n"},
     [("unresolved-import", USER, 1, "vllm.core.gone"), ("unresolved-import", USER, 2, "vllm.core.blocks.b"),
      ("unresolved-import", USER, 3, "....")]),
    ("late", {USER: "def f():\n    from vllm.core.blocks import b\n"}, [("unresolved-import", USER, 2, "vllm.core.blocks.b")]),
    ("typing", {USER: "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.core.blocks import b\n"},
     [("unresolved-import", USER, 3, "vllm.core.blocks.b")]),
    ("typed-name-at-run-time", {USER: "from vllm.core.blocks import Hint\n"},
     [("unresolved-import", USER, 1, "vllm.core.blocks.Hint")]),
    ("attribute", {USER: "import vllm.core.blocks as m\ndef f():\n    return m.BLOCKS\n"},
     [("missing-attribute", USER, 3, "vllm.core.blocks.BLOCKS")]),
    ("attribute-of-from", {USER: "from vllm.core import blocks\nblocks.x\n"},
     [("missing-attribute", USER, 2, "vllm.core.blocks.x")]),
    ("attribute-of-envs", {USER: "from vllm import envs\nenvs.is_sett('VLLM_A')\n"},
     [("missing-attribute", USER, 2, "vllm.envs.is_sett")]),
    ("knob", {USER: "import os\nos.environ.get('INT8_ACT')\n"}, [("unregistered-knob", USER, 2, "INT8_ACT")]),
    ("knobs", {USER: "import os\nfrom os import environ, getenv\nos.environ['K1']\ngetenv('K2')\n'K3' in environ\n"
                     "environ.setdefault('K4', '')\nenviron.pop('K5')\n"},
     [("unregistered-knob", USER, n + 2, f"K{n}") for n in range(1, 6)]),
    ("knob-of-envs", {USER: "import vllm.envs as envs\nif envs.VLLM_B:\n    pass\n"},
     [("unregistered-knob", USER, 2, "VLLM_B")]),
    ("knob-imported", {USER: "from vllm.envs import VLLM_A, VLLM_B\n"}, [("unregistered-knob", USER, 1, "VLLM_B")]),
    ("knob-asked-for", {USER: "from vllm import envs\nenvs.is_set('VLLM_B')\n"}, [("unregistered-knob", USER, 2, "VLLM_B")]),
    ("knob-twice", {USER: "import os\nfrom vllm import envs\nos.getenv('VLLM_B')\nenvs.VLLM_B\n"},
     [("unregistered-knob", USER, 3, "VLLM_B")]),
    ("knob-for-type-checkers-only", {"envs.py": PACKAGE["envs.py"].replace("VLLM_A: int", "VLLM_A: int\n    VLLM_B: int"),
                                     USER: "from vllm import envs\nenvs.VLLM_B\n"}, [("unregistered-knob", USER, 2, "VLLM_B")]),
    ("knob-in-envs-itself", {"envs.py": PACKAGE["envs.py"] + "os.getenv('VLLM_B')\n"},
     [("unregistered-knob", "envs.py", 7, "VLLM_B")]),
]


@pytest.mark.parametrize("changes, told", [pytest.param(c, t, id=i) for i, c, t in FAULTS])
def test_faults(tree, changes, told):
    found = tree.told(changes)
    if told is None:
        assert [kind for kind, *_ in found] == ["does-not-compile"]
    else:
        assert found == told


NOISE = [
    ("all-of-it", grown("noisy.py", "a = 1")),
    ("moved", {"noisy.py": "a = 1\n\n\n" + PACKAGE["noisy.py"]}),
    ("said-again", grown("noisy.py", "print(missing, b.nothing)", "from vllm.gone import x")),
    ("renamed", {"noisy.py": None, "elsewhere.py": PACKAGE["noisy.py"] + "a = 1\n"}),
    ("renamed-into-a-package", {"noisy.py": None, "core/elsewhere.py": PACKAGE["noisy.py"]}),
    ("never-compiled", grown("old.py", "print 'more'")),
    ("knob", grown("core/blocks.py", "os.environ['OLD_NOISE']")),
    ("envs-touched", {"envs.py": PACKAGE["envs.py"] + "a = 1\n", **grown("core/blocks.py", "a = 1")}),
]


@pytest.mark.parametrize("changes", [pytest.param(c, id=i) for i, c in NOISE])
def test_what_was_wrong_before_is_not_the_patch_s(tree, changes):
    assert tree.told(changes) == []


def test_new_faults_beside_old_noise(tree):
    lines = "from vllm.gone import y", "from vllm.gone2 import x", "print(missing2, b.nothing2)"
    assert [f[2:] for f in tree.told(grown("noisy.py", *lines))] == [
        (4, "vllm.gone"), (5, "vllm.gone2"), (6, "vllm.core.blocks.nothing2"), (6, "missing2")]


def test_a_mended_file_is_no_fault(tree):
    assert tree.told({"old.py": "print('python 3')\n"}) == []


def test_an_import_that_moves_out_of_type_checking_counts(tree):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.core.blocks import Hint\n"
    assert tree.told({USER: text.replace("if TYPE_CHECKING:\n    ", "")}, before={USER: text}) == [
        ("unresolved-import", USER, 2, "vllm.core.blocks.Hint")]


# --- what a patch takes away -----------------------------------------------------------------

TAKEN = [
    ("name", {"core/blocks.py": PACKAGE["core/blocks.py"].replace("class Block", "class Blok")},
     [("unresolved-import", "core/pool.py", 1, "vllm.core.blocks.Block")]),
    ("attribute", {"core/blocks.py": PACKAGE["core/blocks.py"].replace("BLOCK", "SIZE")},
     [("missing-attribute", "core/pool.py", 3, "vllm.core.blocks.BLOCK")]),
    ("module", {"core/blocks.py": None},
     [("unresolved-import", "core/pool.py", 1, "vllm.core.blocks")]),
    ("moved-module", {"core/blocks.py": None, "core/bricks.py": PACKAGE["core/blocks.py"]},
     [("unresolved-import", "core/pool.py", 1, "vllm.core.blocks")]),
    ("users-adapted", {"core/blocks.py": None, "core/bricks.py": PACKAGE["core/blocks.py"],
                       "core/tables.py": PACKAGE["core/tables.py"].replace("blocks", "bricks"), "noisy.py": "",
                       "core/pool.py": PACKAGE["core/pool.py"].replace("blocks", "bricks")}, []),
    ("user-touched-and-forgotten", {"core/blocks.py": PACKAGE["core/blocks.py"].replace("free", "drop"),
                                    "core/pool.py": PACKAGE["core/pool.py"] + "a = 1\n"},
     [("unresolved-import", "core/pool.py", 1, "vllm.core.blocks.free")]),
    ("into-a-package", {"core/blocks.py": None, "core/blocks/__init__.py": PACKAGE["core/blocks.py"]}, []),
    ("knob", {"envs.py": PACKAGE["envs.py"].replace("'VLLM_A':", "'VLLM_B':"), USER: "from vllm import envs\nenvs.VLLM_A\n"},
     [("unregistered-knob", "core/user.py", 2, "VLLM_A"), ("unregistered-knob", "envs.py", 4, "VLLM_A")]),
]


@pytest.mark.parametrize("changes, told", [pytest.param(c, t, id=i) for i, c, t in TAKEN])
def test_users_of_what_a_patch_takes_away(tree, changes, told):
    assert tree.told(changes) == told


def test_users_are_counted(tree):
    gone, = tree.patch({"core/blocks.py": None})
    assert "this patch took it away" in gone.detail and gone.detail.endswith("and 2 more files would miss it")


def test_a_name_that_comes_through_a_star_is_missed_where_it_is_used(tree):
    tree_user = tree.package / "core/late.py"
    tree_user.write_text("from vllm.names import first\n")
    assert ("unresolved-import", "core/late.py", 1, "vllm.names.first") in tree.told({"names/one.py": "second = 1\n"})


def test_a_knob_that_is_no_longer_registered_is_missed_in_files_that_the_patch_does_not_touch(tree):
    (tree.package / "core/late.py").write_text("from vllm import envs\nenvs.VLLM_A\n")
    found = tree.told({"envs.py": PACKAGE["envs.py"].replace("VLLM_A", "VLLM_B")})
    assert found == [("unregistered-knob", "core/late.py", 2, "VLLM_A")]


# --- the rest of the series ------------------------------------------------------------------


def test_earlier_patches_of_the_series_count(tree):
    earlier = {"core/fresh.py": b"z = 1\n", "core/blocks.py": PACKAGE["core/blocks.py"].encode() + b"more = 1\n",
               "core/tables.py": None, "envs.py": PACKAGE["envs.py"].encode() + b"environment_variables['VLLM_B'] = 1\n"}
    user = "import os\nfrom vllm.core.fresh import z\nfrom vllm.core.blocks import more\nos.getenv('VLLM_B')\n"
    assert tree.told({USER: user}, overlay=earlier) == []
    assert tree.told({USER: "import vllm.core.tables\n"}, overlay=earlier) == [
        ("unresolved-import", USER, 1, "vllm.core.tables")]


def test_a_knob_that_an_earlier_patch_already_reads_in_this_file_is_its_own(tree):
    before = "import os\nos.getenv('MY_KNOB')\n"
    assert tree.told({USER: before + "a = 1\n"}, before={USER: before}) == []


def test_a_registry_that_nobody_can_read_judges_nothing(tree):
    envs = {"envs.py": b"environment_variables = {**load()}\n"}
    assert tree.told({USER: "import os\nos.getenv('K')\nfrom vllm import envs\nenvs.VLLM_B\n"}, overlay=envs) == []


# --- words, bounds, cache --------------------------------------------------------------------


@pytest.mark.parametrize("changes, words", [
    pytest.param({USER: "from vllm.core.blocks import Blok\n"},
                 "vllm.core.blocks has no `Blok` in this tree; the nearest that it has is `Block`", id="nearest"),
    pytest.param({USER: "import vllm.core.gone\n"}, "there is no module vllm.core.gone in this tree", id="module"),
    pytest.param({USER: "import os\nos.getenv('K')\n"}, "add it to environment_variables", id="knob"),
    pytest.param({USER: "f(:\n"}, f"Python refuses {USER} as this patch leaves it: invalid syntax", id="syntax"),
    pytest.param({"core/pool.py": PACKAGE["core/pool.py"].replace(", free", "", 1)},
                 "`free` is used here, and this patch took its definition away", id="taken"),
    pytest.param({USER: "f()\n"}, f"`f` is used here, and nothing in this tree's {USER} defines it", id="undefined"),
    pytest.param({USER: "__all__ = ['f']\n"}, "`f` is listed in `__all__`, and nothing", id="exported"),
    pytest.param({USER: "a = 1\ndef f():\n    print(a)\n    a = 2\n"}, "before it is assigned", id="too-early"),
])
def test_words(tree, changes, words):
    finding, = tree.patch(changes)
    assert words in finding.detail


def test_findings_are_in_order(tree):
    found = tree.patch({"b.py": "y\nx\n", "a.py": "import vllm.gone\nz\n"})
    assert [(f.file, f.line) for f in found] == [("a.py", 1), ("a.py", 2), ("b.py", 1), ("b.py", 2)]


def test_the_second_call_runs_no_ruff_and_reads_no_source(tree, monkeypatch):
    changes = {USER: "from vllm.core.blocks import nope\nprint(x)\n", **grown("core/blocks.py", "a = 1")}
    first = tree.patch(changes)
    monkeypatch.setattr("farm.undefined._run", None)
    monkeypatch.setattr("farm.modules.facts_of", None)
    assert tree.patch(changes) == first != ()


def test_an_unwritable_cache_only_costs_time(tree):
    tree.cache.write_text("a file where the folder should be")
    assert tree.told({USER: "x\n"}) == [("undefined-name", USER, 1, "x")]


def test_the_package_is_left_as_it_is(tree):
    def content():
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tree.package.rglob("*") if p.is_file()}

    was = content()
    tree.patch({"core/blocks.py": None, USER: "import vllm.gone\nx\n", "new/file.py": "f(:\n"})
    assert content() == was


def test_a_source_that_ruff_cannot_read_is_told_and_not_passed_over(tree, monkeypatch):
    monkeypatch.setattr("farm.codecheck.undefined_names", lambda sources, cache: dict.fromkeys(sources))
    assert tree.told({USER: "a = 1\n"}) == [("undefined-name", USER, 1, "")]
    assert tree.told(grown("core/pool.py", "a = 1")) == []  # nor could it before


HOSTILE = [
    ("brackets", b"(" * 100_000),
    ("minus", b"x = " + b"-" * 100_000 + b"1\n"),
    ("sum", b"x = " + b"+".join([b"a"] * 20_000) + b"\n"),
    ("undefined-names", b"x = [" + b",".join(b"n%d" % n for n in range(5000)) + b"]\n"),
    ("imports", b"".join(b"import vllm.m%d\n" % n for n in range(5000))),
    ("names", b"from vllm.core.blocks import " + b",".join(b"n%d" % n for n in range(5000)) + b"\n"),
    ("attributes", b"import vllm.core.blocks as m\n" + b"".join(b"m.a%d\n" % n for n in range(5000))),
    ("knobs", b"import os\n" + b"".join(b"os.getenv('K%d')\n" % n for n in range(5000))),
    ("one-line", b"x = '" + b"y" * 1_000_000 + b"'\n"),
    ("binary", os.urandom(10_000)),
    ("null-bytes", b"\x00" * 10_000),
]


@pytest.mark.parametrize("source", [pytest.param(s, id=i) for i, s in HOSTILE])
def test_hostile_sources_end_and_say_no_more_than_a_reader_reads(tree, source):
    begin = time.process_time()
    found = tree.patch({USER: source})
    assert time.process_time() - begin < 10
    assert len(found) <= MOST and {f.kind for f in found} <= set(Kind)


def test_system_variables_are_no_knobs_of_vllm():
    assert not [name for name in SYSTEM_VARIABLES if name.startswith("VLLM")]


# --- the case that asked for it --------------------------------------------------------------

# From vLLM 0.29.0 and 0.30.0, kv_connector/v1/offloading/scheduler.py: the local name that the series' patch uses was renamed.
SCHEDULER = """\
def from_spec(spec, vllm_config, kv_group_configs):
    {name} = (
        vllm_config.speculative_config is not None
        and vllm_config.speculative_config.use_eagle()
    )
    supports_partial_tail = (
        spec.blocks_per_chunk == 1{added}
        and not any(config.is_eagle_group for config in kv_group_configs)
    )
    return {name}, supports_partial_tail
"""


@pytest.mark.parametrize("name, told", [
    ("use_eagle", []), ("use_eagle_block_drop", [("undefined-name", "s.py", 8, "use_eagle")])])
def test_a_local_name_that_upstream_renamed(tree, name, told):
    before = SCHEDULER.format(name=name, added="")
    after = SCHEDULER.format(name=name, added="\n        and not use_eagle")
    assert tree.told({"s.py": after}, before={"s.py": before}) == told
