"""The block geometry that a hybrid model is served with, from its config.json and its serve arguments.

Pure.  vLLM gives attention the smallest block whose page holds a recurrent state of the GDN layers, so the block
size follows from head counts, data types and the number of draft tokens, and can be known without a card.  Read off
vLLM 0.29.0, the same in 0.28.0 to 0.32.0 for what is told here:

- `Platform._align_hybrid_block_size` (platforms/interface.py): block = a·ceil(state / (a·token)), a the granularity;
- `gated_delta_net_state_shape`, `gated_delta_net_state_dtype` (model_executor/layers/mamba/mamba_utils.py): the state;
- `Qwen3_5ForConditionalGenerationConfig` (model_executor/models/config.py): `mamba_ssm_dtype` of a model's config;
- `TritonAttentionBackend.customize_spec` (v1/attention/backends/triton_attn.py): scales beside quantised tokens;
- `Scheduler._mamba_block_aligned_split` (v1/core/sched/scheduler.py): chunks, and what a later prompt finds cached.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.errors import UsageError

# Architectures with GDN layers as here described, and whether vLLM reads `mamba_ssm_dtype` of their config.
_GDN = {
    "Qwen3_5ForCausalLM": True, "Qwen3_5ForConditionalGeneration": True, "Qwen3_5MoeForCausalLM": True,
    "Qwen3_5MoeForConditionalGeneration": True, "Qwen3NextForCausalLM": False,
}
_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
# Of one element of a token's keys and values, and of the float32 scale that goes with each head's keys and values.
_KV_BYTES: dict[str, tuple[float, int]] = {
    **{dtype: (size, 0) for dtype, size in _BYTES.items()}, "fp8": (1, 0), "fp8_e4m3": (1, 0), "fp8_e5m2": (1, 0),
    "int8_per_token_head": (1, 4), "fp8_per_token_head": (1, 4), "int4_per_token_head": (0.5, 4),
}
# By Card.kind: tokens that a kernel's block must be a multiple of, and vLLM's block where nothing else is asked for.
_BLOCKS = {"cuda": (16, 16), "cpu": (32, 128)}
_DROPS_A_BLOCK = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})  # SpeculativeConfig.use_eagle
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Serving:
    """What serve arguments say of the geometry; a field's default is vLLM's own where the argument is not given."""

    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    mamba_cache_mode: str | None = None
    block_size: int | None = None
    tensor_parallel: int = 1
    speculative_tokens: int | None = 0  # None: drafts, and the drafter says how many
    speculative_method: str | None = None
    max_num_batched_tokens: int | None = None

    @property
    def drops_last_block(self) -> bool:
        """Whether a prefix hit gives up its last block: so with a drafter that reads the target's hidden states.

        An unnamed method, which vLLM infers from the drafter, counts as one.
        """
        method = self.speculative_method
        return self.speculative_tokens != 0 and (method is None or method in _DROPS_A_BLOCK or method.endswith("_mtp"))


@dataclass(frozen=True)
class Prediction:
    """Tokens a block and how much the state's page is padded to fill it; without them `reason` says why, in words."""

    block_size: int | None = None
    padding_percent: float | None = None  # two decimals, as vLLM prints it
    reason: str = ""


# --- what is served -------------------------------------------------------------------------


def serving(args: Sequence[str]) -> Serving:
    """Read serve arguments as vLLM does: `_` counts as `-` in a flag, the last of two wins, others are passed over.

    Raises UsageError for a value that vLLM would refuse.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, kind in (("kv-cache-dtype", str), ("dtype", str), ("mamba-cache-dtype", str), ("mamba-ssm-cache-dtype", str),
                       ("mamba-cache-mode", str), ("block-size", int), ("max-num-batched-tokens", _count),
                       ("spec-method", str), ("spec-tokens", int)):
        parser.add_argument(f"--{flag}", type=kind)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int)
    parser.add_argument("--speculative-config", "-sc", type=_mapping)
    words, dotted = _apart([re.sub(r"(?<=--)[^=.]*", lambda m: m[0].replace("_", "-"), word, count=1)
                            if word.startswith("--") else word for word in args])
    try:
        given = vars(parser.parse_known_args(words)[0])
    except argparse.ArgumentError as error:
        raise UsageError(f"serve arguments: {error}") from error
    drafts = {**(given.pop("speculative_config") or {}), **dotted}
    method = _first(given.pop("spec_method"), drafts.get("method"))
    tokens = _first(given.pop("spec_tokens"), drafts.get("num_speculative_tokens"))
    if tokens is not None and not str(tokens).isdecimal():
        raise UsageError(f"serve arguments: num_speculative_tokens {tokens!r} is no count")
    return Serving(speculative_tokens=int(tokens) if tokens is not None else None if drafts or method else 0,
                   speculative_method=method, tensor_parallel=_first(given.pop("tensor_parallel_size"), 1),
                   **{name: value for name, value in given.items() if value is not None})


def _apart(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words without `--speculative-config.KEY VALUE`, and those keys."""
    kept: list[str] = []
    dotted: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        head, _, key = flag.partition(".")
        if key and head in ("--speculative-config", "-sc"):
            dotted[key] = value if equals else next(rest, "")
        else:
            kept.append(word)
    return kept, dotted


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"no JSON object: {text[:80]!r}")
    return value


