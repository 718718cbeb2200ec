"""Grafting newer tests onto an older file: what is taken, what is left, and what is refused by name."""

from __future__ import annotations

import ast
import sys
from textwrap import dedent

import pytest

from farm.errors import InvalidMeasurement
from farm.graft import graft, test_path
from farm.records import Reason, Verdict


def text(source: str) -> str:
    return dedent(source).lstrip("\n")


OLDER = text('''
    """The older file."""
    import pytest
    from engine.old import Pool

    LIMIT = 4  # of the older engine


    def make(n):
        return Pool(n)


    def test_own():
        assert make(1)
''')


def added(newer: str, *tests: str, older: str | None = OLDER) -> str:
    """What the graft adds to the older file, which must itself come out unchanged."""
    result = graft(older, text(newer), tests)
    ast.parse(result)
    kept = (older or "").rstrip("\n")
    assert result.startswith(kept)
    return result[len(kept):]


def test_takes_a_test_with_its_decorators_comments_and_narrowed_imports():
    new = added('''
        import os, json
        import pytest
        from engine.new import Manager, Pool, Unused as U

        @pytest.mark.parametrize("n", [1, 2])
        def test_new(n):
            # why
            assert Manager(Pool(n))

        def test_other():
            assert U and os and json
    ''', "test_new[1-3584]")
    assert new == "\n\n\n" + text('''
        from engine.new import Manager


        @pytest.mark.parametrize("n", [1, 2])
        def test_new(n):
            # why
            assert Manager(Pool(n))
    ''')


@pytest.mark.parametrize(
    ("newer", "taken", "left"),
    [
        pytest.param("def make(n, m): ...\ndef test_new(): make(1)", [], ["def make"], id="older-helper-wins"),
        pytest.param("LIMIT = 9\ndef test_new(): assert LIMIT", [], ["LIMIT = 9"], id="older-constant-wins"),
        pytest.param("from engine.new import Pool\ndef test_new(): Pool()", [], ["import Pool"], id="older-import"),
        pytest.param("A = 1\nB = A + 1\ndef h(): return B\ndef test_new(): h()", ["A = 1", "B = A + 1", "def h()"], [],
                     id="transitive"),
        pytest.param("A = 1\ndef test_new(A): A = 2", [], ["A = 1\n"], id="a-local-is-not-a-module-name"),
        pytest.param("A = 1\ndef test_new():\n    def inner(): return A\n    inner()", ["A = 1"], [], id="nested"),
        pytest.param("import numpy as np\ndef test_new(): np.zeros(1)", ["import numpy as np"], [], id="alias"),
        pytest.param("import a.b\nimport a.c\ndef test_new(): a.b.f(a.c)", ["import a.b", "import a.c"], [],
                     id="dotted"),
        pytest.param("D = {}\nD['x'] = 1\nD.update(y=2)\nE = {}\nE['z'] = 3\ndef test_new(): D",
                     ["D['x'] = 1", "D.update(y=2)"], ["E"], id="filled-in-place"),
        pytest.param("try:\n    import fast\nexcept ImportError:\n    fast = None\ndef test_new(): fast", ["try:"], [],
                     id="try-import"),
        pytest.param("class Base: ...\nclass Kind(Base): ...\ndef test_new(): Kind()", ["class Base", "class Kind"], [],
                     id="class-with-base"),
        pytest.param("N = int\ndef test_new(x: N = N(3)): ...", ["N = int"], [], id="annotation-and-default"),
        pytest.param("ROWS = [1]\n@pytest.mark.parametrize('r', ROWS)\ndef test_new(r): ...", ["ROWS = [1]"], [],
                     id="decorator"),
        pytest.param("async def test_new():\n    assert LIMIT", ["async def test_new"], [], id="async"),
    ],
)
def test_takes_what_is_needed_and_no_more(newer, taken, left):
    new = added(newer, "test_new")
    assert "test_new" in new
    assert [t for t in taken if t not in new] == [] and [t for t in left if t in new] == []


FIXTURES = '''
    import pytest

    @pytest.fixture
    def inner(): return 1

    @pytest.fixture
    def pool(inner): return inner

    @pytest.fixture(name="named")
    def _named(): return 2

    @pytest.fixture(autouse=True, scope="module")
    def quiet(): yield

    @pytest.fixture
    def unused(): return 3
'''


@pytest.mark.parametrize(
    ("test", "taken"),
    [
        pytest.param("def test_new(pool): ...", {"inner", "pool"}, id="argument"),
        pytest.param("def test_new(named): ...", {"_named"}, id="other-name"),
        pytest.param('@pytest.mark.usefixtures("pool")\n    def test_new(): ...', {"inner", "pool"}, id="usefixtures"),
        pytest.param('def test_new(request): request.getfixturevalue("named")', {"_named"}, id="by-string"),
        pytest.param('@pytest.mark.parametrize("pool, x", [(1, 2)], indirect=True)\n    def test_new(pool, x): ...',
                     {"inner", "pool"}, id="indirect"),
    ],
)
def test_takes_fixtures(test, taken):
    new = added(FIXTURES + "\n    " + test + "\n", "test_new")
    assert {n for n in ("inner", "pool", "_named", "unused") if f"def {n}(" in new} == taken


