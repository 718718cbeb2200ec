"""The environment of a process in a tree."""

import os
from pathlib import Path

import pytest

from farm.bench import Card
from farm.childenv import CACHES, TIES, child_environment, redact, redact_argv

CPU = Card(uuid="cpu-0", name="CPU slot 0", kind="cpu", host="h", cores=(2, 3))
GPU = Card(uuid="GPU-1234", name="NVIDIA GeForce RTX 3090", kind="cuda", host="h")
BASE = {"PATH": "/usr/bin", "LANG": "C.UTF-8", "HOME": "/root", "RAY_JOB_ID": "1", "RAY_AUTH_TOKEN": "t",
        "HF_TOKEN": "secret", "PYTHONPATH": "/elsewhere", "VLLM_LEFT_OVER": "1", "CUDA_VISIBLE_DEVICES": "7",
        "AWS_SECRET_ACCESS_KEY": "s", "TMPDIR": "/t", "LD_PRELOAD": "x.so"}


def build(extra=None, card=CPU, site=None):
    return child_environment(extra or {}, tree=Path("/tree"), site=site, caches=Path("/c"), card=card, base=BASE)[0]


@pytest.mark.parametrize(
    "name",
    ["RAY_JOB_ID", "RAY_AUTH_TOKEN", "HF_TOKEN", "VLLM_LEFT_OVER", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "TMPDIR"])
def test_what_is_not_on_the_list_stays_out(name):
    assert name not in build()


def test_what_is_on_the_list_passes():
    assert (build()["PATH"], build()["LANG"]) == ("/usr/bin", "C.UTF-8")


def test_home_and_every_cache_are_the_trees_own():
    environment = build({"HOME": "/root", "VLLM_CACHE_ROOT": "/shared"})
    assert {name: environment[name] for name in CACHES} == {name: f"/c/{folder}" for name, folder in CACHES.items()}


@pytest.mark.parametrize(("site", "path"), [(None, "/tree"), (Path("/site"), "/tree:/site")])
def test_the_tree_comes_first_whatever_a_profile_says(site, path):
    assert build({"PYTHONPATH": "/sneaky"}, site=site)["PYTHONPATH"] == path


@pytest.mark.parametrize(("extra", "path"), [({}, "/usr/bin"), ({"PATH": "/own"}, "/own"), ({"PATH": ""}, os.defpath)])
def test_commands_of_ours_come_first_on_path(extra, path):
    environment, recorded = child_environment(extra, tree=Path("/tree"), site=None, caches=Path("/c"), card=CPU,
                                              commands=Path("/ours"), base=BASE)
    assert environment["PATH"] == recorded["PATH"] == f"/ours:{path}"


def test_what_ties_a_process_to_card_and_caches_is_always_set():
    assert all(name in build({"VLLM_CACHE_ROOT": ""}) for name in TIES)


@pytest.mark.parametrize(("card", "visible"), [(GPU, "GPU-1234"), (CPU, "")])
def test_the_card_is_named_by_its_uuid(card, visible):
    assert build({"CUDA_VISIBLE_DEVICES": "0"}, card=card)["CUDA_VISIBLE_DEVICES"] == visible


def test_a_cpu_slot_keeps_to_its_cores():
    environment = build()
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "2,3")
    assert "OMP_NUM_THREADS" not in build(card=GPU)


def test_profile_and_arm_win_over_defaults_but_bring_no_ray():
    environment = build({"HF_HUB_OFFLINE": "0", "VLLM_KNOB": "1", "RAY_ADDRESS": "auto", "FARM_RUN": "r1"})
    assert (environment["HF_HUB_OFFLINE"], environment["VLLM_KNOB"], environment["FARM_RUN"]) == ("0", "1", "r1")
    assert "RAY_ADDRESS" not in environment


@pytest.mark.parametrize(
    ("name", "value", "recorded"),
    [("HF_TOKEN", "hf_x", "set"), ("VLLM_API_KEY", "k", "set"), ("DB_PASSWORD", "p", "set"), ("HF_TOKEN", "", "unset"),
     ("DFLASH_TOKENS", "7", "7"), ("TOKENIZERS_PARALLELISM", "0", "0"), ("PATH", "/bin", "/bin")],
)
def test_secrets_are_recorded_as_set_or_unset(name, value, recorded):
    assert redact({name: value}) == {name: recorded}


def test_the_child_gets_the_secret_that_the_record_hides():
    environment, recorded = child_environment({"HF_TOKEN": "hf_x"}, tree=Path("/tree"), site=None, caches=Path("/c"),
                                              card=CPU, base={})
    assert (environment["HF_TOKEN"], recorded["HF_TOKEN"]) == ("hf_x", "set")


@pytest.mark.parametrize(
    ("argv", "recorded"),
    [(("--api-key", "k", "--max-model-len", "9"), ("--api-key", "set", "--max-model-len", "9")),
     (("--hf-token=t",), ("--hf-token=set",)),
     (("--max-num-batched-tokens", "9", "--tokenizer", "x"), ("--max-num-batched-tokens", "9", "--tokenizer", "x"))],
)
def test_secrets_in_arguments(argv, recorded):
    assert redact_argv(argv) == recorded
