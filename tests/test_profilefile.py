"""What a profile may say: serve arguments, or a start script, and what its boots must be."""

import pytest

from farm import profilefile
from farm.bootcheck import ExpectedFacts
from farm.errors import FarmError, UsageError
from farm.profilefile import script_sha256
from farm.records import Reason

LAUNCHER = """\
model: {vocab_size: 248320}
launcher:
  script: single-user/start.sh
  env: {SPEC: mtp, CTX: long, PREFIX_CACHE: 1, MAX_LEN: 65536}
  args: [--now, 7]
  args_env: EXTRA_ARGS
env: {CTX: fast, B: true}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a script, and another working directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "single-user").mkdir()
    (tmp_path / "single-user" / "start.sh").touch()
    return tmp_path


def read(project, text):
    file = project / "p.yaml"
    file.write_text(text)
    return profilefile.read(file, project)


def test_a_launcher_with_its_knobs(project):
    profile = read(project, LAUNCHER)
    assert profile.served_env == {"CTX": "long", "B": "true", "SPEC": "mtp", "PREFIX_CACHE": "1", "MAX_LEN": "65536"}
    assert (profile.args, profile.served_args) == ((), ())
    launcher = profile.launcher.found()
    assert (launcher.script, launcher.directory) == (project / "single-user/start.sh", project)
    assert (launcher.args, launcher.port_env, launcher.args_env) == (("--now", "7"), "PORT", "EXTRA_ARGS")


def test_the_working_directorys_script_comes_first(project):
    here = project / "elsewhere" / "single-user"
    here.mkdir()
    (here / "start.sh").touch()
    profile = read(project, LAUNCHER)
    assert profile.launcher.directory is None  # relative, so that every machine looks in its own
    assert profile.launcher.found().script == here / "start.sh"


@pytest.mark.parametrize("script", ["single-user/start.sh", "start.sh"])
def test_the_directory_is_where_the_script_is_run(project, script):
    directory = project if "/" in script else project / "single-user"
    launcher = read(project, LAUNCHER.replace("script: single-user/start.sh", f"script: {script}\n  directory: {directory}"))
    assert launcher.launcher.found().script == project / "single-user/start.sh"
    assert launcher.launcher.found().directory == directory


def test_a_script_that_is_not_on_this_machine(project):
    profile = read(project, LAUNCHER.replace("start.sh", "nothing.sh"))
    with pytest.raises(FarmError, match="launcher script single-user/nothing.sh is not on this machine") as caught:
        profile.launcher.found()
    assert caught.value.reason is Reason.BAD_CONFIG


def test_a_start_script_that_is_another_on_the_cards_machine_is_refused(project):
    profile = read(project, LAUNCHER)
    script = project / "single-user/start.sh"
    assert profile.launcher.sha256 == script_sha256(script) == script_sha256(profile.launcher.found().script)
    script.write_text("exec another\n", encoding="utf-8")
    with pytest.raises(FarmError, match="is not the one that the run began with") as caught:
        profile.launcher.found()
    assert caught.value.reason is Reason.BAD_CONFIG


def test_a_start_script_that_the_driver_does_not_have_is_up_to_the_cards_machine(project):
    assert read(project, LAUNCHER.replace("start.sh", "nothing.sh")).launcher.sha256 is None


def test_variables_are_those_of_the_drivers_environment(project, monkeypatch):
    monkeypatch.setenv("CLUB", str(project))
    text = LAUNCHER.replace("script: ", "directory: ${CLUB}\n  script: ").replace("SPEC: mtp", 'SPEC: mtp, MODELS: "${CLUB}/m"')
    profile = read(project, text)
    assert (profile.launcher.directory, profile.served_env["MODELS"]) == (str(project), f"{project}/m")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("env: {CTX", "args: [--x]\nenv: {CTX", "give args or launcher, not both"),
        ("model: {vocab_size: 248320}\n", "", "give model.vocab_size, or model.path"),
        ("{vocab_size: 248320}", "{tiny: qwen3next-cpu}", "launcher.model_env"),
        ("{vocab_size: 248320}", "{path: a, tiny: qwen3next-cpu}", "exactly one of tiny and path"),
        ("args_env: EXTRA_ARGS", "args_env: EXTRA ARGS", "args_env: string should match pattern"),
        ("args_env: EXTRA_ARGS", "arg_env: EXTRA_ARGS", "unknown key 'arg_env'; did you mean 'args_env'?"),
        ("SPEC: mtp", "SPEC: [mtp]", "'SPEC' has a list or mapping for a value"),
        ("SPEC: mtp", "SPEC: off", "YAML reads the value of 'SPEC' as true or false; put the word in quotes"),
        ("env: {CTX", "expect: {block_size: predict}\nenv: {CTX", "expect.block_size"),
        ("env: {CTX", "expect: {pool_tokens: 0}\nenv: {CTX", "expect.pool_tokens"),
    ],
    ids=["args-too", "no-vocabulary", "tiny-untold", "two-models", "variable", "key", "env-list", "env-off",
         "block-word", "pool-zero"],
)
def test_a_mistake_in_a_profile(project, old, new, says):
    assert old in LAUNCHER
    with pytest.raises(UsageError) as caught:
        read(project, LAUNCHER.replace(old, new))
    assert says in str(caught.value)


def test_a_profile_without_a_launcher_needs_a_model(project):
    with pytest.raises(UsageError, match="exactly one of tiny and path"):
        read(project, "model: {vocab_size: 320}\nargs: [--x]\n")


DRAFTED = "model: {path: /m}\ndrafter: {tiny: dflash2-drafter}\nargs: ['--s={\"model\": \"${DRAFTER}\"}', --x]\n"


def test_a_drafters_folder_is_put_in_on_the_cards_machine(project, monkeypatch):
    monkeypatch.setenv("DRAFTER", "/of/the/driver")
    profile = read(project, DRAFTED)
    assert profile.args == ('--s={"model": "${DRAFTER}"}', "--x")
    assert profile.drafting_with(project).args == (f'--s={{"model": "{project}"}}', "--x")
    launched = read(project, f"{LAUNCHER}drafter: {{path: /d}}\n".replace("SPEC: mtp", 'SPEC: "${DRAFTER}/x"'))
    assert launched.drafting_with(project).served_env["SPEC"] == f"{project}/x"
    assert launched.drafting_with(project).launcher.args == ("--now", "7")


def test_without_a_drafter_its_variable_is_one_like_any_other(project, monkeypatch):
    monkeypatch.delenv("DRAFTER", raising=False)
    with pytest.raises(UsageError, match="DRAFTER is not set"):
        read(project, DRAFTED.replace("drafter: {tiny: dflash2-drafter}\n", ""))


def test_a_drafter_is_one_model(project):
    with pytest.raises(UsageError, match="drafter: give exactly one of tiny and path"):
        read(project, DRAFTED.replace("{tiny: dflash2-drafter}", "{}"))


def test_what_a_profile_expects(project):
    expect = "expect: {block_size: predicted, pool_tokens: 5, backend: FLASH_ATTN, connector: C, args: [--x, 1]}\n"
    config = read(project, f"model: {{path: /m}}\n{expect}").expect
    assert config.facts(("--y",), predicted=832) == ExpectedFacts(832, 5, "FLASH_ATTN", "C", ("--x", "1", "--y"))
    assert config.facts(()).block_size is None
    assert read(project, "model: {path: /m}\nexpect: {block_size: 416}\n").expect.facts((), predicted=832).block_size == 416
