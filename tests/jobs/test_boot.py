"""boot: which warnings a boot gave, against those that it must give."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from pydantic import TypeAdapter, ValidationError

from farm.bench import Arm, BootFacts, balanced_order
from farm.records import Reason, Verdict
from jobs.boot import Boot

KNOB = "VLLM_NO_SUCH_KNOB"


@dataclass
class FakeServer:
    facts: BootFacts


@dataclass
class FakeBench:
    warned: dict  # arm -> knobs
    arms: dict = field(default_factory=dict)

    def __post_init__(self):
        self.arms = {name: Arm(name, name, ()) for name in self.warned}

    @contextmanager
    def serve(self, slot):
        yield FakeServer(BootFacts(unknown_knobs=self.warned[slot.arm], block_size=416))

    def order(self, arms, boots):
        return balanced_order(arms, boots)


@pytest.mark.parametrize(("warned", "expected", "verdict", "reason", "says"), [
    pytest.param({"a": (), "b": ()}, (), Verdict.PASS, Reason.AS_EXPECTED, "2 boots", id="quiet"),
    pytest.param({"a": (KNOB,)}, (KNOB,), Verdict.PASS, Reason.AS_EXPECTED, "1 boots, each with 1 warnings", id="exactly-one"),
    pytest.param({"a": ()}, (KNOB,), Verdict.FAIL, Reason.UNKNOWN_KNOB, "a boot 0 warned of no unknown knob", id="no-warning"),
    pytest.param({"a": (KNOB, KNOB)}, (KNOB,), Verdict.FAIL, Reason.UNKNOWN_KNOB, f"{KNOB} (2 times)", id="twice"),
    pytest.param({"a": (), "b": (KNOB,)}, (), Verdict.FAIL, Reason.UNKNOWN_KNOB, f"b boot 0 warned of {KNOB}", id="one-arm"),
    pytest.param({"a": ("VLLM_OTHER",)}, (KNOB,), Verdict.FAIL, Reason.UNKNOWN_KNOB, "VLLM_OTHER", id="another"),
])
def test_warnings(warned, expected, verdict, reason, says):
    *rows, outcome = Boot(unknown_knobs=expected).run(FakeBench(warned))
    assert [r.record.value for r in rows] == [len(k) for k in warned.values()]
    assert rows[0].conditions["block_size"] == 416
    assert (outcome.verdict, outcome.reason) == (verdict, reason) and says in outcome.detail


def test_each_boot_of_each_arm():
    *rows, _ = Boot(boots=2).run(FakeBench({"a": (), "b": ()}))
    assert [(r.conditions["arm"], r.conditions["boot"]) for r in rows] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


@pytest.mark.parametrize("options", [{"boots": 0}, {"unknown_knobs": ["FARM_X"]}, {"knobs": []}], ids=str)
def test_options_that_cannot_be_meant(options):
    with pytest.raises(ValidationError):
        TypeAdapter(Boot).validate_python(options)
