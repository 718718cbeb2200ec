"""Facts of single sources, and their cache: real bytes in, what they define, import and read out."""

import json
import os
import stat
import subprocess
import sys
import time
import warnings

import pytest

from farm.modules import Answers, EnvRead, FactsCache, ModuleFacts, Reference, facts_of, sha256_of

R = Reference


def refs(source):
    return {(r.module, r.level, r.name, r.attrs, r.typing) for r in facts_of(source.encode()).references}


NAMES = [
    ("plain", "a = 1\ndef b(): c = 2\nclass D:\n    e = 3\nasync def f(): pass\n", {"a", "b", "D", "f"}),
    ("unpacked", "a, (b, *c), d.e, f[0] = x\n", {"a", "b", "c"}),
    ("conditional", "if x:\n    a = 1\nelif y:\n    b = 1\nelse:\n    c = 1\n", {"a", "b", "c"}),
    ("try", "try:\n    a = 1\nexcept E as gone:\n    b = 1\nelse:\n    c = 1\nfinally:\n    d = 1\n", {"a", "b", "c", "d"}),
    ("with-for-while", "with x as a:\n    b = 1\nfor c in d:\n    e = 1\nelse:\n    g = 1\nwhile x:\n    h = 1\n",
     {"a", "b", "c", "e", "g", "h"}),
    ("match", "match x:\n    case [a, *b]: pass\n    case {'k': c, **d}: pass\n    case P(e) as f: g = 1\n", set("abcdefg")),
    ("walrus", "if (a := 1): pass\n[b := c for c in d]\n", {"a", "b"}),
    ("comprehension", "[a for a in b]\n{c: d for c, d in e}\n(f for f in g)\nh = lambda i: i\n", {"h"}),
    ("imports", "import os.path\nimport a.b as c\nfrom d import e, f as g\nfrom . import h\n", {"os", "c", "e", "g", "h"}),
    ("del", "a = b = c = 1\ndel a\ndel b\nb = 2\n", {"b", "c"}),
    ("del-sometimes", "a = 1\nif x:\n    del a\ntry:\n    b = 1\n    del b\nfinally:\n    pass\n", {"a", "b"}),
    ("del-in-function", "a = 1\ndef f(a):\n    del a\n", {"a", "f"}),
    ("global", "def f():\n    global a\n    a = 1\n    import b\n    def g():\n        global c\n        import c\n",
     {"f", "a", "c"}),
    ("nonlocal", "x = 1\ndef f():\n    def g():\n        nonlocal y\n        y = 1\n    y = 0\n", {"x", "f"}),
    ("nested", "if 1:\n  with x:\n    for y in z:\n      try: a = 1\n      except: import b\n", {"y", "a", "b"}),
    ("loop-variable-gone", "for i in x: pass\ndel i\n", set()),
    ("type-comment", "a = []  # type: list[b]\nfor c in d:  # type: int\n    pass\n", {"a", "c"}),
    ("form-feed", "a = 1\n\f\nb = 2\n\x0cc = 3\n", {"a", "b", "c"}),
    ("tabs", "if x:\n\ta = 1\n\tif y:\n\t        b = 1\n", {"a", "b"}),
    ("crlf", "a = 1\r\nb = 2\r\n", {"a", "b"}),
    ("no-last-newline", "a = 1", {"a"}),
    ("empty", "", set()),
    ("only-comment", "# nothing", set()),
]


@pytest.mark.parametrize("source, names", [pytest.param(s, n, id=i) for i, s, n in NAMES])
def test_top_level_names(source, names):
    facts = facts_of(source.encode())
    assert facts.error is None
    assert facts.names == names


@pytest.mark.parametrize("source, runtime, typing", [
    pytest.param("a: int\nb: int = 1\n", {"b"}, {"a"}, id="declared"),
    pytest.param("if TYPE_CHECKING:\n    import a\n    b: int\n", set(), {"a", "b"}, id="block"),
    pytest.param("if typing.TYPE_CHECKING:\n    a = 1\nelse:\n    b = 1\n", {"b"}, {"a"}, id="else"),
    pytest.param("if not TYPE_CHECKING:\n    a = 1\nelse:\n    b = 1\n", {"a"}, {"b"}, id="negated"),
    pytest.param("if TYPE_CHECKING:\n    def a(): pass\nelse:\n"
                 "    try: from x import a\n    except ImportError: from y import a\n",
                 {"a"}, set(), id="both"),
    pytest.param("if TYPE_CHECKING or x:\n    a = 1\n", {"a"}, set(), id="or-something-else"),
])
def test_names_for_type_checkers_only(source, runtime, typing):
    facts = facts_of(source.encode())
    assert (facts.names, facts.typing_names) == (runtime, typing)


