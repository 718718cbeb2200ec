"""Undefined names, as the real ruff finds them, and what is kept of its answers."""

import json
import os
import sys
from pathlib import Path

import pytest

from farm import undefined
from farm.errors import UsageError
from farm.undefined import EXPORTED, STARRED, TOO_EARLY, Undefined, find_ruff, undefined_names

U = Undefined


def names(source, cache):
    return undefined_names([source], cache)[source]


@pytest.mark.parametrize("source, expected", [
    pytest.param(b"a = 1\nb = a + c\n", [U(2, "c", "F821")], id="undefined"),
    pytest.param(b"def f():\n    return a\na = 1\n", [], id="defined-later"),
    pytest.param(b"a: B\nclass B: pass\n", [U(1, "B", "F821")], id="annotation-too-early"),
    pytest.param(b"from __future__ import annotations\na: B\nclass B: pass\n", [], id="annotation-deferred"),
    pytest.param(b"a: 'B'\n", [U(1, "B", "F821")], id="annotation-in-quotes"),
    pytest.param(b"__all__ = ['a', 'b']\na = 1\n", [U(1, "b", EXPORTED)], id="exported"),
    pytest.param(b"a = 1\ndef f():\n    print(a)\n    a = 2\n", [U(3, "a", TOO_EARLY)], id="local-too-early"),
    pytest.param(b"from os import *\nprint(getcwd)\n", [U(2, "getcwd", STARRED)], id="perhaps-from-a-star"),
    pytest.param(b"a = 1\ndel a\nprint(a)\n", [U(3, "a", "F821")], id="deleted"),
    pytest.param(b"if x := 1: print(x)\nmatch x:\n    case [y, *z]: print(y, z)\n", [], id="new-syntax"),
    pytest.param(b"print(ExceptionGroup, __file__, __name__, aiter)\n", [], id="builtins-of-newer-pythons"),
    pytest.param(b"# ruff: noqa\n# flake8: noqa\nprint(a)\n", [U(3, "a", "F821")], id="blanket-of-a-file"),
    pytest.param(b"print(a)  # noqa\n", [U(1, "a", "F821")], id="blanket-of-a-line"),
    pytest.param(b"print(a)  # noqa: E501, F821\n", [], id="excused"),
    pytest.param(b"print(a)  # type: ignore # noqa E501 # noqa F821\n", [], id="excused-as-in-vllm"),
    pytest.param("# coding: latin-1\né = 1\nprint(é, ü)\n".encode("latin-1"), [U(3, "ü", "F821")], id="latin-1"),
    pytest.param(b"\xef\xbb\xbfprint(a)\r\n\x0cprint(b)\r\n", [U(1, "a", "F821"), U(2, "b", "F821")], id="bom-crlf-form-feed"),
    pytest.param(b"", [], id="empty"),
])
def test_what_ruff_finds(tmp_path, source, expected):
    assert list(names(source, tmp_path)) == expected


def test_many_sources_cost_one_process_and_each_gets_its_own_answer(tmp_path, monkeypatch):
    runs = []
    run = undefined._run
    monkeypatch.setattr(undefined, "_run", lambda program, sources: runs.append(len(sources)) or run(program, sources))
    sources = [b"x%d\n" % n for n in range(50)]
    found = undefined_names([*sources, sources[0]], tmp_path)
    assert [found[s][0].name for s in sources] == [f"x{n}" for n in range(50)]
    assert undefined_names([*sources, b"y\n"], tmp_path)[b"y\n"][0].name == "y"
    assert runs == [50, 1]  # the second call asks for what is new alone


def test_no_source_needs_no_ruff(tmp_path, monkeypatch):
    monkeypatch.setattr(undefined, "find_ruff", None)
    assert undefined_names([], tmp_path) == {}


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": "KEY", "answer": [[1]]}', b'{"key": "KEY", "answer": 3}'])
def test_a_torn_answer_is_asked_for_again(tmp_path, content):
    names(b"a\n", tmp_path)
    file, = (tmp_path / "check").rglob("*.json")
    file.write_bytes(content.replace(b"KEY", file.stem.encode()))
    assert names(b"a\n", tmp_path) == (U(1, "a", "F821"),)
    assert json.loads(file.read_bytes())["answer"] == [[1, "a", "F821"]]


def test_the_user_s_settings_say_nothing(tmp_path, monkeypatch):
    (tmp_path / "ruff.toml").write_text("[lint]\nignore = ['F821']\nbuiltins = ['a']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("RUFF_OUTPUT_FILE", str(tmp_path / "elsewhere"))
    assert names(b"a\n", tmp_path / "cache") == (U(1, "a", "F821"),)


# --- a ruff that dies, or is not there -------------------------------------------------------


@pytest.fixture
def fake_ruff(tmp_path, monkeypatch):
    """A program in ruff's place: a Python script that finds the names of its files in `sys.argv`."""

    def write(script):
        program = tmp_path / "ruff"
        program.write_text(f"#!{sys.executable}\nimport os, sys\n"
                           f"files = [a for a in sys.argv if a.endswith('.py')]\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(undefined, "find_ruff", lambda: program)

    return write


def test_a_source_that_kills_ruff_costs_no_other_its_answer(tmp_path, fake_ruff):
    fake_ruff("if any(b'deadly' in open(f, 'rb').read() for f in files): os.abort()\n"
              "print('[' + ','.join('{\"code\": \"F821\", \"filename\": \"%s\", \"message\": \"Undefined name `a`\", "
              "\"location\": {\"row\": 1, \"column\": 1}}' % f for f in files if os.path.getsize(f)) + ']')")
    found = undefined_names([b"a\n", b"deadly\n", b"a b\n"], tmp_path / "cache")
    assert found == {b"a\n": (U(1, "a", "F821"),), b"a b\n": (U(1, "a", "F821"),), b"deadly\n": None}
    assert len([*(tmp_path / "cache").rglob("*.json")]) == 2  # what has no answer is asked again


@pytest.mark.parametrize("script, words", [
    pytest.param("print('error: unexpected argument', file=sys.stderr); sys.exit(2)", "unexpected argument", id="too-old"),
    pytest.param("print('no json')", "cannot be read", id="other-words"),
    pytest.param("print('[{}]')", "cannot be read", id="other-json"),
])
def test_a_ruff_that_does_not_work_is_a_usage_error(tmp_path, fake_ruff, script, words):
    fake_ruff(script)
    with pytest.raises(UsageError, match=f"{words}.*pip install ruff"):
        undefined_names([b"a\n"], tmp_path / "cache")


def test_a_ruff_that_hangs_is_ended(tmp_path, fake_ruff, monkeypatch):
    monkeypatch.setattr(undefined, "DEADLINE_S", 0.5)
    fake_ruff("import time; time.sleep(60)")
    with pytest.raises(UsageError, match="did not finish"):
        undefined_names([b"a\n"], tmp_path / "cache")


def test_ruff_is_found_beside_the_farm_and_else_on_path(tmp_path, monkeypatch):
    assert find_ruff().is_file()
    monkeypatch.setitem(sys.modules, "ruff", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="pip install ruff"):
        find_ruff()
    Path(tmp_path, "ruff").write_text("")
    os.chmod(tmp_path / "ruff", 0o755)
    assert find_ruff() == tmp_path / "ruff"


def test_another_ruff_has_its_own_answers(tmp_path, fake_ruff):
    names(b"a\n", tmp_path / "cache")
    fake_ruff("print('[]')")
    assert names(b"a\n", tmp_path / "cache") == ()
