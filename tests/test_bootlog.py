"""Boot logs: real ones (trimmed, data/boot-logs) and single lines of other releases."""

from pathlib import Path

import pytest

from farm import bootlog

LOGS = Path(__file__).parent / "data" / "boot-logs"


def log(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("h200-0.29.0-mtp-align", {
            "pool_tokens": 114_297, "pool_pinned": True, "block_size": 416, "mamba_padding_percent": 0.48,
            "backend": "TRITON_ATTN", "kv_layout": "LBNHC", "connector": None, "jit_lines": 3}),
        ("h200-0.29.0-mtp-offload", {
            "pool_tokens": 34_235, "block_size": 416, "kv_layout": "LBHNC", "connector": "OffloadingConnector"}),
        ("cpu-0.29.0-unknown-knob", {
            "pool_tokens": 361_237, "pool_pinned": True, "block_size": 640, "mamba_padding_percent": 22.14,
            "backend": None, "unknown_knobs": ("VLLM_NO_SUCH_KNOB",), "jit_lines": 0}),
        ("cpu-0.28.0-align", {
            "pool_tokens": 361_237, "pool_pinned": True, "block_size": 640, "backend": "CPU_ATTN", "kv_layout": "HND"}),
        ("cpu-0.29.0-mtp-triton-missing", {"pool_tokens": 95_060, "block_size": None, "mamba_padding_percent": 68.42}),
        ("h200-0.29.0-refused-kv", {"pool_tokens": None, "pool_pinned": True, "block_size": 416}),
    ],
)
def test_facts_of_real_boots(name, facts):
    parsed = bootlog.parse(log(name))
    assert {key: getattr(parsed, key) for key in facts} == facts
    assert parsed.gaps == ()


@pytest.mark.parametrize(
    ("lines", "fact", "value"),
    [
        pytest.param(["INFO 01-02 03:04:05 [kv_cache_utils.py:1] GPU KV cache size: 176,020 tokens",
                      "INFO 01-02 03:04:05 [kv_cache_utils.py:2] Maximum concurrency for 65,536 tokens per request: "
                      "2.69x"], "pool_tokens", 176_020, id="0.27 says it in two lines"),
        pytest.param(["(EngineCore pid=1) INFO 01-02 03:04:05 [kv_cache_utils.py:1] CPU KV cache size: 72,247 tokens, "
                      "Maximum concurrency for 49,152 tokens per request: 1.47x"], "pool_tokens", 72_247,
                     id="0.30 names the device"),
        pytest.param(["\x1b[0;36m(EngineCore_DP0 pid=77)\x1b[0;0m INFO 01-02 03:04:05 [kv_cache_utils.py:1] "
                      "GPU KV cache size: 1,664 tokens"], "pool_tokens", 1_664, id="colour and numbered process"),
        pytest.param(["Available KV cache memory: -1.25 GiB"], "pool_pinned", False, id="profiled, negative"),
        pytest.param(["Auto set (3.1/11.8) GiB for KV cache on node 0, with 4.0 GiB requested memory for the worker."],
                     "pool_pinned", False, id="profiled on CPU"),
        pytest.param(["Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN']."],
                     "backend", "FLASH_ATTN", id="backend chosen"),
        pytest.param(["Using TRITON_ATTN backend (selected via --attention-backend)."], "backend", "TRITON_ATTN",
                     id="backend forced on ROCm"),
        pytest.param(["Using AttentionBackendEnum.FLASH_ATTN backend.", "Using AttentionBackendEnum.TRITON_ATTN "
                      "backend.", "Using AttentionBackendEnum.FLASH_ATTN backend."], "backend",
                     "FLASH_ATTN, TRITON_ATTN", id="target and drafter differ"),
        pytest.param(["Unknown vLLM environment variable detected: VLLM_A",
                      "Unknown vLLM environment variable detected: VLLM_B",
                      "Unknown vLLM environment variable detected: VLLM_A"], "unknown_knobs", ("VLLM_A", "VLLM_B", "VLLM_A"),
                     id="an entry for each warning"),
        pytest.param(["Setting attention block size to 400 tokens so the quantized primary KV page covers it.",
                      "Setting attention block size to 864 tokens to ensure that attention page size is >= mamba."],
                     "block_size", 864, id="last block size holds"),
        pytest.param(["Setting attention block size to 512 tokens to ensure that attention page size is >= mamba page "
                      "size."], "mamba_padding_percent", None, id="pages that fit exactly need no padding"),
        pytest.param(["Using CPU Unquantized MoE backend out of potential backends: ['CPU']."], "backend", None,
                     id="an MoE backend is none of attention"),
    ],
)
def test_wordings_of_other_releases(lines, fact, value):
    parsed = bootlog.parse(lines)
    assert getattr(parsed, fact) == value
    assert parsed.gaps == ()