@pytest.mark.parametrize("source, exports", [
    pytest.param("a = 1\n", None, id="none"),
    pytest.param("__all__ = ['a', 'b']\n", {"a", "b"}, id="list"),
    pytest.param("__all__ = ('a',) + ('b',)\n", {"a", "b"}, id="sum"),
    pytest.param("__all__: list[str] = ['a']\n__all__ += ['b']\n__all__.append('c')\n__all__.extend(['d'])\n", set("abcd"),
                 id="grown"),
    pytest.param("__all__ = ['a']\n__all__ += other.__all__\n", None, id="not-literal"),
    pytest.param("__all__ = [n for n in x]\n", None, id="computed"),
    pytest.param("class A:\n    __all__ = ['a']\n", None, id="not-the-module's"),
    pytest.param("__all__ = []\n", set(), id="empty"),
])
def test_exports(source, exports):
    assert facts_of(source.encode()).exports == exports


@pytest.mark.parametrize("source, opaque", [
    pytest.param("def __getattr__(name): pass\n", True, id="getattr"),
    pytest.param("if x:\n    pass\nelse:\n    def __getattr__(name): pass\n", True, id="getattr-in-else"),
    pytest.param("class A:\n    def __getattr__(self, name): pass\n", False, id="a-class's-getattr"),
    pytest.param("globals()['a'] = 1\n", True, id="globals"),
    pytest.param("def f():\n    globals().update(x)\n", True, id="globals-later"),
    pytest.param("exec('a = 1')\n", True, id="exec"),
    pytest.param("import sys\nsys.modules[__name__] = x\n", True, id="sys-modules"),
    pytest.param("import sys\nsys.modules['a'] = x\n", False, id="another-module"),
    pytest.param("a = {}\na['b'] = 1\n", False, id="plain"),
])
def test_modules_whose_names_nobody_can_tell(source, opaque):
    assert facts_of(source.encode()).opaque is opaque


def test_star_imports_in_order_and_once():
    facts = facts_of(b"from .a import *\nfrom os import *\nfrom ..b import *\nfrom .a import *\n")
    assert facts.stars == ((1, "a"), (0, "os"), (2, "b"))


REFERENCES = [
    ("import", "import vllm.a.b\n", {("vllm.a.b", 0, None, (), False)}),
    ("import-as", "import vllm.a as b\n", {("vllm.a", 0, None, (), False)}),
    ("from", "from vllm.a import b as c, d\n", {("vllm.a", 0, "b", (), False), ("vllm.a", 0, "d", (), False)}),
    ("relative", "from . import a\nfrom ..b import c\n", {("", 1, "a", (), False), ("b", 2, "c", (), False)}),
    ("star", "from vllm.a import *\n", {("vllm.a", 0, "*", (), False)}),
    ("not-ours", "import torch, vllmx\nfrom vllm_ascend import a\nimport os\nos.environ\n", set()),
    ("in-function", "def f():\n    from vllm.a import b\n", {("vllm.a", 0, "b", (), False)}),
    ("typing", "if TYPE_CHECKING:\n    from vllm.a import b\n", {("vllm.a", 0, "b", (), True)}),
    ("typing-in-function", "if TYPE_CHECKING:\n    def f():\n        from vllm.a import b\n", {("vllm.a", 0, "b", (), True)}),
    ("guarded", "try:\n    from vllm.a import b\nexcept ImportError:\n    from vllm.c import b\n", set()),
    ("guarded-by-tuple", "try:\n    import vllm.a\nexcept (KeyError, ModuleNotFoundError):\n    pass\n", set()),
    ("guarded-by-bare", "try:\n    import vllm.a\nexcept:\n    pass\n", set()),
    ("guarded-by-any", "try:\n    import vllm.a\nexcept Exception as e:\n    pass\n", set()),
    ("guarded-by-suppress", "with contextlib.suppress(ImportError):\n    import vllm.a\n", set()),
    ("guarded-by-others", "try:\n    import vllm.a\nexcept KeyError:\n    pass\n", {("vllm.a", 0, None, (), False)}),
    ("else-of-a-try", "try:\n    pass\nexcept ImportError:\n    pass\nelse:\n    import vllm.a\n",
     {("vllm.a", 0, None, (), False)}),
    ("function-in-a-try", "try:\n    def f():\n        import vllm.a\nexcept ImportError:\n    pass\n",
     {("vllm.a", 0, None, (), False)}),
]


