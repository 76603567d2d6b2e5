"""What mixture-of-experts families share: names of experts' weights, and the keys that count
them."""

from typing import Any

from llmbuild.builder.models.config import MoeConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES
from llmbuild.builder.models.families.family import Experts, Source, StackedExperts

_ROUTER = "layers.{l}.mlp.router.weight"
_GATE_UP, _DOWN = "layers.{l}.mlp.experts.gate_up", "layers.{l}.mlp.experts.down"
_MLP = "model.layers.{l}.mlp"

# One tensor for each expert's matrix, as published checkpoints of most families have them.
EXPERTS_HF_NAMES: dict[str, Source] = {
    **HF_NAMES,
    _ROUTER: f"{_MLP}.gate.weight",
    _GATE_UP: Experts(
        (f"{_MLP}.experts.{{e}}.gate_proj.weight", f"{_MLP}.experts.{{e}}.up_proj.weight")
    ),
    _DOWN: Experts((f"{_MLP}.experts.{{e}}.down_proj.weight",)),
}

EXPERTS_GGUF_NAMES: dict[str, Source] = {
    **GGUF_NAMES,
    _ROUTER: "blk.{l}.ffn_gate_inp.weight",
    _GATE_UP: StackedExperts(("blk.{l}.ffn_gate_exps.weight", "blk.{l}.ffn_up_exps.weight")),
    _DOWN: StackedExperts(("blk.{l}.ffn_down_exps.weight",)),
    "layers.{l}.mlp.shared_gate.weight": "blk.{l}.ffn_gate_inp_shexp.weight",
    "layers.{l}.mlp.shared.gate_proj.weight": "blk.{l}.ffn_gate_shexp.weight",
    "layers.{l}.mlp.shared.up_proj.weight": "blk.{l}.ffn_up_shexp.weight",
    "layers.{l}.mlp.shared.down_proj.weight": "blk.{l}.ffn_down_shexp.weight",
}


def read_experts(reader: ConfigReader, count_key: str, size_key: str, **features: Any) -> MoeConfig:
    """The number of experts, how many a token has, and their width; features: further fields of
    MoeConfig. Raises ModelError."""
    num_experts = reader.integer(count_key)
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        reader.refuse("num_experts_per_tok", top_k, f"at most {count_key}, {num_experts}")
    return MoeConfig(num_experts, top_k, reader.integer(size_key), **features)


def read_sparse_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Per layer, whether it has experts, in the Qwen spelling: every decoder_sparse_step-th
    layer, mlp_only_layers left out."""
    step = reader.optional_integer("decoder_sparse_step") or 1
    dense = reader.integers("mlp_only_layers")
    return tuple(
        (layer + 1) % step == 0 and layer not in dense
        for layer in range(reader.integer("num_hidden_layers"))
    )


def every_layer(reader: ConfigReader) -> tuple[bool, ...]:
    """Per layer, that it has experts."""
    return (True,) * reader.integer("num_hidden_layers")