@pytest.mark.parametrize(
    ("line", "gap"),
    [
        ("GPU KV cache size is now 114297 tokens", "pool_tokens"),
        ("Attention block size: 416", "block_size"),
        ("Padding the mamba page by 3 %", "mamba_padding_percent"),
        ("Using flash attention backend", "backend"),
        ("KV cache layout: lbhnc", "kv_layout"),
        ("Creating v2 connector OffloadingConnector", "connector"),
        ("Unknown environment variable: VLLM_X", "unknown_knobs"),
        ("Triton JIT compiled during inference kernel _x", "jit_lines"),
        ("Memory profiling was skipped", "pool_pinned"),
    ],
)
def test_unknown_wording_is_a_gap(line, gap):
    assert bootlog.parse([line]).gaps == (gap,)


def test_a_gap_is_closed_by_a_line_that_is_understood():
    lines = ["To maintain the same effective KV cache size as before, increase --gpu-memory-utilization to 0.9.",
             "GPU KV cache size: 10 tokens", "skipped memory profiling"]
    assert bootlog.parse(lines).gaps == ()


def test_a_server_that_serves_without_having_named_its_pool_leaves_gaps():
    assert bootlog.parse(["(APIServer pid=1) INFO:     Application startup complete."]).gaps == (
        "pool_pinned", "pool_tokens")


@pytest.mark.parametrize("junk", ["", "\x1b[", "(", "((pid=))", "\ufffd\x00", "INFO",
                                  "Traceback (most recent call last):"])
def test_no_line_breaks_the_readers(junk):
    lines = [junk, junk]
    assert bootlog.parse(lines).gaps == ()
    assert bootlog.refusal(lines) is None
    assert bootlog.failure(lines) is None


@pytest.mark.parametrize(
    ("name", "beginning", "end"),
    [
        ("h200-0.29.0-refused-kv", "To serve at least one request with the model's max seq len (65536), (0.8 GiB KV",
         "for more details."),
        ("cpu-0.29.0-refused-allocator", "KV connector OffloadingConnector is incompatible with PYTORCH_CUDA",
         "expandable_segments is automatically disabled)."),
        ("cpu-0.29.0-refused-max-len", "User-specified max_model_len (999999) is greater than the derived",
         "out-of-bounds error."),
        ("cpu-0.29.0-refused-argument", "unrecognized arguments: --no-such-flag 3", ""),
    ],
)
def test_a_refusal_is_told_in_vllms_own_sentence(name, beginning, end):
    sentence = bootlog.refusal(log(name))
    assert sentence is not None
    assert sentence.startswith(beginning)
    assert sentence.endswith(end)


@pytest.mark.parametrize(
    "name", ["h200-0.29.0-died-at-boot", "h200-0.29.0-mtp-align", "cpu-0.29.0-mtp-triton-missing", "cpu-0.28.0-align"])
def test_other_ends_are_no_refusal(name):
    assert bootlog.refusal(log(name)) is None


def test_a_value_error_outside_the_configuration_is_no_refusal():
    lines = ["(EngineCore pid=1) Traceback (most recent call last):",
             '(EngineCore pid=1)   File "/x/vllm/v1/worker/cpu_worker.py", line 3, in f',
             "(EngineCore pid=1) ValueError: Available memory on node 0 (1.0/2.0 GiB) is less than desired"]
    assert bootlog.refusal(lines) is None
    assert bootlog.failure(lines) == "ValueError: Available memory on node 0 (1.0/2.0 GiB) is less than desired"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("h200-0.29.0-died-at-boot", "ModuleNotFoundError: No module named 'flashinfer'"),
        ("cpu-0.29.0-mtp-triton-missing", "TypeError: 'function' object is not subscriptable"),
        ("h200-0.29.0-mtp-align", None),  # holds a traceback, but as a warning
        ("cpu-0.28.0-align", "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
         "See stack trace (above) for the root cause."),  # nothing but the echo of our own TERM
    ],
)
def test_root_cause_of_real_boots(name, cause):
    assert bootlog.failure(log(name)) == cause


def chain(*parts: str) -> list[str]:
    return [line for part in parts for line in part.split("\n")]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        pytest.param(chain("Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 'x'\n",
                           "During handling of the above exception, another exception occurred:\n",
                           "Traceback (most recent call last):\n  File \"a.py\", line 2, in g\nLookupError: no x"),
                     "LookupError: no x", id="a chain ends in its last"),
        pytest.param(["(A pid=1) ERROR 01-02 03:04:05 [a.py:1] Traceback (most recent call last):",
                      "(B pid=2) INFO 01-02 03:04:05 [b.py:1] still loading",
                      "(B pid=2) Traceback (most recent call last):",
                      "(A pid=1) ERROR 01-02 03:04:05 [a.py:1]   File \"a.py\", line 1, in f",
                      "(B pid=2)   File \"b.py\", line 1, in f",
                      "(B pid=2) RuntimeError: Engine core initialization failed. See root cause above.",
                      "(A pid=1) ERROR 01-02 03:04:05 [a.py:1] torch.OutOfMemoryError: CUDA out of memory."],
                     "torch.OutOfMemoryError: CUDA out of memory.", id="processes interleave"),
        pytest.param(["Fatal Python error: Segmentation fault", "", "Thread 0x1 (most recent call first):"],
                     "Fatal Python error: Segmentation fault", id="crash in compiled code"),
        pytest.param(["loading", "Killed"], None, id="no traceback at all"),
    ],
)
def test_root_cause(lines, cause):
    assert bootlog.failure(lines) == cause