@pytest.mark.parametrize("source, expected", [pytest.param(s, e, id=i) for i, s, e in REFERENCES])
def test_imports(source, expected):
    assert refs(source) == expected


USES = [
    ("alias", "import vllm.a as m\nm.x\n", {("vllm.a", None, ("x",))}),
    ("from", "from vllm import a\na.x.y\n", {("vllm", "a", ("x", "y"))}),
    ("dotted", "import vllm.a.b\nvllm.a.b.x()\n", {("vllm", None, ("a", "b", "x"))}),
    ("in-function", "import vllm.a as m\ndef f(x=m.d) -> m.r:\n    return [m.x for _ in m.y]\n",
     {("vllm.a", None, (n,)) for n in "drxy"}),
    ("in-method", "import vllm.a as m\nclass C(m.B):\n    k = m.x\n    def f(self):\n        return m.y\n",
     {("vllm.a", None, (n,)) for n in "Bxy"}),
    ("local-import", "def f():\n    import vllm.a as m\n    m.x\ndef g(m):\n    m.y\n", {("vllm.a", None, ("x",))}),
    ("parameter", "import vllm.a as m\ndef f(m): m.x\nlambda m: m.x\nlambda *m, **n: m.x\n", set()),
    ("comprehension", "import vllm.a as m\n[m.x for m in y]\n", set()),
    ("assigned-too", "import vllm.a as m\nm = 1\nm.x\n", set()),
    ("assigned-in-function", "import vllm.a as m\ndef f():\n    m.x\n    m = 1\n", set()),
    ("global-in-function", "import vllm.a as m\ndef f():\n    global m\n    m = 1\n    m.x\n", set()),
    ("two-modules", "if z:\n    import vllm.a as m\nelse:\n    import vllm.b as m\nm.x\n", set()),
    ("same-twice", "import vllm.a as m\nimport vllm.a as m\nm.x\n", {("vllm.a", None, ("x",))}),
    ("class-name-is-not-seen-in-methods", "import vllm.a as m\nclass C:\n    m = 1\n    m.x\n    def f(self): m.y\n",
     {("vllm.a", None, ("y",))}),
    ("written", "import vllm.a as m\nm.x = 1\ndel m.y\nm.z.w = 2\n", {("vllm.a", None, ("z",))}),
    ("asked-first", "import vllm.a as m\nif hasattr(m, 'x'):\n    m.x\nm.y\n", {("vllm.a", None, ("y",))}),
    ("guarded", "import vllm.a as m\ntry:\n    m.x\nexcept AttributeError:\n    m.y\n", set()),
    ("guarded-by-others", "import vllm.a as m\ntry:\n    m.x\nexcept ImportError:\n    pass\n", {("vllm.a", None, ("x",))}),
    ("called-and-subscripted", "import vllm.a as m\nm.x(1)[2].y\nm.z[0]\n",
     {("vllm.a", None, ("x",)), ("vllm.a", None, ("z",))}),
    ("f-string", "import vllm.a as m\nf'{m.x!r:>{m.y}}'\n", {("vllm.a", None, ("x",)), ("vllm.a", None, ("y",))}),
    ("match", "import vllm.a as m\nmatch z:\n    case m.x: pass\n    case m.C(): pass\n",
     {("vllm.a", None, ("x",)), ("vllm.a", None, ("C",))}),
    ("bound-by-match", "import vllm.a as m\nmatch z:\n    case [m]: m.x\n", set()),
    ("decorator", "import vllm.a as m\n@m.x\ndef f(): pass\n", {("vllm.a", None, ("x",))}),
]


@pytest.mark.parametrize("source, expected", [pytest.param(s, e, id=i) for i, s, e in USES])
def test_attributes_of_imported_modules(source, expected):
    found = facts_of(source.encode())
    assert found.error is None
    assert {(r.module, r.name, r.attrs) for r in found.references if r.attrs} == expected


