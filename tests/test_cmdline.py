"""Command lines of servers, and arguments that they do not say."""

import pytest

from farm.cmdline import ignored, is_server, values

SERVE = ("/v/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/m")


@pytest.mark.parametrize(
    ("line", "yes"),
    [
        ("python -m vllm.entrypoints.cli.main serve /m", True),
        ("/v/bin/python /v/bin/vllm serve /m --port 1", True),
        ("python /tree/vllm/entrypoints/cli/main.py serve /m", True),
        ("python -m vllm.entrypoints.openai.api_server --model /m", True),
        ("/v/bin/python /v/bin/vllm bench serve", False),
        ("bash single-user/start_vllm.sh", False),
        ("bash /home/vllm/start.sh serve", False),
        ("VLLM::EngineCore", False),
        ("python -c from\\ multiprocessing.spawn", False),
        ("/usr/bin/nginx", False),
        ("", False),
    ],
)
def test_which_command_line_is_a_servers(line, yes):
    assert is_server(line.split()) is yes


@pytest.mark.parametrize(
    ("wanted", "said", "missing"),
    [
        (["--a=1"], ["--a=1"], []),
        (["--a=1"], ["--a", "1"], []),
        (["--a", "1"], ["--a=1"], []),
        (["--kv_mem=1"], ["--kv-mem", "1"], []),
        (["--a=1"], [], ["--a 1"]),
        (["--a=1"], ["--a=2"], ["--a 1"]),
        (["--a=1"], ["--a=1", "--b", "--a=2"], ["--a 1"]),
        (["--a=1"], ["--a=2", "--a=1"], []),
        (["--a=1", "--a=2"], ["--a=2"], []),
        (["--enforce-eager"], ["--enforce-eager", "/model"], []),
        (["--async-scheduling"], ["--async-scheduling", "--no-async-scheduling"], ["--async-scheduling"]),
        (["--no-async-scheduling"], ["--no-async-scheduling"], []),
        (["--no-async-scheduling"], [], ["--no-async-scheduling"]),
        (['--spec={"method":"mtp","k":3}'], ["--spec", '{"k": 3, "method": "mtp"}'], []),
        (['--spec={"k":3}'], ["--spec", '{"k": 4}'], ['--spec {"k":3}']),
        (["--c.some_key=1"], ["--c.some_key", "1"], []),
        (["--seed", "-1"], ["--seed=-1"], []),
        (["-tp", "2"], ["-tp", "2"], []),
        (["--mods", "a", "b"], ["--mods", "a", "c"], ["--mods a b"]),
    ],
)
def test_arguments_that_were_asked_for_and_ignored(wanted, said, missing):
    assert ignored(wanted, (*SERVE, *said)) == missing


@pytest.mark.parametrize(("words", "found"), [
    (["--kv-offloading-size=4"], ("4",)),
    (["--kv_offloading_size", "4", "--x"], ("4",)),
    (["--kv-offloading-size=4", "--kv-offloading-size=5"], ("5",)),
    (["--kv-offloading-size=4", "--no-kv-offloading-size"], None),
    (["--kv-offloading-size"], ()),
    (["--kv-offloading-size-more=4"], None),
], ids=["equals", "underscores", "the-last", "negated", "without-a-value", "another"])
def test_what_follows_the_last_use_of_a_flag(words, found):
    assert values((*SERVE, *words), "--kv-offloading-size") == found
