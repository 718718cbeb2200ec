"""Stand-in models: the same bytes everywhere, one token a byte, the geometry of DOMAIN.md."""

import json
import subprocess
import sys

import pytest

from farm import models
from farm.errors import UsageError

# A change of these is a change of every row's model_sha256: rows before and after do not compare.
SHA256 = {
    "qwen3next-cpu": "7b4a8bcda1b3461e8e8a3b177ede952436fa40969c198e72efce453e1eba50b7",
    "qwen3_5-gpu": "db07a87f06d21f800ce34fde823e8c97f7814a929e2776e9ad213948c172faca",
    "dflash2-drafter": "400f335c9390d304f3a4d9b778f076045eef1cf81cb640a8c27dbd2ae7155b23",
}


def config(kind, tmp_path):
    return json.loads((models.write_model(kind, tmp_path).path / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", models.KINDS)
def test_bytes_are_the_same_on_every_machine(kind, tmp_path):
    assert models.write_model(kind, tmp_path).sha256 == SHA256[kind]


def test_another_process_and_hash_seed_write_the_same(tmp_path):
    code = f"from farm import models; print(models.write_model('qwen3next-cpu', {str(tmp_path)!r}).sha256)"
    other = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
                           capture_output=True, text=True, check=True)
    assert other.stdout.strip() == models.write_model("qwen3next-cpu", tmp_path).sha256


def test_writing_again_changes_nothing(tmp_path):
    first = models.write_model("qwen3next-cpu", tmp_path)
    before = {p.name: p.read_bytes() for p in first.path.iterdir()}
    assert models.write_model("qwen3next-cpu", tmp_path) == first
    assert {p.name: p.read_bytes() for p in first.path.iterdir()} == before
    assert set(before) == {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("kind", models.KINDS)
def test_a_path_never_names_a_speculative_method(kind, tmp_path):
    name = models.write_model(kind, tmp_path).path.name
    assert not any(word in name for word in ("dflash", "eagle", "mtp", "qwen"))


def test_an_unknown_kind_names_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match="no stand-in model 'qwen'; there are qwen3next-cpu"):
        models.write_model("qwen", tmp_path)


@pytest.mark.parametrize("kind", models.KINDS)
def test_a_model_is_written_into_the_very_directory_that_was_named(kind, tmp_path):
    named = tmp_path / "a" / "model"
    written = models.write_model_to(kind, named)
    assert written == models.ModelFiles(named, SHA256[kind]) == models.write_model_to(kind, named)  # again is harmless
    below = models.write_model(kind, tmp_path / "cache").path
    assert {p.name: p.read_bytes() for p in named.iterdir()} == {p.name: p.read_bytes() for p in below.iterdir()}
    assert models.by_path(named).path == named


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"config.json": "{}"}, "holds what is not this model: config.json"),
        ({"model.safetensors": "x", "a": "", "b": "", "c": ""}, "not this model: a, b, c; name a new or empty one"),
    ],
    ids=["another-model", "other-files"],
)
def test_nothing_of_anybody_elses_is_overwritten(there, says, tmp_path):
    for name, text in there.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=says):
        models.write_model_to("qwen3_5-gpu", tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == there


def test_a_place_that_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        with pytest.raises(UsageError, match="cannot be written to .*: (File exists|Not a directory); name another"):
            models.write_model_to("qwen3_5-gpu", tmp_path / place)


def test_an_unknown_kind_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match="no stand-in model 'qwen'"):
        models.write_model_to("qwen", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_config_is_given_as_a_copy():
    models.config("dflash2-drafter")["dflash_config"]["use_swa"] = True
    assert models.config("dflash2-drafter")["dflash_config"]["use_swa"] is False


def test_every_byte_is_one_token_of_its_own_value(tmp_path):
    path = models.write_model("qwen3next-cpu", tmp_path).path
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    # GPT-2's byte table: letters stand for themselves, blank and newline for the code points 0x120 and 0x10A.
    assert [vocabulary[c] for c in "Az0~\u0120\u010a\u00ff"] == [65, 122, 48, 126, 32, 10, 255]
    assert tokenizer["model"]["merges"] == []
    assert [t["id"] for t in tokenizer["added_tokens"]] == [256, 257, 258, 259]
    assert "chat_template" in json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["qwen3next-cpu", "qwen3_5-gpu"])