def _count(text: str) -> int:
    """A number of tokens; vLLM takes 2k for 2,000 and 2K for 2,048 too."""
    found = re.fullmatch(r"(\d+)([kmgKMG]?)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return int(found[1]) * _MULTIPLES.get(found[2], 1)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


# --- the block ------------------------------------------------------------------------------


def predict(config: Mapping[str, Any], served: Serving, kind: str = "cuda") -> Prediction:
    """The block size of a model served so on a card of this kind (farm.bench.Card.kind).

    `config` is the model's config.json; a multimodal model's text part is found in it.  Not told, with the reason:
    architectures without GDN layers or unknown, Mamba cache mode `all`, packed KV types, and what only the machine or the
    checkpoint decides.  Not foreseen: FlashAttention 4 (compute capability 10), where heads of 256 take 128-token pages.
    """
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture not in _GDN:
        return Prediction(reason=f"the block size of {architecture or 'a model without an architecture'} is not known "
                                 f"here; known: {', '.join(sorted(_GDN))}")
    text = {**config, **(config.get("text_config") or {})}
    conv, ssm, kv = _dtypes(text, served, _GDN[architecture])
    if reason := _unknown(text, served, kind, ssm):
        return Prediction(reason=reason)
    if odd := [dtype for dtype, known in ((conv, _BYTES), (ssm, _BYTES), (kv, _KV_BYTES)) if dtype not in known]:
        return Prediction(reason=f"how {odd[0]} is kept is not known here")
    try:
        state = _state_bytes(text, served, _BYTES[conv], _BYTES[ssm])
        token = _token_bytes(text, served.tensor_parallel, *_KV_BYTES[kv])
    except KeyError as error:
        return Prediction(reason=f"the model's config.json has no {error}")
    kernel, default = _BLOCKS[kind]
    asked = _first(served.block_size, default)
    step = max(kernel, asked)
    block = max(asked, step * _ceil(state, step * token))
    return Prediction(block, round(100 * (block * token - state) / state, 2))


def _dtypes(text: Mapping[str, Any], served: Serving, reads_config: bool) -> tuple[str, str, str]:
    """Of the convolution's window, of the recurrent matrix, and of keys and values."""
    model = _model_dtype(text, served.dtype)
    conv = model if served.mamba_cache_dtype == "auto" else served.mamba_cache_dtype
    ssm = served.mamba_ssm_cache_dtype
    if ssm == "auto":
        ssm = (reads_config and text.get("mamba_ssm_dtype")) or conv
    return conv, ssm, model if served.kv_cache_dtype == "auto" else served.kv_cache_dtype


def _unknown(text: Mapping[str, Any], served: Serving, kind: str, ssm: str) -> str:
    """What keeps these from leading to a block size; empty where nothing does."""
    if kind not in _BLOCKS:
        return f"blocks on a card of kind {kind!r} are not known here"
    if served.mamba_cache_mode == "all":
        return "Mamba cache mode all takes another way to its block size"
    if served.speculative_tokens is None:
        return "the drafter chooses the number of draft tokens; say num_speculative_tokens"
    if kind == "cpu" and served.mamba_ssm_cache_dtype == "auto" and _BYTES.get(ssm) != 4:
        return "whether a CPU keeps the recurrent state in float32 depends on its AVX512-BF16; say --mamba-ssm-cache-dtype"
    quantisation = text.get("quantization_config") or {}
    if served.kv_cache_dtype == "auto" and str(quantisation.get("quant_method")).startswith("modelopt"):
        return "the checkpoint's quantisation chooses the KV type; say --kv-cache-dtype"
    return ""


def _model_dtype(text: Mapping[str, Any], asked: str) -> str:
    """The type of activations: float32 checkpoints are served in 16 bits unless the arguments say otherwise."""
    if asked != "auto":
        return asked
    said = str(_first(text.get("dtype"), text.get("torch_dtype"), "float32")).removeprefix("torch.")
    return "bfloat16" if said == "float32" else said


def _state_bytes(text: Mapping[str, Any], served: Serving, conv_bytes: int, ssm_bytes: int) -> int:
    """One request's state in one GDN layer: the convolution's window, which drafts lengthen, and the recurrent matrix."""
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    channels = (2 * keys * key_dim + values * value_dim) // served.tensor_parallel
    window = text["linear_conv_kernel_dim"] - 1 + served.speculative_tokens
    return window * channels * conv_bytes + values // served.tensor_parallel * key_dim * value_dim * ssm_bytes


def _token_bytes(text: Mapping[str, Any], tensor_parallel: int, element_bytes: float, scale_bytes: int) -> int:
    """Keys and values of one token in one attention layer."""
    heads = max(1, text["num_key_value_heads"] // tensor_parallel)
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return heads * 2 * (int(head_dim * element_bytes) + scale_bytes)


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


# --- align mode -----------------------------------------------------------------------------


def cached_tokens(prefix_tokens: int, block_size: int, served: Serving) -> int | None:
    """What a longer prompt finds in the prefix cache after its first `prefix_tokens` had been served as a prompt.

    With a drafter that reads the target's hidden states: all whole blocks but the last, where the prefill left its state.
    That holds where all layers have blocks of one size.  A drafter with smaller pages has longer blocks (the tiny DFlash2
    one 896 tokens beside 448), and less is found.  None without such a drafter: vLLM 0.29.0 then keeps states where its
    steps happen to end, and of a prefix of 2,559 tokens none at all (seen on a CPU with blocks of 640).
    """
    return max(0, prefix_tokens // block_size - 1) * block_size if served.drops_last_block else None
