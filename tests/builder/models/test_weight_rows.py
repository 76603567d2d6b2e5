"""Some rows of a canonical tensor: those of the whole, and little else is read for them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.models import weights as weights_module
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.errors import CheckpointError

# Every row is of whole blocks of 32.
SHAPE = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16, "vocab_size": 41}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2}
MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 3, "experts_implementation": "eager"}
QWEN_MIXTURE = {"num_experts": 3, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
QWEN_MIXTURE |= {"experts_implementation": "eager", "shared_expert_intermediate_size": 32}
ROPE = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},  # in GGUF files, Q and K in rotary pairs
    "llama, tied": {"tie_word_embeddings": True},
    "cohere": {},  # rotary pairs in every file
    "phi3": {"pad_token_id": 0, "eos_token_id": 1},  # Q, K and V fused, gate and up fused
    "gpt_neox": {"num_key_value_heads": 6, "rope_parameters": ROPE},  # fused, head by head
    "gpt2": {"num_key_value_heads": 6, "n_inner": 64},  # transposed
    "gemma": {},  # norms as 1 + w
    "mixtral": MIXTURE,  # experts of several tensors, in GGUF files stacks
    "granitemoe": MIXTURE,  # one stack of gate and up
    "qwen2_moe": QWEN_MIXTURE,
}


def weights_of(checkpoint: Any) -> ModelWeights:
    family = family_of(checkpoint.config)
    return ModelWeights(checkpoint, family, family.translate(checkpoint.config))


def ranges_of(count: int) -> Iterator[tuple[int, int]]:
    """All, the ends, runs that begin and end within a head of 16, and whole heads."""
    odd = [(0, 1), (count - 1, count), (1, count), (3, 7), (5, 37), (16, 32), (count // 3, count)]
    yield 0, count
    yield from ((begin, end) for begin, end in odd if 0 <= begin < end <= count)


def check_rows(weights: ModelWeights) -> None:
    for name, shape in weights.names.items():
        whole = weights.read(name)
        assert weights.shape(name) == whole.shape == shape
        for begin, end in ranges_of(len(whole)):
            rows = weights.read_rows(name, begin, end)
            assert rows.dtype == whole.dtype
            np.testing.assert_array_equal(rows, whole[begin:end], err_msg=f"{name} {begin} {end}")
        if weights.stored_grid(name) is not None:
            matrix = weights.read_codes(name)
            for begin, end in ranges_of(len(whole)):
                part = weights.read_codes(name, (begin, end))
                assert part.grid == matrix.grid
                for ours, theirs in zip(part.arrays, matrix.arrays, strict=True):
                    np.testing.assert_array_equal(ours, theirs[begin:end], err_msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_a_directory_are_those_of_the_whole(
    hf_model: Callable[..., Any], model: str
) -> None:
    saved = hf_model(model.split(",")[0], **(SHAPE | MODELS[model]))
    check_rows(weights_of(open_checkpoint(saved.path)))


@pytest.mark.parametrize("kinds", [[Type.F32], [Type.Q4_0, Type.Q8_0, Type.Q4_1, Type.F16]])
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_a_gguf_file_are_those_of_the_whole(
    hf_model: Callable[..., Any], write_gguf: Callable[..., Path], model: str, kinds: list[Type]
) -> None:
    """Stacks of experts have parts of several types, which come as float32 whatever the part."""
    saved = hf_model(model.split(",")[0], **(SHAPE | MODELS[model]))
    check_rows(weights_of(open_checkpoint(write_gguf(saved, kinds=kinds))))


def test_a_tied_head_has_the_embeddings_rows(hf_model: Callable[..., Any]) -> None:
    weights = weights_of(open_checkpoint(hf_model("llama", tie_word_embeddings=True).path))
    assert weights.shape("lm_head.weight") == weights.shape("embed.weight")
    assert weights.has_rows("lm_head.weight")
    ours = weights.read_rows("lm_head.weight", 3, 9)
    np.testing.assert_array_equal(ours, weights.read("embed.weight")[3:9])


@pytest.mark.parametrize(
    ("model", "name", "rows", "stored", "read"),
    [
        ("llama", "attention.q_proj", (5, 37), "self_attn.q_proj.weight", (5, 37)),
        ("cohere", "attention.q_proj", (16, 48), "self_attn.q_proj.weight", (16, 48)),
        ("cohere", "attention.q_proj", (17, 18), "self_attn.q_proj.weight", (18, 19)),
        ("cohere", "attention.k_proj", (5, 32), "self_attn.k_proj.weight", (1, 32)),
        ("cohere", "attention.v_proj", (5, 32), "self_attn.v_proj.weight", (5, 32)),
        ("phi3", "attention.k_proj", (5, 9), "self_attn.qkv_proj.weight", (101, 105)),
        ("phi3", "mlp.up_proj", (1, 64), "mlp.gate_up_proj.weight", (65, 128)),
        ("gpt_neox", "attention.k_proj", (0, 16), "attention.query_key_value.weight", (16, 32)),
    ],
)
def test_no_rows_are_read_but_from_the_first_to_the_last(
    hf_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    model: str,
    name: str,
    rows: tuple[int, int],
    stored: str,
    read: tuple[int, int],
) -> None:
    """Of a head of 16 in pairs, row 1 is stored as 2, and row 5 as 10; row 8 as 1."""
    checkpoint = in_memory(hf_model(model, **(SHAPE | MODELS[model])))
    weights = weights_of(checkpoint)
    assert weights.has_rows(f"layers.1.{name}.weight")
    weights.read_rows(f"layers.1.{name}.weight", *rows)
    (found,) = checkpoint.row_reads
    assert found[0].endswith(f".1.{stored}")
    assert found[1:] == read
    assert checkpoint.reads == []


def test_of_experts_only_those_are_read_that_are_wanted(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("mixtral", **(SHAPE | MIXTURE)))
    weights = weights_of(checkpoint)
    assert weights.has_rows("layers.0.mlp.experts.gate_up")
    weights.read_rows("layers.0.mlp.experts.gate_up", 1, 2)
    parts = [name.split("experts.")[1] for name in checkpoint.reads]
    assert parts == ["1.w1.weight", "1.w3.weight"]
    checkpoint = in_memory(hf_model("granitemoe", **(SHAPE | MIXTURE)))
    weights_of(checkpoint).read_rows("layers.0.mlp.experts.down", 2, 3)
    assert checkpoint.reads == []
    assert [found[1:] for found in checkpoint.row_reads] == [(2, 3)]


def test_what_is_not_made_of_stored_rows_says_so(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("gpt2", **(SHAPE | MODELS["gpt2"])))
    weights = weights_of(checkpoint)
    assert not weights.has_rows("layers.0.attention.q_proj.weight")  # transposed
    assert not weights.has_rows("layers.0.attn_norm.weight")  # a vector
    assert weights.has_rows("embed.weight")
    weights.read_rows("layers.0.attention.q_proj.weight", 0, 1)
    assert checkpoint.row_reads == []


@pytest.mark.parametrize("items", [1, 250, 1 << 20])
def test_a_copied_head_is_compared_in_blocks_to_its_last_row(
    hf_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    items: int,
) -> None:
    monkeypatch.setattr(weights_module, "_DIGESTED_ITEMS", items)
    checkpoint = in_memory(hf_model("llama", tie_word_embeddings=True))
    head = checkpoint.stored["model.embed_tokens.weight"].copy()
    checkpoint.stored["lm_head.weight"] = head
    assert "lm_head.weight" not in weights_of(checkpoint).names
    assert checkpoint.reads == []
    head[-1, -1] += 1
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens"):
        weights_of(checkpoint)
