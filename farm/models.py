"""Tiny stand-in models: the real block geometry, dummy weights, one token a byte.

Only configuration and tokenizer are written; weights come from `--load-format dummy`.
The bytes are the same on every machine, so `sha256` identifies a model across rows.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from farm.errors import UsageError

Kind = Literal["qwen3next-cpu", "qwen3_5-gpu", "dflash2-drafter"]
KINDS: tuple[str, ...] = get_args(Kind)
WORDS: Mapping[str, str] = MappingProxyType({
    "qwen3next-cpu": "hybrid target for a CPU (configs/profiles/tiny-cpu.yaml)",
    "qwen3_5-gpu": "hybrid target with the 27B model's head shapes and an MTP layer, for a CUDA card (tiny/mtp-long)",
    "dflash2-drafter": "DFlash2 drafter of qwen3_5-gpu (tiny/dflash2-fast)",
})

BYTES = 256  # token id == byte value below this
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>")  # ids 256, 257, 258, 259
IM_END, END_OF_TEXT, MASK = 257, 258, 259
VOCABULARY = 320  # a multiple of 64: vLLM pads the embedding to that anyway
POSITIONS = 262_144
_WEIGHTS_FROM = 16 * 2**20  # bytes

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ModelFiles:
    """A model directory and the hash of all its files (names and bytes)."""

    path: Path
    sha256: str

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return json.loads((self.path / "config.json").read_text(encoding="utf-8"))


def config(kind: Kind) -> dict[str, Any]:
    """The config.json of that kind.  Raises UsageError for an unknown one."""
    if kind not in _CONFIGS:
        raise UsageError(f"no stand-in model {kind!r}; there are {', '.join(_CONFIGS)} (farm/models.py)")
    return copy.deepcopy(_CONFIGS[kind])


def write_model(kind: Kind, directory: Path) -> ModelFiles:
    """Write the model of that kind below `directory`, in a folder named by its hash.

    The folder's name is neutral on purpose: a path with `dflash` in it changes vLLM's
    speculative method.  Safe beside a second writer: a file appears whole or not at all,
    and always with the same bytes.  Raises UsageError for an unknown kind.
    """
    files = _files(kind)
    sha256 = _sha256(files)
    folder = Path(directory) / sha256[:16]
    _write(files, folder)
    return ModelFiles(folder, sha256)


def write_model_to(kind: Kind, directory: Path) -> ModelFiles:
    """Write the model of that kind into `directory` itself, with the bytes that `write_model` writes.

    The directory is made; one that is there must be empty, or hold this model already.  Raises UsageError for an
    unknown kind, for a directory with anything else in it, and where it cannot be written.
    """
    directory, files = Path(directory), _files(kind)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        strange = sorted(p.name for p in directory.iterdir()
                         if p.name not in files or not p.is_file() or p.read_bytes() != files[p.name])
        if strange:
            raise UsageError(f"{directory} holds what is not this model: {', '.join(strange[:3])}; name a new or empty one")
        _write(files, directory)
    except OSError as error:
        raise UsageError(f"the model cannot be written to {directory}: {error.strerror or error}; name another "
                         "directory") from error
    return ModelFiles(directory, _sha256(files))


def sha256_of(kind: Kind) -> str:
    """The hash that a model of that kind has wherever it is written.  Raises UsageError for an unknown one."""
    return _sha256(_files(kind))


def _files(kind: Kind) -> dict[str, bytes]:
    return {"config.json": _json(config(kind)), **_tokenizer()}


def _sha256(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        beside = folder / f".{name}.{os.getpid()}"
        beside.write_bytes(content)
        beside.replace(folder / name)


def by_path(path: Path) -> ModelFiles:
    """A model that is already on this machine.

    Its hash covers every small file's bytes and, of files above 16 MiB (weights), name and size:
    reading 50 GB before each cell would cost more than it tells.  Raises UsageError where
    there is no model.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise UsageError(f"no model at {path} (no config.json); give model.path in the profile as this machine has it")
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)}\0{size}\0".encode())
        if size <= _WEIGHTS_FROM:
            digest.update(file.read_bytes())
    return ModelFiles(path, digest.hexdigest())


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


# --- tokenizer ------------------------------------------------------------------------------


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2's table).

    Printable Latin-1 bytes stand for themselves, the others for code points from 256 on, in order.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in plain else next(others)) for byte in range(BYTES)]


def _tokenizer() -> dict[str, bytes]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": BYTES + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i, token in enumerate(SPECIAL)
        ],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())}, "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "pad_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False, "model_max_length": POSITIONS, "chat_template": _TEMPLATE,
    }
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}


# --- configurations (DOMAIN.md 6) -----------------------------------------------------------

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT, "bos_token_id": None, "dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False,
    "attention_dropout": 0.0, "use_cache": True,
}
_HYBRID: dict[str, Any] = {
    **_COMMON, "num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
_CONFIGS: dict[str, dict[str, Any]] = {
    # Six GDN and two attention layers; heads cut down, since a CPU pays for each of them.
    "qwen3next-cpu": {
        **_HYBRID, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        # vLLM's Qwen3-Next wants one MoE layer at least: the last.
        "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "mlp_only_layers": list(range(7)),
    },
    # The 27B model's own head shapes, hence its page sizes; one MTP layer.
    "qwen3_5-gpu": {
        **_HYBRID, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "attn_output_gate": True,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    },
    "dflash2-drafter": {
        **_COMMON, "architectures": ["DFlash2DraftModel"], "model_type": "qwen3",
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 128, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 0, "rope_theta": 10_000_000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000},
        "dflash_config": {
            "target_layer_ids": [1, 3, 5], "mask_token_id": MASK, "conv_kernel_size": 3, "conv_group_size": 64,
            "selector_rank": 16, "selector_top_k": 4, "use_swa": False,
        },
    },
}