def test_lines_are_those_of_the_name_and_of_the_last_part():
    source = b"from vllm.a import (\n    b,\n    c,\n)\nimport vllm.m as m\nx = (m\n     .y)\n"
    assert facts_of(source).references == (R(2, "vllm.a", 0, "b"), R(3, "vllm.a", 0, "c"), R(5, "vllm.m"),
                                           R(7, "vllm.m", attrs=("y",)))


READS = [
    ("get", "import os\nos.environ.get('A')\nos.environ.get('B', 'C')\n", "AB"),
    ("getenv", "import os\nos.getenv('A')\nos.getenv(key='B')\n", "AB"),
    ("item", "import os\nos.environ['A']\n", "A"),
    ("in", "import os\n'A' in os.environ\n'B' not in os.environ\nx < 'C' in os.environ\n", "ABC"),
    ("pop-setdefault", "import os\nos.environ.pop('A', None)\nos.environ.setdefault('B', '1')\n", "AB"),
    ("from-import", "from os import environ, getenv as g\nenviron['A']\ng('B')\nenviron.get('C')\n'D' in environ\n", "ABCD"),
    ("alias", "import os as o\no.environ['A']\no.getenv('B')\n", "AB"),
    ("local", "def f():\n    import os\n    return os.getenv('A')\n", "A"),
    ("constant", "import os\nK = 'A'\ndef f():\n    return os.getenv(K)\n", "A"),
    ("constant-bound-twice", "import os\nK = 'A'\nK = 'B'\nos.getenv(K)\n", ""),
    ("constant-shadowed", "import os\nK = 'A'\ndef f(K): os.getenv(K)\n", ""),
    ("written", "import os\nos.environ['A'] = '1'\ndel os.environ['B']\n", ""),
    ("not-literal", "import os\nos.getenv(x)\nos.environ[f'A{b}']\nos.getenv(1)\nos.getenv()\n", ""),
    ("another-os", "from x import os\nos.getenv('A')\n", ""),
    ("shadowed", "import os\ndef f(os): os.getenv('A')\n", ""),
    ("no-import", "os.getenv('A')\n", ""),
    ("lambda-in-a-dict", "import os\nd = {'X': lambda: bool(int(os.getenv('A', '0')))}\n", "A"),
    ("guarded", "import os\ntry:\n    os.environ['A']\nexcept KeyError:\n    pass\n", "A"),
    ("is-set", "import vllm.envs as e\ne.is_set('A')\ne.environment_variables['B']()\n", "AB"),
    ("is-set-from", "from vllm import envs\nenvs.is_set('A')\nfrom vllm.envs import is_set\nis_set('B')\n", "AB"),
]


@pytest.mark.parametrize("source, names", [pytest.param(s, n, id=i) for i, s, n in READS])
def test_environment_reads(source, names):
    assert {r.name for r in facts_of(source.encode()).reads} == set(names)


def test_the_line_of_a_read():
    assert facts_of(b"import os\nx = [\n    os.getenv(\n        'A'),\n]\n").reads == (EnvRead(3, "A"),)


@pytest.mark.parametrize("source, knobs, more", [
    pytest.param("a = {}\n", None, False, id="none"),
    pytest.param("environment_variables: dict[str, int] = {'A': lambda: 1, 'B': 2}\n", "AB", False, id="dict"),
    pytest.param("environment_variables = {'A': 1}\nenvironment_variables['B'] = 1\nenvironment_variables.update({'C': 1})\n"
                 "environment_variables.update(D=1)\nenvironment_variables |= {'E': 1}\n"
                 "environment_variables.setdefault('F', 1)\n", "ABCDEF", False, id="grown"),
    pytest.param("environment_variables = {'A': 1, **{'B': 2}}\n", "AB", False, id="unpacked-literal"),
    pytest.param("environment_variables = {'A': 1, **other}\n", "A", True, id="unpacked"),
    pytest.param("environment_variables = {'A': 1}\nenvironment_variables.update(x)\n", "A", True, id="updated"),
    pytest.param("environment_variables = {n: 1 for n in x}\n", "", True, id="computed"),
    pytest.param("def f():\n    environment_variables = {'A': 1}\n", None, False, id="local"),
])
def test_registered_knobs(source, knobs, more):
    facts = facts_of(source.encode())
    assert (facts.knobs, facts.knobs_open) == (None if knobs is None else set(knobs), more)


