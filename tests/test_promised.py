"""What a run has promised against what it would promise now: each difference by its name."""

import dataclasses
import json

import pytest
from test_plan import CPU, PATCH, SERIES, loaded, only

from farm.config import CellConfig, CellPlanConfig, ProfileConfig
from farm.promised import differences, listed, promise, promised_cells
from farm.series import PatchFile, Series
from jobs.unit import Suite, Unit

RULES = {"campaign": False, "isolation": "none"}
OTHER = Series((PatchFile("one.patch", PATCH.replace(b"+b", b"+c")), SERIES.patches[1]), "patches")
MORE = Series((*SERIES.patches, PatchFile("three.patch", PATCH.replace(b"x.py", b"z.py"))), "patches")
TURNED = Series(SERIES.patches[::-1], "patches")
PROFILE = {"model": {"tiny": "qwen3next-cpu"}}


def promised(cells, rules=RULES, chosen=()):
    return promise(cells, chosen, rules)


def unit(tests):
    options = {"suites": [{"name": "r", "source": "series"}]}
    job = Unit(suites=(Suite(name="r", source="series"),))
    return only(loaded((CellPlanConfig(CellConfig(job="unit", **{"with": options}), job, None, options),)), tests)


BEFORE = only(loaded())


@pytest.mark.parametrize(("now", "says"), [
    pytest.param(only(loaded(options={"prompts": [101]})), "with: prompts was [100], is [101]", id="option"),
    pytest.param(only(loaded(seed=7)), "seed was 0, is 7", id="seed"),
    pytest.param(only(loaded(), series=OTHER), "patch one.patch of arm patched was sha256 ", id="patch"),
    pytest.param(only(loaded(), series=MORE), "patch three.patch of arm patched is new: sha256 ", id="patch-added"),
    pytest.param(only(loaded(), series=Series(SERIES.patches[:1])), "patch two.patch of arm patched is gone, it was sha256 ",
                 id="patch-gone"),
    pytest.param(only(loaded(), series=TURNED),
                 "the order of patches of arm patched was one.patch two.patch, is two.patch one.patch", id="patch-order"),
    pytest.param(only(loaded(profile=ProfileConfig(**PROFILE, args=["--x"]))), 'profile tiny: args --x is new: given',
                 id="profile"),
    pytest.param(only(loaded(profile=ProfileConfig(**PROFILE, env={"VLLM_A": "1"}))), "profile tiny: env VLLM_A is new: 1",
                 id="profile-env"),
    pytest.param(only(loaded(pin=CPU.model_copy(update={"torch": "torch==2.13.0"}))), "pin p: torch is new: torch==2.13.0",
                 id="pin"),
    pytest.param(only(loaded(arms={"baseline": {"patches": "none"}, "patched": {"env": {"A": "1"}}})),
                 "arm patched: env A is new: 1", id="arm-env"),
    pytest.param(only(loaded(arms={"baseline": {"patches": "none"}, "patched": {"env": {"HF_TOKEN": "x"}}})),
                 "arm patched: env HF_TOKEN is new: set", id="secret"),
])
def test_what_changed_is_named(now, says):
    told = differences(promised([BEFORE]), promised([now]))
    assert [t for t in told if says in t and t.endswith(f"(cell {BEFORE.id})")], told


@pytest.mark.parametrize(("old", "new", "says"), [
    (["--max-model-len=9", "--x"], ["--max-model-len=10", "--x"], "args --max-model-len was 9, is 10"),
    (["--a", "1", "--x"], ["--a", "2", "--x"], "args --a was 1, is 2"),
    (["--a=1", "--a=2"], ["--a=1", "--a=3"], "args --a was 1 2, is 1 3"),
    ([f"--{'long-' * 40}=1", "--end=1"], [f"--{'long-' * 40}=1", "--end=2"], "args --end was 1, is 2"),
    (["--api-key=hunter1", "--x=1"], ["--api-key=hunter2", "--x=2"], "args --x was 1, is 2"),
], ids=["value", "two-words", "twice", "behind-a-long-one", "secret"])
def test_an_argument_is_named_by_its_option(old, new, says):
    before, now = (promised([only(loaded(profile=ProfileConfig(**PROFILE, args=args)))]) for args in (old, new))
    (told,) = differences(before, now)
    assert says in told and "hunter" not in before + now


