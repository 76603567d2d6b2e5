"""What a build of several ranks needs of memory, on a model of a billion weights."""

import json
import subprocess
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

pytestmark = pytest.mark.slow

RANKS = 4
RECIPE = """\
version: 1
name: random
model: {source: "path:model"}
precision: bf16
limits: {max_sequence_length: 256, max_step_tokens: 64, max_sequences: 8}
"""
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
BILLION = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192}
TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_size, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Random bf16 weights, written a few MB at a time; returns the recipe."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    words = models.WordLevel({f"t{i}": i for i in range(config["vocab_size"])}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    header, end = {}, 0
    for name, shape in shapes(config):
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(1)
    with (folder / "model" / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in shapes(config):
            for begin in range(0, prod(shape), 1 << 22):
                count = min(prod(shape) - begin, 1 << 22)
                part = rng.standard_normal(count, np.float32) / np.float32(shape[-1] ** 0.5)
                file.write(part.astype(ml_dtypes.bfloat16).tobytes())
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    return recipe


def test_a_build_of_four_ranks_holds_little_more_than_a_quarter_of_the_largest_tensor(
    tmp_path: Path, run_llmbuild: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    def peak_bytes(name: str, **sizes: int) -> float:
        recipe = write_model(tmp_path / name, CONFIG | sizes)
        out = tmp_path / name / "engine"
        done = run_llmbuild("compile", recipe, "-o", out, "--set", f"parallel.tp={RANKS}")
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("peak memory")]
        return float(line.split()[2]) * 1e6

    base = peak_bytes("tiny", num_hidden_layers=2, **TINY)
    peak = peak_bytes("billion", num_hidden_layers=16, **BILLION)
    share = 2 * BILLION["vocab_size"] * BILLION["hidden_size"] / RANKS
    assert peak - base <= 1.3 * share
    whole = (tmp_path / "billion" / "model" / "model.safetensors").stat().st_size
    assert peak < whole / 3