def test_hybrid_layers(kind, tmp_path):
    layers = config(kind, tmp_path)["layer_types"]
    assert (layers.count("linear_attention"), layers.count("full_attention")) == (6, 2)


def test_the_gpu_model_has_the_page_sizes_of_the_27b_model(tmp_path):
    """State page and token size of DOMAIN.md 1 (bf16): 1,634,304 B + 20,480 B a speculative token; 4,096 B a token."""
    c = config("qwen3_5-gpu", tmp_path)
    heads, keys = c["linear_num_value_heads"], c["linear_num_key_heads"]
    channels = 2 * keys * c["linear_key_head_dim"] + heads * c["linear_value_head_dim"]
    state = heads * c["linear_key_head_dim"] * c["linear_value_head_dim"] * 2
    assert state + (c["linear_conv_kernel_dim"] - 1) * channels * 2 == 1_634_304
    assert channels * 2 == 20_480
    assert 2 * c["num_key_value_heads"] * c["head_dim"] * 2 == 4_096
    assert c["mtp_num_hidden_layers"] == 1


def test_the_cpu_model_has_one_moe_layer(tmp_path):
    c = config("qwen3next-cpu", tmp_path)
    assert sorted(set(range(c["num_hidden_layers"])) - set(c["mlp_only_layers"])) == [7]
    assert c["num_experts"] == 2


def test_the_drafter_fits_its_target(tmp_path):
    drafter, target = config("dflash2-drafter", tmp_path), config("qwen3_5-gpu", tmp_path)
    assert [drafter[k] for k in ("vocab_size", "hidden_size")] == [target[k] for k in ("vocab_size", "hidden_size")]
    assert drafter["dflash_config"]["mask_token_id"] == models.MASK < drafter["vocab_size"]
    assert max(drafter["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"]


def test_the_drafter_has_every_field_of_the_one_that_was_served(tmp_path):
    """DOMAIN.md 6."""
    c = config("dflash2-drafter", tmp_path)
    assert {key: c[key] for key in (
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
        "num_attention_heads", "num_key_value_heads", "layer_types", "sliding_window", "rope_theta", "dflash_config",
    )} == {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048, "rope_theta": 10_000_000,
        "dflash_config": {
            "target_layer_ids": [1, 3, 5], "mask_token_id": 259, "conv_kernel_size": 3, "conv_group_size": 64,
            "selector_rank": 16, "selector_top_k": 4, "use_swa": False,
        },
    }
    assert c["rope_parameters"]["rope_theta"] == c["rope_theta"]  # newer transformers read this one
    assert c["use_sliding_window"] is True  # else transformers drops the window


def test_the_gpu_model_has_the_shape_of_the_one_that_was_served(tmp_path):
    """DOMAIN.md 6."""
    c = config("qwen3_5-gpu", tmp_path)
    assert (c["architectures"], c["hidden_size"], c["num_hidden_layers"]) == (["Qwen3_5ForCausalLM"], 256, 8)
    assert (c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]) == (8, 4, 256)
    assert (c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]) \
        == (16, 48, 128, 128)


def test_a_model_by_path_is_known_by_its_small_files_and_the_sizes_of_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_WEIGHTS_FROM", 8)
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"0123456789")
    first = models.by_path(tmp_path).sha256
    weights.write_bytes(b"9876543210")
    assert models.by_path(tmp_path).sha256 == first
    weights.write_bytes(b"01234567890")
    assert models.by_path(tmp_path).sha256 != first
    (tmp_path / "config.json").write_text("{ }")
    assert len({first, models.by_path(tmp_path).sha256}) == 2


def test_a_path_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no config.json"):
        models.by_path(tmp_path)