REFUSED = [
    ("syntax", b"a = 1\ndef f(:\n", 2),
    ("python-2", b"print 'a'\n", 1),
    ("python-2-except", b"try:\n    pass\nexcept E, e:\n    pass\n", 3),
    ("left-over-conflict", b"a = 1\n<<<<<<< HEAD\nb = 1\n=======\n", 2),
    ("indent", b"def f():\n    a = 1\n   b = 1\n", 3),
    ("tabs-and-spaces", b"if x:\n        a = 1\n\tb = 1\n", 3),
    ("null-byte", b"a = 1\n\x00\n", None),
    ("encoding-unknown", b"# coding: no-such-thing\na = 1\n", None),
    ("encoding-broken", b"a = '\xff\xfe'\n", None),
    ("bom-against-cookie", b"\xef\xbb\xbf# coding: latin-1\na = 1\n", None),
    ("utf-16", "a = 1\n".encode("utf-16"), None),
    ("return-outside", b"a = 1\nreturn a\n", 2),
    ("await-outside", b"def f():\n    await g()\n", 2),
    ("nonlocal-nothing", b"def f():\n    nonlocal a\n", 2),
    ("twice-an-argument", b"def f(a, a): pass\n", 1),
    ("global-after-use", b"def f():\n    a = 1\n    global a\n", 3),
    ("future-too-late", b"a = 1\nfrom __future__ import annotations\n", 2),
    ("unclosed", b"a = (1,\nb = 2\n", None),
    ("unclosed-text", b"a = '''\n", None),
    ("brackets", b"(" * 5000 + b"1" + b")" * 5000, 1),
    ("brackets-open", b"(" * 100_000, 1),
    ("minus", b"x = " + b"-" * 100_000 + b"1\n", 1),
    ("blocks", b"\n".join(b" " * i + b"if 1:" for i in range(101)) + b"\n" + b" " * 101 + b"pass\n", None),
]


@pytest.mark.parametrize("source, line", [pytest.param(s, n, id=i) for i, s, n in REFUSED])
def test_what_python_refuses(source, line):
    facts = facts_of(source)
    assert facts == ModuleFacts(error=facts.error)
    assert facts.error[1]
    assert facts.error[0] == line if line else facts.error[0] >= 1


DEEP = [
    ("sum", b"x = " + b"+".join([b"a"] * 20_000)),
    ("attributes", b"x = a" + b".b" * 20_000),
    ("calls", b"x = a" + b"()" * 5000),
    ("else-if", b"if a: pass\n" + b"elif a: pass\n" * 5000),
    ("ternary", b"x = " + b"1 if a else " * 5000 + b"1"),
    ("lambdas", b"x = " + b"lambda: " * 900 + b"1"),
    ("subscripts", b"x = a" + b"[0]" * 5000),
    ("not", b"x = " + b"not " * 5000 + b"1"),
]


@pytest.mark.parametrize("source", [pytest.param(s, id=i) for i, s in DEEP])
def test_deep_sources_are_read_or_refused_and_never_crash(source):
    facts = facts_of(b"y = 1\n" + source)
    assert "y" in facts.names or facts.opaque if facts.error is None else facts.error == (1, "nested too deeply")


@pytest.mark.parametrize("depth", [900, 2000])
def test_an_expression_deeper_than_functions_may_nest_is_read(depth):
    facts = facts_of(b"import vllm.m as m\nx = m.first + " + b"+".join([b"a"] * depth) + b" + m.last\n")
    assert {r.attrs for r in facts.references if r.attrs} == {("first",), ("last",)}


@pytest.mark.parametrize("source", [
    pytest.param(b"x = '" + b"a" * 500_000 + b"'\n", id="text"),
    pytest.param(b"x = [" + b"a," * 100_000 + b"]\n", id="list"),
    pytest.param(b"# " + b"x" * 500_000 + b"\nx = 1\n", id="comment"),
    pytest.param(b"import vllm.m as m\nx = [" + b"m.a," * 50_000 + b"]\n", id="uses-on-one-line"),
    pytest.param(b"import vllm.m as x\n" * 5000 + b"x.a\n" * 5000, id="imported-and-used-often"),
])
def test_long_sources_take_bounded_time(source):
    begin = time.process_time()
    facts = facts_of(source)
    assert facts.error is None and "x" in facts.names
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("source", [
    pytest.param(b"x = '" + b"a" * 1_000_000 + b"'\n", id="one-line"),
    pytest.param(b"x = 1\n" * 200_000, id="many-lines"),
])
def test_a_source_longer_than_any_of_vllm_is_compiled_and_not_read(source):
    assert facts_of(source) == ModuleFacts(opaque=True)
    assert facts_of(source + b"(").error is not None


