"""The canonical weights of a decoder: every name with its shape, from the config alone.

The names are those of the torch Decoder's parameters.
"""

from collections.abc import Iterator

from llmbuild.builder.models.config import DecoderConfig

Shape = tuple[int, ...]

EMBEDDING, HEAD, HEAD_BIAS = "embed.weight", "lm_head.weight", "lm_head.bias"


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Canonical name -> shape ([out, in]) of every weight of the model, in the model's order."""
    table = (config.vocab_size, config.hidden_size)
    expected: dict[str, Shape] = {EMBEDDING: table}
    if config.learned_positions:
        expected["position_embed.weight"] = (config.max_position, config.hidden_size)
    for layer in range(config.num_layers):
        expected |= {f"layers.{layer}.{name}": shape for name, shape in _layer(config, layer)}
    expected |= dict(_norm("final_norm", config.hidden_size, config))
    if not config.tie_embeddings:
        expected[HEAD] = table
        if config.head_bias:
            expected[HEAD_BIAS] = (config.vocab_size,)
    return expected


def _layer(config: DecoderConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
    if config.pre_norm:
        yield from _norm("attn_norm", hidden, config)
        if not config.shared_norm:
            yield from _norm("mlp_norm", hidden, config)
    if config.post_norm:
        yield from _norm("attn_post_norm", hidden, config)
        yield from _norm("mlp_post_norm", hidden, config)
    if config.qk_norm:
        whole = config.qk_norm == "whole"
        yield from _norm("attention.q_norm", q_size if whole else config.head_dim, config)
        yield from _norm("attention.k_norm", kv_size if whole else config.head_dim, config)
    yield from _linear("attention.q_proj", q_size, hidden, config.qkv_bias)
    yield from _linear("attention.k_proj", kv_size, hidden, config.qkv_bias)
    yield from _linear("attention.v_proj", kv_size, hidden, config.qkv_bias)
    yield from _linear("attention.o_proj", hidden, q_size, config.o_bias)
    if config.attention_sinks:
        yield "attention.sinks", (config.num_heads,)
    if config.has_moe(layer):
        yield from _moe(config)
    else:
        yield from _mlp("mlp", config, config.intermediate_size)


def _moe(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    yield "mlp.router.weight", (moe.num_experts, hidden)
    yield "mlp.experts.gate_up", (moe.num_experts, 2 * moe.expert_size, hidden)
    yield "mlp.experts.down", (moe.num_experts, hidden, moe.expert_size)
    if moe.shared_size:
        yield from _mlp("mlp.shared", config, moe.shared_size)
    if moe.shared_gate:
        yield "mlp.shared_gate.weight", (1, hidden)


def _mlp(name: str, config: DecoderConfig, size: int) -> Iterator[tuple[str, Shape]]:
    hidden, bias = config.hidden_size, config.mlp_bias
    if config.gated_mlp:
        yield from _linear(f"{name}.gate_proj", size, hidden, bias)
    yield from _linear(f"{name}.up_proj", size, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, size, bias)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def _norm(name: str, size: int, config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if config.norm.bias:
        yield f"{name}.bias", (size,)