def test_an_autouse_fixture_and_the_files_marks_reach_the_grafted_tests_alone():
    new = added(FIXTURES + '''
    pytestmark = [pytest.mark.cpu_test, pytest.mark.skipif(LIMIT > 9, reason="x")]
    LIMIT = 3
    def test_new(): ...
    ''', "test_new")
    assert "@pytest.mark.cpu_test\n@pytest.mark.skipif(LIMIT > 9, reason='x')\n" in new
    assert "@pytest.mark.usefixtures('quiet')\ndef test_new" in new
    assert "@pytest.fixture(scope='module')\ndef quiet" in new
    assert "autouse" not in new and "pytestmark" not in new


def test_the_older_files_marks_stay_in_force():
    older = OLDER + "\npytestmark = pytest.mark.cpu_test\n"
    assert "gpu_test" not in added("import pytest\npytestmark = pytest.mark.gpu_test\ndef test_new(): ...", "test_new",
                                   older=older)


CLASS = '''
    from engine.new import Manager

    class TestC:
        """About C."""
        size = 3

        def setup_method(self):
            self.m = Manager(self.size)

        def test_one(self):
            assert self.m

        def test_two(self):
            assert self.m.two
'''


def test_a_class_that_the_older_file_lacks_comes_with_the_chosen_methods_only():
    new = added(CLASS, "TestC::test_two[3]")
    assert all(t in new for t in ("import Manager", "class TestC:", "About C", "size = 3", "setup_method", "test_two"))
    assert "test_one" not in new


def test_a_class_that_the_older_file_has_is_extended():
    older = OLDER + "\n\nclass TestC:\n    size = 1\n    def test_one(self): return 'old'\n"
    result = graft(older, text(CLASS), ["TestC::test_two"])
    space = {"__name__": "x"}
    source = result.replace("from engine.old", "from types").replace("from engine.new", "from types")
    exec(compile(source.replace("import Pool", "import CodeType as Pool").replace(
        "import Manager", "import SimpleNamespace as Manager"), "x", "exec"), space)
    assert space["TestC"]().test_one() == "old" and space["TestC"].size == 1
    assert callable(space["TestC"].test_two)


def test_without_an_older_file_the_result_stands_alone():
    new = added("import json, os\nLIMIT = 2\ndef test_new(): assert json.dumps(LIMIT)\ndef test_x(): os", "test_new",
                older=None)
    assert new == "import json\n\n\nLIMIT = 2\n\n\ndef test_new(): assert json.dumps(LIMIT)\n"


def test_a_future_import_goes_where_the_language_wants_it():
    result = graft(OLDER, "from __future__ import annotations\ndef test_new(x: LIMIT): ...\n", ["test_new"])
    assert result.splitlines()[:2] == ['"""The older file."""', "from __future__ import annotations"]
    compile(result, "x", "exec")


def test_a_test_that_both_have_alike_changes_nothing():
    assert graft(OLDER, "def test_own():\n\n    assert make( 1 )\n", ["test_own"]) == OLDER


def test_several_tests_share_what_they_need():
    new = added("A = 1\ndef test_b(): A\ndef test_a(): A", "test_a", "test_b[1]", "test_b[2]")
    assert new.count("A = 1") == 1 and new.index("test_b") < new.index("test_a")


@pytest.mark.parametrize(
    ("newer", "test", "says"),
    [
        pytest.param("def test_a(): ...", "test_b", "no test test_b", id="no-such-test"),
        pytest.param(CLASS, "TestC::test_nine", "no test TestC::test_nine", id="no-such-method"),
        pytest.param("def test_own(): assert 2", "test_own", "test test_own of its own, and it differs", id="other"),
        pytest.param("def LIMIT(): ...", "LIMIT", "uses the name LIMIT for something else", id="name-taken"),
        pytest.param("def test_new(): assert missing", "test_new", "test_new needs the name missing, which neither",
                     id="unresolved"),
        pytest.param("def h(): return missing\ndef test_new(): h()", "test_new[1]", "test_new needs the name missing",
                     id="unresolved-in-a-helper"),
        pytest.param("from helpers import *\ndef test_new(): tool()", "test_new", "may come from its `import *`",
                     id="star"),
        pytest.param("LIMIT = 1\ndef make(): ...\nmake = 3\ndef test_new(): make", "test_new",
                     "needs make, a value in the newer file and a function or class in the older", id="clash"),
        pytest.param("import pytest\n@pytest.fixture\ndef make(): ...\ndef test_new(): make", "test_new",
                     "needs make, a fixture in the newer file", id="fixture-clash"),
        pytest.param("def test_new(:", "test_new", "the newer file is no Python", id="syntax"),
    ],
)
def test_refusals_name_the_test_and_the_name(newer, test, says):
    with pytest.raises(InvalidMeasurement) as caught:
        graft(OLDER, text(newer), [test])
    assert says in str(caught.value)
    assert (caught.value.verdict, caught.value.reason) == (Verdict.INVALID, Reason.BAD_CONFIG)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are syntax from Python 3.12")
def test_type_parameters_are_not_module_names():
    assert "def test_new[T]" in added("def test_new[T](x: T): ...", "test_new")


@pytest.mark.parametrize(
    ("nodeid", "parts"),
    [("tests/x.py", ("tests/x.py", "")), ("tests/x.py::test_a[1-a::b]", ("tests/x.py", "test_a")),
     ("x.py::TestC::test_a", ("x.py", "TestC::test_a"))],
)
def test_node_ids(nodeid, parts):
    assert test_path(nodeid) == parts