def test_encodings():
    assert facts_of("# coding: latin-1\né = 1\n".encode("latin-1")).names == {"é"}
    assert facts_of(b"\xef\xbb\xbfa = 1\n").names == {"a"}


def test_no_warning_leaves_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert facts_of(b"a = '\\d'\nb = 1 is 1\nassert (a, b)\n").names == {"a", "b"}


def test_future_statements_of_the_farm_are_not_the_source_s():
    deferred = b"def f():\n    def g() -> (yield): pass\n"  # refused below the `annotations` that farm/modules.py begins with
    assert facts_of(b"from __future__ import annotations\n" + deferred).error is not None
    assert facts_of(deferred).error is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of 3.12")
def test_type_parameters():
    facts = facts_of(b"import vllm.m as m\ntype A[T] = m.x\ndef f[m](a: int): return m.y\nclass C[m]: z = m.w\n")
    assert facts.names == {"m", "A", "f", "C"}
    assert {r.attrs for r in facts.references if r.attrs} == {("x",)}


# --- JSON and the cache ----------------------------------------------------------------------

FULL = (b"import os\nfrom .a import *\nfrom vllm.b import c\nimport vllm.d as d\nx: int\nd.e\nos.getenv('F')\n"
        b"__all__ = ['c']\nenvironment_variables = {'G': 1, **h}\ndef __getattr__(n): pass\n")


@pytest.mark.parametrize("source", [pytest.param(s, id=i) for i, s in (
    ("full", FULL), ("empty", b""), ("broken", b"("), ("surrogate", b"import os\nos.getenv('\\ud800')\n"))])
def test_json_gives_the_same_facts_back(source):
    facts = facts_of(source)
    assert ModuleFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_the_cache_is_asked_before_the_source(tmp_path):
    FactsCache(tmp_path).facts(FULL)
    file, = (tmp_path / "check").rglob("*.json")
    assert file.stem == sha256_of(FULL)
    kept = json.loads(file.read_text())
    kept["answer"]["names"] = ["from-the-cache"]
    file.write_text(json.dumps(kept))
    assert FactsCache(tmp_path).facts(FULL).names == {"from-the-cache"}


@pytest.mark.parametrize("content", [pytest.param(c, id=i) for i, c in (
    ("empty", b""), ("torn", b'{"key": "'), ("binary", b"\xff\x00"), ("other-shape", b"[1]"), ("no-facts", b'{"key": "KEY"}'),
    ("other-key", b'{"key": "0", "answer": {"names": ["wrong"]}}'),
    ("half-of-it", b'{"key": "KEY", "answer": {"names": ["wrong"]}}'),
    ("wrong-types", b'{"key": "KEY", "answer": {"error": 1, "names": 2}}'), ("deep", b"[" * 100_000))])
def test_a_torn_or_foreign_answer_is_read_anew_and_replaced(tmp_path, content):
    FactsCache(tmp_path).facts(FULL)
    file, = (tmp_path / "check").rglob("*.json")
    right = file.read_bytes()
    file.write_bytes(content.replace(b"KEY", file.stem.encode()))
    assert FactsCache(tmp_path).facts(FULL) == facts_of(FULL)
    assert file.read_bytes() == right


def test_an_unwritable_cache_only_costs_time(tmp_path):
    (tmp_path / "check").write_text("a file where the folder should be")
    assert FactsCache(tmp_path).facts(FULL) == facts_of(FULL)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_cache_only_costs_time(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert FactsCache(tmp_path).facts(FULL) == facts_of(FULL)


def test_no_half_written_file_stays(tmp_path):
    answers = Answers(tmp_path)
    (tmp_path / "key.json").mkdir()  # what cannot be replaced
    answers.put("key", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["key.json"]


def test_other_pythons_and_formats_have_their_own_folder(tmp_path):
    FactsCache(tmp_path).facts(b"")
    folder, = (tmp_path / "check").iterdir()
    assert folder.name.startswith(f"{sys.implementation.cache_tag}-")


def test_it_imports_neither_ray_nor_vllm():
    code = "import sys, farm.codecheck; print(sorted({'ray', 'vllm', 'torch', 'pandas', 'duckdb'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
