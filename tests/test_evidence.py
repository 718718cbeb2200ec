"""Time that vLLM itself used, and the rows that carry their conditions."""

from datetime import datetime, timedelta, timezone

import pytest

from farm import records, schemas
from farm.bench import Needs
from farm.config import PinConfig
from farm.evidence import BuiltArm, Evidence, RunInfo, Span, covered_s
from farm.plan import ArmSpec, Cell, PinSpec
from farm.records import Measurement, Outcome, PatchRow, Reason, Tagged, Verdict
from farm.series import PatchFile

T0 = datetime(2026, 1, 1, tzinfo=timezone.utc)


def at(*seconds):
    return tuple(T0 + timedelta(seconds=s) for s in seconds)


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [([], 0), ([at(0, 5)], 5), ([at(0, 5), at(2, 8)], 8), ([at(0, 5), at(7, 8)], 6), ([at(0, 9), at(2, 3)], 9),
     ([at(7, 8), at(0, 5)], 6), ([at(0, 5), at(5, 6)], 6)],
    ids=["none", "one", "overlap", "gap", "inside", "unsorted", "touching"],
)
def test_side_by_side_counts_once(intervals, seconds):
    assert covered_s(intervals) == seconds


class FakeJob:
    name = "prefill"


def evidence():
    cell = Cell("prefill-x", FakeJob(), None, PinSpec("0.29.0-cpu", PinConfig(version="0.29.0", flavour="cpu")), "tiny-cpu",
                None, (ArmSpec("baseline", ()), ArmSpec("patched", (PatchFile("a.patch", b""),))), {"boots": 2}, Needs(), 1,
                "5e1135")
    made = Evidence(RunInfo("run-1", "c0ffee", False), cell, 1, card={"card": "CPU-1", "host": "h"},
                    versions={"vllm": "0.29.0", "torch": "2.13.0"}, model_sha256="abc", drafter_sha256="def",
                    launcher_sha256="123")
    made.arms["patched"] = BuiltArm("patched", "7ree", (PatchRow("a.patch", "1234", 0, 3, 1, 12, ("v1/x.py",)),))
    return made


def test_a_measurement_carries_the_conditions_of_its_arm():
    table, row = evidence().row(Tagged(Measurement("kv_peak", 0.5, "ratio"), {"arm": "patched", "boot": 1, "pool_tokens": 9}))
    assert table == "measurements"
    assert (row["run"], row["cell"], row["attempt"], row["job"], row["arm"], row["boot"]) == (
        "run-1", "prefill-x", 1, "prefill", "patched", 1)
    assert (row["pin"], row["tree"], row["series_sha256"], row["project_commit"], row["vllm"], row["card"]) == (
        "0.29.0-cpu", "7ree", "5e1135", "c0ffee", "0.29.0", "CPU-1")
    assert row["patches"] == [{"name": "a.patch", "sha256": "1234", "hunks": 3, "offset_hunks": 1, "max_offset": 12}]
    assert row["pool_tokens"] == 9
    assert (row["model_sha256"], row["drafter_sha256"], row["launcher_sha256"]) == ("abc", "def", "123")
    assert set(row) <= set(schemas.SCHEMAS["measurements"].names)


def test_a_misspelt_condition_is_refused():
    with pytest.raises(KeyError, match="pool_tokns"):
        evidence().row(Tagged(Measurement("kv_peak", 0.5, "ratio"), {"pool_tokns": 9}))


def test_a_cell_row_says_its_arms_options_and_times():
    spans = [Span("boot", "patched", *at(0, 4)), Span("requests", "patched", *at(3, 6))]
    row = evidence().cell_row(Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), spans, final=True)
    assert (row["verdict"], row["reason"], row["vllm_s"], row["final"]) == ("PASS", "as-expected", 6.0, True)
    assert [(a["arm"], a["tree"]) for a in row["arms"]] == [("baseline", None), ("patched", "7ree")]
    assert row["options"] == '{"boots": 2}'
    assert set(row) <= set(schemas.SCHEMAS["cells"].names)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [([], 0), ([Verdict.PASS, Verdict.SKIP], 0), ([Verdict.PASS, Verdict.FAIL, Verdict.ERROR], 1),
     ([Verdict.INVALID, Verdict.PASS], 2), ([Verdict.ERROR], 2)],
)
def test_exit_codes(verdicts, code):
    assert records.exit_code(verdicts) == code
