"""Stacks of experts out of stored tensors: their values, and what is held while they are read."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmbuild.builder.graph.materialise import materialise
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.builder.targets.cpu.pack import pack
from llmbuild.builder.targets.cpu.plan import Layout, PackedWeight
from llmbuild.errors import CheckpointError

EXPERTS = {"experts_implementation": "eager"}


def weights_of(checkpoint: Any) -> ModelWeights:
    family = family_of(checkpoint.config)
    return ModelWeights(checkpoint, family, family.translate(checkpoint.config))


@pytest.mark.parametrize(
    ("family", "overrides", "module"),
    [
        ("mixtral", {"num_local_experts": 5}, "mlp"),
        ("qwen2_moe", {"num_experts": 5, "moe_intermediate_size": 7}, "mlp"),
        ("granitemoe", {"num_local_experts": 5}, "block_sparse_moe"),
    ],
)
def test_stacks_are_those_of_the_model(
    hf_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    family: str,
    overrides: dict[str, Any],
    module: str,
) -> None:
    saved = hf_model(family, **EXPERTS, **overrides)
    weights = weights_of(in_memory(saved))
    for index, layer in enumerate(saved.model.model.layers):
        experts = getattr(layer, module).experts
        stacks = {"gate_up": experts.gate_up_proj, "down": experts.down_proj}
        for name, theirs in stacks.items():
            ours = weights.read(f"layers.{index}.mlp.experts.{name}")
            np.testing.assert_array_equal(ours, theirs.detach().numpy())


def test_missing_and_misshapen_experts_are_named(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(hf_model("qwen3_moe", **EXPERTS, num_experts=3, num_experts_per_tok=2))
    stored = checkpoint.stored
    del stored["model.layers.1.mlp.experts.2.up_proj.weight"]
    stored["model.layers.0.mlp.experts.1.down_proj.weight"] = np.zeros((120, 5), np.float32)
    stored["model.layers.0.mlp.experts.3.up_proj.weight"] = np.zeros((768, 120), np.float32)
    with pytest.raises(CheckpointError) as caught:
        weights_of(checkpoint)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.experts.2.up_proj.weight (768, 120);" in message
    assert "not part of the model: model.layers.0.mlp.experts.3.up_proj.weight;" in message
    assert "misshapen: model.layers.0.mlp.experts.1.down_proj.weight: shape is (120, 5)" in message


def _as_gguf(checkpoint: Any, squeeze: bool) -> Any:
    """A Qwen2-MoE checkpoint with the names of GGUF, one stack for each projection."""
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.gate": "ffn_gate_inp",
        "model.layers": "blk",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    stored, count = checkpoint.stored, checkpoint.config["num_experts"]
    for layer in range(checkpoint.config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        for part in ("gate", "up", "down"):
            matrices = [stored.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(count)]
            stored[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack(matrices)
        if squeeze:
            gate = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
            stored[gate] = stored[gate][0]
    for name in list(stored):
        new = name
        for theirs, gguf in names.items():
            new = new.replace(f"{theirs}.", f"{gguf}.")
        stored[new] = stored.pop(name)
    checkpoint.format = "gguf"
    return checkpoint


@pytest.mark.parametrize("squeeze", [False, True])
def test_gguf_stacks_give_the_tensors_of_the_directory(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any], squeeze: bool
) -> None:
    """Files of older converters leave a first dimension of 1 out."""
    saved = hf_model("qwen2_moe", **EXPERTS, num_experts=5, moe_intermediate_size=7)
    expected, ours = weights_of(in_memory(saved)), weights_of(_as_gguf(in_memory(saved), squeeze))
    assert ours.names == expected.names
    for name in ours.names:
        np.testing.assert_array_equal(ours.read(name), expected.read(name), err_msg=name)


class _Measured:
    """A checkpoint whose every read is a new array, so that what is held shows."""

    def __init__(self, checkpoint: Any) -> None:
        self.config, self.format = checkpoint.config, checkpoint.format
        self.tensors, self._read = checkpoint.tensors, checkpoint.read

    def read(self, name: str) -> np.ndarray:
        return np.array(self._read(name))


def _peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        kept = run()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
        return peak
    finally:
        tracemalloc.stop()


def test_reading_and_packing_a_stack_holds_it_once_and_one_expert_or_part(
    hf_model: Callable[..., Any], in_memory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbuild.builder.targets.cpu.pack.PART_BYTES", 1 << 16)
    sizes = {"num_experts": 16, "moe_intermediate_size": 200, "num_hidden_layers": 1}
    saved = hf_model("qwen3_moe", **EXPERTS, **sizes)
    weights = weights_of(_Measured(in_memory(saved)))
    name = "layers.0.mlp.experts.gate_up"
    shape = weights.names[name]
    stack_bytes, expert_bytes = 4 * 16 * 400 * 120, 4 * 200 * 120
    family = family_of(saved.config)
    step: StepGraph = trace(family.translate(saved.config), "fp32")

    def packed() -> int:
        values = materialise(step, name, weights.read)
        weight = PackedWeight(name, shape, "fp32", Layout.TILES_OF_16)
        return sum(part.nbytes for part in pack(weight, [values]))

    slack = 1 << 16
    assert _peak_bytes(lambda: weights.read(name)) < stack_bytes + expert_bytes + slack
    assert _peak_bytes(packed) < stack_bytes + max(expert_bytes, 3 << 16) + slack