def test_a_test_file_is_named():
    told = differences(promised([unit({"a.py": b"1", "b.py": b"1"})]), promised([unit({"a.py": b"1", "b.py": b"2"})]))
    assert len(told) == 1 and told[0].startswith("test file b.py was sha256 ")


def test_a_secret_that_changed_alone_is_told_without_it():
    arms = [{"patched": {"env": {"HF_TOKEN": value}}} for value in ("hf_a", "hf_b")]
    before, now = (promised([only(loaded(arms=a))]) for a in arms)
    (told,) = differences(before, now)
    assert "something that is not recorded, like a secret's value, has changed" in told
    assert "hf_a" not in before + told


def test_an_index_with_its_password_is_a_digest():
    pin = CPU.model_copy(update={"pip_args": ("--index-url", "https://me:secret@host/simple")})
    assert "secret" not in promised([only(loaded(pin=pin))])


def test_the_same_promise_has_no_difference():
    assert differences(promised([BEFORE]), promised([only(loaded())])) == []
    assert promised_cells(promised([BEFORE])) == {BEFORE.id}


@pytest.mark.parametrize(("old", "new", "says"), [
    pytest.param(["prefill"], [], "the run was started with --only prefill, this is without --only", id="only-left-out"),
    pytest.param([], ["prefill"], "the run was started without --only, this is with --only prefill", id="only-added"),
])
def test_another_choice_of_cells_is_told_as_such(old, new, says):
    other = dataclasses.replace(BEFORE, id="replay-p-00000000")
    cells = ([BEFORE], [BEFORE, other]) if old else ([BEFORE, other], [BEFORE])
    assert differences(promised(cells[0], chosen=old), promised(cells[1], chosen=new)) == [says]


@pytest.mark.parametrize(("before", "now", "says"), [
    (1, 2, "cell replay-p-00000000 is new in this matrix"),
    (2, 1, "cell replay-p-00000000 of the run is not in this matrix any more")])
def test_a_cell_that_came_or_went(before, now, says):
    cells = [BEFORE, dataclasses.replace(BEFORE, id="replay-p-00000000")]
    assert differences(promised(cells[:before]), promised(cells[:now])) == [says]


def test_a_rule_of_the_whole_matrix():
    told = differences(promised([BEFORE]), promised([BEFORE], {**RULES, "isolation": "bwrap"}))
    assert told == ["isolation was none, is bwrap"]


def test_one_sentence_for_what_many_cells_share():
    cells = [dataclasses.replace(BEFORE, id=f"prefill-{n}-p-00000000") for n in range(3)]
    later = [dataclasses.replace(only(loaded(seed=7)), id=f"prefill-{n}-p-11111111") for n in range(3)]
    assert differences(promised(cells), promised(later)) == ["seed was 0, is 7 (3 cells, the first prefill-0-p-00000000)"]


def test_cells_of_one_name_are_compared_with_the_most_alike():
    def twins(*prompts):
        return [only(loaded(options={"prompts": [p], "boots": b})) for p, b in prompts]

    (told,) = differences(promised(twins((100, 2), (200, 4))), promised(twins((200, 4), (100, 3))))
    assert told.startswith("with: boots was 2, is 3")


def test_a_list_has_an_end():
    assert listed([f"s{n}" for n in range(8)]) == "s0; s1; s2; s3; s4; and 3 more"


def test_a_promise_is_json():
    assert json.loads(promised([BEFORE]))["cells"][BEFORE.id]["job"] == "prefill"
