"""Two runs side by side: what counts as the same, and what is said of what is not."""

import shutil

import pytest
from rich.console import Console

from farm.agreement import compare, digest, print_agreement, ran
from farm.config import PROJECT
from farm.errors import UsageError
from farm.store import Store

TINY = PROJECT / "tests/data/runs/h200-gpu-tiny"
MTP = "prefill-mtp-long-tiny-mtp-long-site-cuda-6958789d"
KEYS = ("metric", "arm", "pair", "order", "boot", "probe", "prompt_sha256", "prompt_tokens", "cached_tokens")


def cell(name, verdict="PASS", reason="as-expected", *, attempt=1, final=True, card="GPU-a"):
    return {"cell": name, "verdict": verdict, "reason": reason, "attempt": attempt, "final": final, "card": card}


def peak(name, value, *, attempt=1, metric="kv_peak", arm="patched", tokens=32000, boot=0, probe=False):
    found = dict.fromkeys(KEYS)
    return found | {"cell": name, "attempt": attempt, "metric": metric, "arm": arm, "prompt_tokens": tokens, "boot": boot,
                    "probe": probe, "value": value}


def digested(cells, peaks, run="first"):
    return digest(run, {"wall_s": 100.0}, cells, peaks)


ONE = ([cell("a"), cell("b", "FAIL", "changed")], [peak("a", 0.5), peak("a", 0.25, boot=1), peak("a", 0.5, metric="ttft")])


@pytest.mark.parametrize("second", [
    ONE,
    ([*ONE[0], cell("a", "ERROR", "actor-died", attempt=2, final=False)], [*ONE[1], peak("a", 0.9, attempt=2)]),
    (ONE[0], [*ONE[1][:2], peak("a", 0.7, metric="ttft")]),
    (ONE[0], [ONE[1][1], ONE[1][0]]),
], ids=["itself", "with-an-attempt-that-failed", "ttft-is-no-peak", "in-another-order"])
def test_the_same(second):
    found = compare(digested(*ONE), digested(*second, run="second"))
    assert found.same
    assert found.summary == "the same: all 2 verdicts, and all 2 peaks to the last digit"


@pytest.mark.parametrize(("second", "says"), [
    (([cell("a"), cell("b")], ONE[1]), "b: ended FAIL changed in the first run, PASS as-expected in the second"),
    (([cell("a", "PASS", "no-regression"), ONE[0][1]], ONE[1]),
     "a: ended PASS as-expected in the first run, PASS no-regression in the second"),
    ((ONE[0][:1], ONE[1]), "b: is not in second"),
    (([*ONE[0], cell("c")], ONE[1]), "c: is not in first"),
    (([cell("a", final=False), ONE[0][1]], ONE[1]), "a: ended PASS as-expected in the first run, not final in the second"),
    ((ONE[0], [peak("a", 0.5), peak("a", 0.2500001, boot=1)]),
     "a: kv_peak of arm patched, boot 1, 32,000 tokens: 0.25 and 0.2500001 ("),
    ((ONE[0], [peak("a", 0.5), peak("a", 0.3, boot=1)]), "a: kv_peak of arm patched, boot 1, 32,000 tokens: 0.25 and 0.3 ("),
    ((ONE[0], [peak("a", 0.5)]), "a: kv_peak of arm patched, boot 1, 32,000 tokens: 0.25 and nothing"),
    ((ONE[0], [*ONE[1], peak("b", None, arm=None, tokens=None, boot=None)]), "b: kv_peak of the cell: nothing and no value"),
], ids=["verdict", "reason", "only-in-the-first", "only-in-the-second", "not-final", "last-digit", "peak", "peak-missing",
        "peak-new"])
def test_a_difference(second, says, capsys):
    found = compare(digested(*ONE), digested(*second, run="second"))
    assert not found.same
    print_agreement(Console(width=300), found)
    assert says in capsys.readouterr().out


def test_scenarios_that_measure_the_same_are_paired_by_their_order():
    rows = [peak("a", 1.0, metric="peak_blocks"), peak("a", 2.0, metric="peak_blocks")]
    assert compare(digested([cell("a")], rows), digested([cell("a")], rows)).cells[0].peaks == 2
    assert not compare(digested([cell("a")], rows), digested([cell("a")], rows[::-1])).same


def test_nothing_is_not_the_same():
    found = compare(digested([], []), digested([], []))
    assert not found.same and found.summary == "no cell in either run"


@pytest.fixture
def recorded(tmp_path):
    """A run of a real card and its copy as a second root: (store, its copy, run)."""
    store = Store.at(TINY)
    (run,) = store.runs()
    return store, Store.open(shutil.copytree(TINY, tmp_path / "copy")), run


def test_a_recorded_run_and_its_copy(recorded, capsys):
    store, copy, run = recorded
    found = compare(ran(store, run), ran(copy, run))
    print_agreement(Console(width=300), found)
    said = capsys.readouterr().out
    assert found.same and f"{MTP}\tPASS as-expected\tPASS as-expected\t60 of 60\tyes" in said
    took = f"{run}: 1 card, wall 1,150.8 s"
    assert said.splitlines()[-2:] == [f"{took}; {took}; the second was 1.00 times as fast",
                                      "the same: all 6 verdicts, and all 118 peaks to the last digit"]


def test_a_damaged_file_is_no_difference(recorded):
    store, copy, run = recorded
    file = next((TINY.parent / copy.root).glob(f"table=measurements/run={run}/*.parquet"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UsageError, match="cannot be compared"):
        ran(copy, run)


@pytest.mark.parametrize(("change", "code"), [(0.0, 0), (1e-9, 1)], ids=["equal", "one-peak-differs"])
def test_the_verb(recorded, capsys, monkeypatch, change, code):
    from farm import cli

    store, copy, run = recorded
    name = "prefill-x-00000000"
    rows = store.read("measurements", run).to_pylist()
    new = next(r for r in rows if r["cell"] == MTP and r["metric"] == "kv_peak") | {"cell": name, "env": None}
    ended = next(r for r in store.read("cells", run).to_pylist() if r["cell"] == MTP) | {"cell": name, "arms": None}
    for one, value in (("r1", new["value"]), ("r2", new["value"] + change)):
        copy.commit(one, name, 1, {"measurements": [new | {"run": one, "value": value}], "cells": [ended | {"run": one}]})
    monkeypatch.setattr("sys.argv", ["farm", "compare", "r1", "r2", "--results", copy.root])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    assert ("the same: all 1 verdicts" in capsys.readouterr().out) is (code == 0)
    for words in (["r1", "r1"], ["r1", "r3"]):
        monkeypatch.setattr("sys.argv", ["farm", "compare", *words, "--results", copy.root])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 3
