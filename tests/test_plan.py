"""From a matrix to cells: identity, needs, arms."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from farm import models, plan, profilefile
from farm.bench import Needs
from farm.config import CellConfig, CellPlanConfig, Loaded, MatrixConfig, NeedsConfig, PinConfig, ProfileConfig
from farm.errors import UsageError
from farm.records import Reason
from farm.series import PatchFile, Series
from farm.yamlfile import YamlFile
from jobs.prefill import Prefill
from jobs.triage import Triage
from jobs.unit import Suite, Unit

PATCH = b"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
SERIES = Series((PatchFile("one.patch", PATCH), PatchFile("two.patch", PATCH.replace(b"x.py", b"y.py"))), "patches")
CPU = PinConfig(version="0.29.0", flavour="cpu")
CUDA = PinConfig(version="0.29.0", flavour="cuda")


def loaded(cells=None, *, pin=CPU, profile=None, options=None, seed=0, **matrix):
    profile = profile or ProfileConfig(model={"tiny": "qwen3next-cpu"})
    options = options or {"prompts": [100]}
    config = CellConfig(job="prefill", profile="tiny", **{"with": options})
    planned = cells or (CellPlanConfig(config, Prefill(**options), profile, options),)
    whole = MatrixConfig(name="m", pins=("p",), seed=seed, cells=tuple(c.config for c in planned), **matrix)
    return Loaded(YamlFile(Path("m.yaml"), {}), whole, {"p": pin}, {"p": Path("p.yaml")}, planned, Path("patches"))


def only(given, tests=None, series=SERIES):
    (cell,) = plan.cells(given, {"p": series}, tests or {})
    return cell


def test_a_cell_carries_its_arms_with_patches_in_series_order():
    cell = only(loaded(arms={"baseline": {"patches": "none"}, "two": {"patches": ["two.patch", "one.patch"]},
                             "less": {"without": ["one.patch"], "env": {"A": 1}, "args": ["--x", 2]}}))
    assert [(a.name, [p.name for p in a.patches]) for a in cell.arms] == [
        ("baseline", []), ("two", ["one.patch", "two.patch"]), ("less", ["two.patch"])]
    assert (cell.arms[2].env, cell.arms[2].args) == ({"A": "1"}, ("--x", "2"))


@pytest.mark.parametrize("arm", [{"patches": ["tow.patch"]}, {"without": ["tow.patch"]}], ids=["patches", "without"])
def test_an_arm_that_names_a_patch_out_of_the_series_is_refused(arm):
    with pytest.raises(UsageError, match="patch 'tow.patch' is not in the series of patches; it lists: one.patch, two.patch"):
        only(loaded(arms={"a": arm}))


OTHER_PATCH = Series((PatchFile("one.patch", PATCH.replace(b"+b", b"+c")), SERIES.patches[1]), "patches")


@pytest.mark.parametrize(
    ("changed", "series"),
    [(loaded(options={"prompts": [101]}), SERIES), (loaded(seed=1), SERIES), (loaded(), OTHER_PATCH),
     (loaded(profile=ProfileConfig(model={"tiny": "qwen3next-cpu"}, args=["--x"])), SERIES),
     (loaded(pin=CPU.model_copy(update={"torch": "torch==2.13.0"})), SERIES),
     (loaded(arms={"baseline": {"patches": "none"}, "patched": {"env": {"A": "1"}}}), SERIES)],
    ids=["options", "seed", "patch", "profile", "pin", "arm-env"],
)
def test_whatever_could_change_a_result_changes_the_cells_identity(changed, series):
    assert only(loaded()).id == only(loaded()).id
    assert only(changed, series=series).id != only(loaded()).id


def test_the_regression_tests_belong_to_the_identity_of_unit_cells_alone():
    suites = {"suites": [{"name": "r", "source": "series"}]}
    unit = (CellPlanConfig(CellConfig(job="unit", **{"with": suites}), Unit((Suite("r", "series"),)), None, suites),)
    assert only(loaded(unit), {"t.py": b"1"}).id != only(loaded(unit), {"t.py": b"2"}).id
    assert only(loaded(), {"t.py": b"1"}).id == only(loaded(), {"t.py": b"2"}).id


def test_a_cell_that_serves_a_cuda_pin_needs_a_card():
    assert not only(loaded()).needs.cuda
    assert only(loaded(pin=CUDA)).needs.cuda


def test_two_cells_that_are_the_same_are_refused():
    one = loaded().cells[0]
    with pytest.raises(UsageError, match="stands twice in the matrix"):
        plan.cells(loaded((one, one)), {"p": SERIES}, {})


def test_needs_of_job_and_profile_are_combined():
    profile = NeedsConfig(cuda=True, min_capability=(8, 6), min_memory_gib=22).needs()
    assert plan.combine(Needs(min_capability=(8, 9)), profile) == Needs(
        cuda=True, min_capability=(8, 9), min_memory_bytes=22 * 2**30, own_card=True)
    assert plan.combine(Needs(own_card=False), None).own_card is False


def test_a_cell_travels_by_value():
    import pickle

    cell = only(loaded(), series=SERIES)
    assert pickle.loads(pickle.dumps(cell)) == cell


CARRIED = Series((PatchFile("one.patch", b"Applied-Upstream: 0.29.0\n" + PATCH), SERIES.patches[1]), "patches")


@pytest.mark.parametrize(("upstream", "pin", "kept"), [
    ("drop", CPU, ["two.patch"]),
    ("drop", CPU.model_copy(update={"version": "0.28.0"}), ["one.patch", "two.patch"]),
    ("keep", CPU, ["one.patch", "two.patch"]),
], ids=["carried", "an-older-release", "keep"])
def test_an_arm_may_leave_out_what_the_release_carries_by_the_patches_own_headers(upstream, pin, kept):
    cell = only(loaded(pin=pin, arms={"patched": {"upstream": upstream}}), series=CARRIED)
    assert [p.name for p in cell.arms[0].patches] == kept


def triage_of(*versions):
    pins = {f"p{v}": PinConfig(version=v, flavour="cpu") for v in versions}
    config = CellConfig(job="triage")
    whole = MatrixConfig(name="m", pins=tuple(pins), cells=(config,))
    return Loaded(YamlFile(Path("m.yaml"), {}), whole, pins, {p: Path("p.yaml") for p in pins},
                  (CellPlanConfig(config, Triage(), None, {}),), Path("patches")), dict.fromkeys(pins, SERIES)


def test_a_triage_cell_has_no_arms_and_the_older_pins_beside_its_own():
    given, series = triage_of("0.30.0", "0.28.0", "0.29.0")
    cells = {c.pin.name: c for c in plan.cells(given, series, {})}
    assert cells["p0.30.0"].arms == ()
    assert [r.pin.name for r in cells["p0.30.0"].releases] == ["p0.28.0", "p0.29.0", "p0.30.0"]
    assert [r.pin.name for r in cells["p0.28.0"].releases] == ["p0.28.0"]


def test_a_control_is_another_cell():
    options = {"prompts": [100]}
    config = CellConfig(job="prefill", profile="tiny", control="as-expected", **{"with": options})
    planned = (CellPlanConfig(config, Prefill(**options), ProfileConfig(model={"tiny": "qwen3next-cpu"}), options),)
    cell = only(loaded(planned))
    assert cell.control is Reason.AS_EXPECTED and cell.id != only(loaded()).id


def test_a_control_must_be_evidence():
    with pytest.raises(ValidationError, match="a control ends with evidence"):
        CellConfig(job="unit", control="actor-died")


# --- what is served lies in files -----------------------------------------------------------------


def test_the_bytes_of_the_stand_ins_belong_to_a_cells_identity(monkeypatch):
    profile = ProfileConfig(model={"tiny": "qwen3_5-gpu"}, drafter={"tiny": "dflash2-drafter"})
    before = only(loaded(profile=profile))
    assert before.identity["models"] == {kind: models.sha256_of(kind) for kind in ("qwen3_5-gpu", "dflash2-drafter")}
    real = models.sha256_of
    monkeypatch.setattr(models, "sha256_of", lambda kind: "new" if kind == "dflash2-drafter" else real(kind))
    assert only(loaded(profile=profile)).id != before.id


def test_a_start_script_belongs_to_a_cells_identity(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text("model: {vocab_size: 320}\nlauncher: {script: start.sh}\n")
    ids = []
    for script in ("exec vllm serve a", "exec vllm serve a", "exec vllm serve b"):
        (tmp_path / "start.sh").write_text(script)
        ids.append(only(loaded(profile=profilefile.read(tmp_path / "p.yaml", tmp_path))).id)
    assert ids[0] == ids[1] != ids[2]


def test_a_cuda_build_needs_a_card_whatever_the_job(monkeypatch):
    suites = {"suites": [{"name": "r", "source": "series"}]}
    unit = (CellPlanConfig(CellConfig(job="unit", **{"with": suites}), Unit((Suite("r", "series"),)), None, suites),)
    assert only(loaded(unit, pin=CUDA)).needs.cuda and not only(loaded(unit)).needs.cuda
    triage = (CellPlanConfig(CellConfig(job="triage"), Triage(), None, {}),)
    assert not only(loaded(triage, pin=CUDA)).needs.cuda
