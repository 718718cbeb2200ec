"""What a user's mistake in a YAML file comes back as: file, line, what, nearest known word."""

from dataclasses import dataclass

import pytest
from pydantic import ConfigDict, Field

from farm import yamlfile
from farm.errors import UsageError


class Inner(yamlfile.Frozen):
    margin: float = Field(ge=0)


class Outer(yamlfile.Frozen):
    name: str
    inner: dict[str, Inner] = {}
    many: tuple[Inner, ...] = ()


@dataclass(frozen=True)
class Options:
    __pydantic_config__ = ConfigDict(extra="forbid")
    boots: int
    rules: tuple[Inner, ...] = ()


def refused(tmp_path, text, kind=Outer):
    file = tmp_path / "m.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        yamlfile.validate(yamlfile.read(file), kind)
    assert caught.value.file == file
    return caught.value.line, caught.value.what


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("name: a\nnmae: b\n", 2, "unknown key 'nmae'; did you mean 'name'?"),
        ("name: a\ninner:\n  x:\n    margn: 1\n", 4, "unknown key 'margn'; did you mean 'margin'?"),
        ("name: a\nmany:\n  - margin: 1\n  - margn: 1\n", 4, "did you mean 'margin'?"),
        ("name: a\ninner: {x: {margin: -1}}\n", 2, "inner.x.margin: input should be greater than or equal to 0, got -1"),
        ("inner: {}\n", 1, "key 'name' is missing"),
        ("name: a\nname: b\n", 2, "key 'name' is given twice"),
        ("name: [a\n", 2, "is not valid YAML"),
        ("- a\n", 1, "must be a mapping"),
        ("", 1, "must be a mapping"),
        (b"name: \xff\n", None, "is not UTF-8 text"),
        (b"name: \x00\n", None, "is not valid YAML"),
        ("name: &a [*a]\n", 1, "an anchor contains itself"),
        ("name: 2026-13-45\n", None, "is not usable YAML"),
        ("name: !!python/object:os.system x\n", 1, "is not valid YAML"),
    ],
    ids=["typo", "typo-in-map", "typo-in-list", "range", "missing", "twice", "syntax", "list", "empty", "bytes", "nul",
         "cycle", "bad-date", "tag"],
)
def test_a_mistake_names_file_line_and_what(tmp_path, text, line, says):
    got_line, what = refused(tmp_path, text)
    assert says in what
    assert got_line == line


def test_an_unknown_key_of_a_dataclass_is_found_too(tmp_path):
    line, what = refused(tmp_path, "boots: 1\nrules:\n  - {margin: 1}\nboot: 2\n", Options)
    assert (line, "did you mean 'boots'?" in what) == (4, True)


@dataclass(frozen=True)
class Either:
    __pydantic_config__ = ConfigDict(extra="forbid")
    rule: tuple[str, ...] | Inner = ()


@pytest.mark.parametrize(("text", "says"), [("rule: {margin: x}\n", "rule"), ("rule: 3\n", "rule")], ids=["key", "value"])
def test_the_branches_of_a_union_are_no_part_of_the_place(tmp_path, text, says):
    line, what = refused(tmp_path, text, Either)
    assert (line, what.split(":")[0].split(".")[0]) == (1, says)
    assert "tuple[" not in what


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        yamlfile.read(tmp_path / "none.yaml")


def test_a_sound_file_is_validated(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("name: a\nmany: [{margin: 0.5}]\n")
    assert yamlfile.validate(yamlfile.read(file), Outer) == Outer(name="a", many=(Inner(margin=0.5),))
