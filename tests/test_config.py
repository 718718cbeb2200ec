"""What a matrix may say, and what each mistake in one comes back as."""

from pathlib import Path

import pytest

import jobs
from farm import config, yamlfile
from farm.errors import UsageError

PIN = "version: 0.29.0\nflavour: cpu\ntorch: torch==2.13.0\n"
PROFILE = "model: {tiny: qwen3next-cpu}\nargs: [--max-model-len=1024, --seed, 7]\nenv: {A: 1, B: true}\n"
MATRIX = """\
name: demo
pins: [p29]
cells:
  - job: prefill
    profile: tiny
    with: {prompts: [100]}
    expect:
      - {metric: kv_peak, direction: unchanged}
  - job: replay
    name: nulls
    with:
      scenarios:
        - {name: a, block_size: 832, speculative_blocks: 3, prompts: [2000]}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("configs/matrix", "configs/pins", "configs/profiles", "patches"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "configs/pins/p29.yaml").write_text(PIN)
    (tmp_path / "configs/profiles/tiny.yaml").write_text(PROFILE)
    return tmp_path


def write(project, text) -> Path:
    file = project / "configs/matrix/m.yaml"
    file.write_text(text)
    return file


def test_a_sound_matrix_is_loaded_with_all_that_it_names(project):
    loaded = config.load(write(project, MATRIX))
    assert [c.job.name for c in loaded.cells] == ["prefill", "replay"]
    assert loaded.pins["p29"].torch == "torch==2.13.0"
    assert loaded.cells[0].profile.args == ("--max-model-len=1024", "--seed", "7")
    assert loaded.cells[0].profile.env == {"A": "1", "B": "true"}
    assert loaded.cells[0].job.expect[0].direction == "unchanged"
    assert set(loaded.matrix.arms) == {"baseline", "patched"}
    assert loaded.series_root == project / "patches"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("profile: tiny", "profile: tny", 5, "unknown profile 'tny'; did you mean 'tiny'?"),
        ("pins: [p29]", "pins: [p28]", 2, "unknown pin 'p28'; did you mean 'p29'?"),
        ("job: replay", "job: reply", 9, "unknown job 'reply'; did you mean 'replay'?"),
        ("{prompts: [100]}", "{promts: [100]}", 6, "unknown key 'promts'; did you mean 'prompts'?"),
        ("metric: kv_peak, direction", "metric: kv_peak, directoin", 8, "unknown key 'directoin'; did you mean 'direction'?"),
        ("name: demo", "name: demo\narmz: {}", 2, "unknown key 'armz'; did you mean 'arms'?"),
        ("    profile: tiny\n", "", 4, "job 'prefill' serves a model: give it a profile"),
        ("    name: nulls", "    arms: [basline]", 10, "unknown arm 'basline'; did you mean 'baseline'?"),
        ("{prompts: [100]}", "{prompts: [100, 100]}", 6, "the second would be cached"),
        ("name: demo", "name: demo\nseries: nowhere", 2, "series directory 'nowhere' is not there"),
        ("name: demo", "name: a/b", 1, "should match pattern"),
        ("prompts: [100]", "prompts: [100, 1020]", 6,
         "a request of 1028 tokens (prompt and reply) does not fit --max-model-len=1024"),
        ("    name: nulls", "    expect: {a: {arms: {basline: {peak_blocks_max: 9}}}}", 10,
         "unknown arm 'basline'; did you mean 'baseline'?"),
        ("name: demo", "name: demo\narms: {a: {env: {FOO: [1]}}}", 2, "'FOO' has a list or mapping for a value"),
        ("block_size: 832", "block_size: 0", 13, "greater than or equal to 1, got 0"),
    ],
    ids=["profile", "pin", "job", "option", "rule-key", "key", "no-profile", "arm", "cross-field", "series",
         "name", "too-long", "expected-arm", "env-list", "range"],
)
def test_a_mistake_is_one_line_with_its_place(project, old, new, line, says):
    assert old in MATRIX
    file = write(project, MATRIX.replace(old, new))
    with pytest.raises(UsageError) as caught:
        config.load(file)
    assert says in caught.value.what
    assert (caught.value.file, caught.value.line) == (file, line)
    assert "\n" not in str(caught.value)


def test_a_job_that_is_planned_is_refused_by_name(project, monkeypatch):
    monkeypatch.setattr(jobs, "PLANNED", frozenset({"later"}))
    with pytest.raises(UsageError, match="job 'later' is not built yet; run the others with --only prefill") as caught:
        config.load(write(project, MATRIX.replace("job: replay", "job: later")))
    assert caught.value.line == 9


LAUNCHED = "model: {vocab_size: 320}\nlauncher: {script: start.sh}\nexpect: {args: [--max-model-len=1024]}\n"


def test_an_arms_arguments_need_a_variable_of_the_launcher(project):
    profile, arms = project / "configs/profiles/tiny.yaml", "name: demo\narms: {a: {args: [--seed=7]}, b: {}}"
    profile.write_text(LAUNCHED)
    file = write(project, MATRIX.replace("name: demo", arms))
    with pytest.raises(UsageError, match="arm 'a', profile 'tiny': .*launcher.args_env: EXTRA_ARGS") as caught:
        config.load(file)
    assert (caught.value.file, caught.value.line) == (file, 2)
    profile.write_text(LAUNCHED.replace("start.sh", "start.sh, args_env: EXTRA_ARGS"))
    assert config.load(file).cells[0].profile.launcher.args_env == "EXTRA_ARGS"
    with pytest.raises(UsageError, match="argument '--a b' has blanks"):
        config.load(write(project, MATRIX.replace("name: demo", arms.replace("--seed=7", "--a b"))))


def test_the_length_that_a_launcher_must_serve_is_expected_of_it(project):
    (project / "configs/profiles/tiny.yaml").write_text(LAUNCHED)
    with pytest.raises(UsageError, match="does not fit --max-model-len=1024"):
        config.load(write(project, MATRIX.replace("prompts: [100]", "prompts: [1020]")))


def test_a_start_script_is_refused_where_servers_have_no_network(project):
    (project / "configs/profiles/tiny.yaml").write_text(LAUNCHED)
    sandboxed = MATRIX.replace("name: demo", "name: demo\nisolation: bwrap")
    file = write(project, sandboxed)
    with pytest.raises(UsageError, match=r"'tiny' has a launcher \(start.sh\).*a profile with args.*isolation: none") as caught:
        config.load(file)
    assert (caught.value.file, caught.value.line) == (file, 6)
    assert config.load(file, only=("replay",)).cells  # which serves nothing
    (project / "configs/profiles/tiny.yaml").write_text(PROFILE)
    assert config.load(file).matrix.isolation == "bwrap"


def test_the_series_beside_the_matrix_wins_over_the_working_directorys(project, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "patches").mkdir()
    monkeypatch.chdir(elsewhere)
    assert config.load(write(project, MATRIX)).series_root == project / "patches"
    (project / "patches").rmdir()
    assert config.load(write(project, MATRIX)).series_root == elsewhere / "patches"


@pytest.mark.parametrize(
    ("args", "limit"),
    [((), None), (("--max-model-len=5",), 5), (("--max-model-len", "5"), 5), (("--max-model-len=5", "--max-model-len=7"), 7),
     (("--max-model-len=auto",), None), (("--max-model-len",), None)],
    ids=["none", "equals", "word", "last-wins", "auto", "cut"],
)
def test_the_length_that_a_profile_serves(args, limit):
    assert config._max_model_len(args) == limit


def test_a_mistake_in_a_pin_names_the_pins_file(project):
    (project / "configs/pins/p29.yaml").write_text("version: 0.29.0\nflavor: cpu\n")
    with pytest.raises(UsageError, match="did you mean 'flavour'") as caught:
        config.load(write(project, MATRIX))
    assert (caught.value.file.name, caught.value.line) == ("p29.yaml", 2)


def test_only_keeps_cells_by_job_or_name_and_checks_no_other(project):
    text = MATRIX.replace("profile: tiny", "profile: missing")
    assert [c.job.name for c in config.load(write(project, text), ("nulls",)).cells] == ["replay"]
    with pytest.raises(UsageError, match="no cell has this job or name; there are: nulls, prefill, replay"):
        config.load(write(project, text), ("unit",))


def test_a_profile_may_name_variables_of_the_environment(project, monkeypatch):
    (project / "configs/profiles/tiny.yaml").write_text('model: {path: "${FARM_TEST_MODEL}/x"}\n')
    file = write(project, MATRIX)
    monkeypatch.delenv("FARM_TEST_MODEL", raising=False)
    with pytest.raises(UsageError, match="FARM_TEST_MODEL is not set") as caught:
        config.load(file)
    assert (caught.value.file.name, caught.value.line) == ("tiny.yaml", 1)
    monkeypatch.setenv("FARM_TEST_MODEL", "/models")
    assert config.load(file).cells[0].profile.model.path == "/models/x"


@pytest.mark.parametrize("model", ["{}", "{tiny: qwen3next-cpu, path: b}"], ids=["neither", "both"])
def test_a_profile_names_exactly_one_model(project, model):
    (project / "configs/profiles/tiny.yaml").write_text(f"model: {model}\n")
    with pytest.raises(UsageError, match="exactly one of tiny and path"):
        config.load(write(project, MATRIX))


@pytest.mark.parametrize("file", sorted((config.PROJECT / "configs/matrix").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_projects_own_matrices_load(file, monkeypatch):
    monkeypatch.setenv("FARM_MODEL", "/models/a")
    monkeypatch.setenv("FARM_DRAFTER", "/models/b")
    present = {cell.job for cell in yamlfile.validate(yamlfile.read(file), config.MatrixConfig).cells}
    assert present <= set(jobs.REGISTRY) | jobs.PLANNED
    assert config.load(file, tuple(present & set(jobs.REGISTRY))).cells
