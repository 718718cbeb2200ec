"""Block sizes against what vLLM printed and what DOMAIN.md records; serve arguments in all their spellings."""

from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import yaml

from farm import bootlog, geometry, models
from farm.errors import UsageError
from farm.geometry import Prediction, Serving, cached_tokens, predict, serving

DATA = Path(__file__).parent / "data"
PROFILES = Path(__file__).parent.parent / "configs" / "profiles"
TINY = models.config("qwen3_5-gpu")  # the head shapes of the 27B model
CPU = models.config("qwen3next-cpu")
# The 27B model's own config, as far as it matters: a multimodal one that asks for a float32 state.
REAL = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
    },
}
MTP, DFLASH = "--speculative-config={\"method\": \"mtp\", \"num_speculative_tokens\": %d}", \
    "--speculative-config={\"method\": \"dflash\", \"model\": \"/m\", \"num_speculative_tokens\": %d}"
HALF = "--mamba-ssm-cache-dtype=float16"


@pytest.mark.parametrize(
    ("config", "args", "tokens"),
    [
        (REAL, ["--kv-cache-dtype=fp8", MTP % 3, HALF], 832),
        (REAL, ["--kv-cache-dtype=bfloat16", MTP % 4, HALF], 432),
        (REAL, ["--kv-cache-dtype=bfloat16", DFLASH % 7, HALF], 448),
        (REAL, ["--kv-cache-dtype=bfloat16", DFLASH % 15, HALF], 480),
        (REAL, ["--kv-cache-dtype=int8_per_token_head", DFLASH % 7, HALF], 864),
        (REAL, ["--kv-cache-dtype=fp8", MTP % 3], 1600),  # float32 as its config asks, twice the state
        (TINY, [MTP % 3], 416),
        (TINY, ["--kv-cache-dtype=bfloat16", DFLASH % 7], 448),
        (TINY, ["--kv-cache-dtype=bfloat16", DFLASH % 15], 480),
        (TINY, [], 400),
        (TINY, ["--block-size=64", MTP % 3], 448),  # the step then is that block
        (TINY, ["--block-size=1024", MTP % 3], 1024),  # large enough already
        (TINY, ["--tensor-parallel-size=2", MTP % 3], 416),  # half the state over half the heads
    ],
    ids=["mtp/long", "mtp/fast", "dflash2/fast-k7", "dflash2/fast-k15", "dflash2/long", "float32-state", "tiny-mtp", "tiny-k7",
         "tiny-k15", "no-drafts", "block-64", "block-1024", "two-cards"],
)
def test_block_sizes(config, args, tokens):
    assert predict(config, serving(args)).block_size == tokens


@pytest.mark.parametrize(
    ("profile", "tokens"),
    [
        ("mtp/long", 832), ("mtp/fast", 432), ("dflash2/fast", 448), ("dflash2/fast-k15", 480), ("dflash2/long", 864),
        ("tiny/mtp-long", 416), ("tiny/mtp-fast", 432), ("tiny/dflash2-fast", 448), ("tiny/dflash2-fast-k15", 480),
        ("tiny/dflash2-long", 864), ("tiny/offload", 416), ("tiny-cpu", 640),
    ],
)
def test_the_projects_own_profiles(profile, tokens):
    said = yaml.safe_load((PROFILES / f"{profile}.yaml").read_text(encoding="utf-8"))
    config = models.config(said["model"]["tiny"]) if "tiny" in said["model"] else REAL
    served = serving(said["args"])
    assert predict(config, served, "cuda" if said["needs"]["cuda"] else "cpu").block_size == tokens
    assert tokens <= served.max_num_batched_tokens


