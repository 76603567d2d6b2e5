"""Saved models as checkpoints in memory, and as GGUF files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


@dataclass
class MemoryCheckpoint:
    """A checkpoint held in a dict, to take from and add to."""

    config: dict[str, Any]
    stored: dict[str, np.ndarray]
    format: str = "safetensors"
    reads: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(t.shape, "F32") for name, t in self.stored.items()}

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.stored[name]


@pytest.fixture
def in_memory() -> Callable[[Any], MemoryCheckpoint]:
    """What a saved model's files hold, as a checkpoint that a test can alter."""

    def load(saved: Any) -> MemoryCheckpoint:
        return MemoryCheckpoint(saved.config, load_file(saved.path / "model.safetensors"))

    return load


GGUF_MODULES = {  # as GGUF files name them
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def pairs_from_halves(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows as a llama-arch GGUF stores them: element i of a head beside element i + D/2."""
    rows = []
    for head in range(len(tensor) // head_dim):
        for i in range(head_dim // 2):
            rows += [tensor[head * head_dim + i], tensor[head * head_dim + i + head_dim // 2]]
    return np.stack(rows)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """rope_freqs.weight of a llama3 scaling, in float64."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(head_dim // 2):
        turns = original * rope["rope_theta"] ** (-2 * i / head_dim) / (2 * np.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return np.array(divisors, np.float32)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[[Any], Path]:
    """A saved model of family llama, qwen2 or qwen3 as an F32 GGUF file without a tokenizer."""

    def write(saved: Any) -> Path:
        config, path = saved.model.config, tmp_path / "model.gguf"
        head_dim = saved.model.model.layers[0].self_attn.head_dim
        rope = saved.config["rope_parameters"]
        writer = GGUFWriter(path, config.model_type)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
        for name, tensor in load_file(saved.path / "model.safetensors").items():
            if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
                tensor = pairs_from_halves(tensor, head_dim)
            for module, gguf_module in GGUF_MODULES.items():
                name = name.replace(f"{module}.", f"{gguf_module}.")
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