@pytest.mark.parametrize("k", range(16))
@pytest.mark.parametrize(("dtype", "b"), [("bfloat16", 4096), ("int8_per_token_head", 2080), ("fp8", 2048)])
def test_the_27b_model_follows_the_formula_of_the_field(dtype, b, k):
    served = Serving(kv_cache_dtype=dtype, speculative_tokens=k, mamba_ssm_cache_dtype="bfloat16")
    assert predict(REAL, served).block_size == 16 * -(-(1_634_304 + 20_480 * k) // (16 * b))


@pytest.mark.parametrize(
    ("log", "config", "args", "kind"),
    [
        ("h200-0.29.0-mtp-align", TINY, [MTP % 3], "cuda"),
        ("h200-0.29.0-mtp-offload", TINY, [MTP % 3], "cuda"),
        ("h200-0.29.0-refused-kv", TINY, [MTP % 3], "cuda"),
        ("cpu-0.28.0-align", CPU, ["--mamba-ssm-cache-dtype=float32"], "cpu"),
        ("cpu-0.29.0-unknown-knob", CPU, ["--mamba-ssm-cache-dtype=float32"], "cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recorded_boots_say_what_was_predicted(log, config, args, kind):
    facts = bootlog.parse((DATA / "boot-logs" / f"{log}.log").read_text(encoding="utf-8").splitlines())
    assert facts.block_size is not None
    assert predict(config, serving(args), kind) == Prediction(facts.block_size, facts.mamba_padding_percent)


def test_the_recorded_run_of_a_card_says_what_its_argv_predicts():
    files = sorted((DATA / "runs" / "h200-smoke" / "table=boots").rglob("*.parquet"))
    boots = [row for file in files for row in parquet.read_table(file).to_pylist()]
    assert len(boots) == 4
    for boot in boots:
        assert predict(TINY, serving(boot["argv"])) == Prediction(boot["block_size"], boot["mamba_padding_percent"])


@pytest.mark.parametrize(
    ("config", "served", "kind", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, Serving(), "cuda", "the block size of LlamaForCausalLM is not known here"),
        ({}, Serving(), "cuda", "a model without an architecture is not known here"),
        (TINY, Serving(mamba_cache_mode="all"), "cuda", "cache mode all"),
        (TINY, Serving(kv_cache_dtype="turboquant_4bit_nc"), "cuda", "how turboquant_4bit_nc is kept"),
        (TINY, Serving(mamba_cache_dtype="float8"), "cuda", "how float8 is kept"),
        (TINY, Serving(speculative_tokens=None), "cuda", "say num_speculative_tokens"),
        ({**TINY, "quantization_config": {"quant_method": "modelopt_fp4"}}, Serving(), "cuda", "say --kv-cache-dtype"),
        (CPU, Serving(), "cpu", "say --mamba-ssm-cache-dtype"),
        (CPU, Serving(), "tpu", "card of kind 'tpu'"),
        ({k: v for k, v in TINY.items() if k != "linear_num_key_heads"}, Serving(), "cuda", "has no 'linear_num_key_heads'"),
    ],
    ids=["other-model", "no-architecture", "all", "packed", "odd-state", "drafter-decides", "checkpoint-decides",
         "cpu-decides", "other-card", "incomplete"],
)
def test_what_cannot_be_predicted_is_said_in_words(config, served, kind, says):
    prediction = predict(config, served, kind)
    assert (prediction.block_size, prediction.padding_percent) == (None, None)
    assert says in prediction.reason


@pytest.mark.parametrize(
    ("config", "served", "tokens"),
    [
        ({**TINY, "dtype": "float32"}, Serving(), 400),  # served in bfloat16
        ({**TINY, "dtype": "float32"}, Serving(dtype="float32"), 400),  # all of it twice as large
        ({**TINY, "mamba_ssm_dtype": "float32"}, Serving(), 784),
        ({**TINY, "mamba_ssm_dtype": "float32"}, Serving(mamba_ssm_cache_dtype="bfloat16"), 400),
        ({**TINY, "architectures": ["Qwen3NextForCausalLM"], "mamba_ssm_dtype": "float32"}, Serving(), 400),  # not read
        (TINY, Serving(mamba_cache_dtype="float32"), 800),  # the window too
        ({**TINY, "head_dim": None}, Serving(), 3200),  # hidden size over heads
    ],
    ids=["downcast", "float32", "config-says", "argument-wins", "qwen3-next", "whole-state", "no-head-dim"],
)
def test_data_types_and_head_sizes(config, served, tokens):
    assert predict(config, served).block_size == tokens


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ([], {}),
        (["--kv-cache-dtype=fp8", "--kv-cache-dtype", "bfloat16"], {"kv_cache_dtype": "bfloat16"}),
        (["--kv_cache_dtype", "fp8", "--mamba_ssm_cache_dtype=float16"],
         {"kv_cache_dtype": "fp8", "mamba_ssm_cache_dtype": "float16"}),
        (["--max-num-batched-tokens=2048"], {"max_num_batched_tokens": 2048}),
        (["--max-num-batched-tokens", "2k"], {"max_num_batched_tokens": 2000}),
        (["--max-num-batched-tokens", "2K"], {"max_num_batched_tokens": 2048}),
        (["--block-size", "64", "-tp", "2", "--mamba-cache-mode=align", "--dtype", "half"],
         {"block_size": 64, "tensor_parallel": 2, "mamba_cache_mode": "align", "dtype": "half"}),
        ([MTP % 3], {"speculative_tokens": 3, "speculative_method": "mtp"}),
        ([MTP % 3, DFLASH % 7], {"speculative_tokens": 7, "speculative_method": "dflash"}),
        (["-sc", '{"method": "ngram", "num_speculative_tokens": 2}'], {"speculative_tokens": 2, "speculative_method": "ngram"}),
        (["--speculative-config.method", "mtp", "--speculative_config.num_speculative_tokens=4"],
         {"speculative_tokens": 4, "speculative_method": "mtp"}),
        (["--spec-method=mtp", "--spec-tokens=5"], {"speculative_tokens": 5, "speculative_method": "mtp"}),
        (["--speculative-config", '{"method": "mtp"}'], {"speculative_tokens": None, "speculative_method": "mtp"}),
        (["/usr/bin/python3", "-m", "vllm.entrypoints.cli.main", "serve", "/m/1", "--served-model-name", "farm", MTP % 1,
          "--uds", "/tmp/s", "--enforce-eager", "--override-generation-config", '{"block-size": 1}'],
         {"speculative_tokens": 1, "speculative_method": "mtp"}),
        (["bash", "single-user/start_qwen.sh"], {}),
    ],
    ids=["none", "last-wins", "underscores", "budget", "2k", "2K", "short-flags", "mtp", "last-json-wins", "sc", "dotted",
         "spec-flags", "unsaid-count", "whole-argv", "script"],
)
def test_serve_arguments(args, fields):
    assert serving(args) == Serving(**fields)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--speculative-config", "{method"], "no JSON: '{method'"),
        (["--speculative-config", "[1]"], "no JSON object"),
        (["--speculative-config", '{"num_speculative_tokens": "three"}'], "'three' is no count"),
        (["--block-size=many"], "--block-size"),
        (["--max-num-batched-tokens=2.5q"], "is no number of tokens"),
        (["--kv-cache-dtype"], "expected one argument"),
    ],
    ids=["no-json", "no-object", "no-count", "no-int", "no-tokens", "cut"],
)
def test_arguments_that_vllm_would_refuse(args, says):
    with pytest.raises(UsageError, match="^serve arguments: ") as caught:
        serving(args)
    assert says in str(caught.value)


# As the scheduler and KV-cache manager of vLLM 0.29.0 count, patched or not; 19,552 was served on a card.
@pytest.mark.parametrize(
    ("prefix", "block", "method", "tokens"),
    [
        (20_000, 416, "mtp", 19_552), (4000, 416, "mtp", 3328), (8320, 416, "mtp", 7904), (8319, 416, "mtp", 7488),
        (900, 416, "mtp", 416), (831, 416, "mtp", 0), (400, 416, "mtp", 0), (20_000, 832, "mtp", 19_136),
        (20_000, 448, "dflash", 19_264), (20_000, 480, "dflash", 19_200), (20_000, 416, "qwen3_5_mtp", 19_552),
        (20_000, 416, None, 19_552),  # vLLM infers the method from the drafter
        (20_000, 416, "ngram", None),
    ],
)
def test_what_a_longer_prompt_finds_cached(prefix, block, method, tokens):
    assert cached_tokens(prefix, block, Serving(speculative_tokens=3, speculative_method=method)) == tokens


def test_what_is_cached_without_a_drafter_is_not_told():
    assert cached_tokens(20_000, 640, Serving()) is None


def test_the_fields_of_serving_are_vllms_defaults():
    assert geometry.serving(()) == Serving()
